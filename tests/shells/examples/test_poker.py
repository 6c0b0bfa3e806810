"""`make poker`: what its model knows at the start, and the report of a match."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo2d.tasks.pool import Score
from examples.environments.poker.environment import Poker
from examples.environments.poker.notation import ACTION_TOKENS, POKER_VOCABULARY
from examples.poker.matches import SEED_DISTANCE, summed_up
from examples.poker.tiny_model import make_poker_model

OPTIONS = {"opponent": "call", "stack": 10, "illegal_penalty": 0.5}


def test_the_model_answers_by_actions_and_prefers_none(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_poker_model(tmp_path, rng_seed=0)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    poker = Poker("raise", alphabet="tokens")
    for row in range(10):
        asked = torch.tensor([poker.reset(row, 0).tokens])
        with torch.inference_mode():
            shares = policy(input_ids=asked).logits[0, -1].softmax(-1)[list(ACTION_TOKENS)]
        assert float(shares.sum()) > 0.9
        assert float(shares.min()) > 0.1


def test_the_models_tokenizer_spells_what_the_environment_says(tmp_path: Path) -> None:
    make_poker_model(tmp_path, rng_seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = list(Poker("raise", alphabet="tokens").reset(0, 0).tokens)
    words = " ".join(POKER_VOCABULARY[token] for token in tokens)
    assert tokenizer.decode(tokens) == words
    assert tokenizer(words)["input_ids"] == tokens


def test_a_seed_makes_the_same_weights_again(tmp_path: Path) -> None:
    one, again, other = (tmp_path / name for name in ("one", "again", "other"))
    for directory, seed in ((one, 1), (again, 1), (other, 2)):
        make_poker_model(directory, rng_seed=seed)
    weights = [(each / "model.safetensors").read_bytes() for each in (one, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_match_has_the_interval_of_its_mean() -> None:
    scores = [
        Score(reward, {"won": reward + 0.5 * illegal, "illegal": -0.5 * illegal})
        for reward, illegal in ((10.0, 0), (-10.0, 0), (10.0, 0), (-1.0, 2))
    ]
    match = summed_up(7, "greedy", OPTIONS, scores)
    assert (match.version, match.drawn, match.opponent) == (7, "greedy", "call")
    assert (match.hands, match.stack) == (4, 10)
    # The sample's standard deviation is 9.673, half of it the standard error.
    assert match.mean == pytest.approx(2.25)
    assert match.low == pytest.approx(2.25 - 1.96 * 4.8369, abs=1e-3)
    assert match.high == pytest.approx(2.25 + 1.96 * 4.8369, abs=1e-3)
    assert match.illegal == 0.5


def test_a_match_deals_other_hands_than_training_does() -> None:
    trained = Poker("call", stack=10, alphabet="tokens", rng_seed=0)
    played = Poker("call", stack=10, alphabet="tokens", rng_seed=SEED_DISTANCE, held_out=0.0)
    cards = []
    for poker in (trained, played):
        dealt = set()
        for row in range(200):
            poker.reset(row, row)
            dealt.add((*poker._table._holes, tuple(poker._table._board)))
        cards.append(dealt)
    assert len(cards[0]) == len(cards[1]) == 200
    assert not cards[0] & cards[1]

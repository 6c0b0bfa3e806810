"""The demo's task: seeded prompts, separate held-out prompts, exact-match reward, and the alphabet as a tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Prompt
from echo2d.tasks.sort_digits import (
    EOS,
    HELD_OUT_PROMPTS,
    VOCABULARY,
    SortDigits,
    answer,
    write_tokenizer,
)


def text(prompt: Prompt) -> str:
    return "".join(VOCABULARY[token] for token in prompt.tokens)


def encode(letters: str) -> list[int]:
    return [VOCABULARY.index(letter) for letter in letters]


def test_the_same_index_gives_the_same_prompt_and_others_differ() -> None:
    assert SortDigits(5).prompt(3) == SortDigits(5).prompt(3)
    assert (
        len({text(SortDigits(seed).prompt(index)) for seed in range(5) for index in range(20)})
        == 100
    )


def test_a_prompt_is_digits_and_a_question() -> None:
    prompt = SortDigits().prompt(0)
    assert text(prompt)[:-1].isdigit()
    assert (len(prompt.tokens), text(prompt)[-1], prompt.tags) == (9, ">", {"digits": "8"})


def test_lengths_of_prompts_are_graded() -> None:
    task = SortDigits(digits_min=4, digits_max=6)
    assert {len(task.prompt(index).tokens) - 1 for index in range(50)} == {4, 5, 6}


def test_held_out_prompts_are_fixed_distinct_and_never_trained_on() -> None:
    held_out = [
        SortDigits(1, 4, 4, "heldout").prompt(index).tokens for index in range(HELD_OUT_PROMPTS)
    ]
    assert held_out == [
        SortDigits(2, 4, 4, "heldout").prompt(index).tokens for index in range(HELD_OUT_PROMPTS)
    ]
    assert len(set(held_out)) == HELD_OUT_PROMPTS
    task = SortDigits(1, 4, 4)
    assert not {task.prompt(index).tokens for index in range(5_000)} & set(held_out)


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ([*encode("0123"), EOS], 1.0),
        (encode("0123"), 0.0),
        ([*encode("0123"), EOS, EOS], 0.0),
        ([*encode("0132"), EOS], 0.0),
        ([], 0.0),
    ],
)
def test_only_the_exact_answer_with_its_end_token_has_reward_one(
    output: list[int], reward: float
) -> None:
    prompt = Prompt(encode("3120>"))
    assert SortDigits(digits_min=4).reward(prompt, output) == reward
    assert answer(prompt.tokens) == (*encode("0123"), EOS)


@pytest.mark.parametrize(
    "options",
    [{"digits_min": 3}, {"digits_min": 9}, {"digits_max": 51}, {"split": "test"}],
    ids=str,
)
def test_bad_options_are_the_operators_fault(options: dict[str, Any]) -> None:
    with pytest.raises(OperatorFault, match="sort_digits"):
        SortDigits(**options)


def test_the_tokenizer_has_a_token_for_each_character(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [tokenizer.id_to_token(index) for index in range(len(VOCABULARY))] == list(VOCABULARY)
    assert tokenizer.get_vocab_size() == len(VOCABULARY)
    prompt = SortDigits().prompt(0)
    assert tokenizer.encode(text(prompt)).ids == list(prompt.tokens)
    assert tokenizer.decode(list(prompt.tokens)) == text(prompt)
    assert tokenizer.encode("1<eos>").ids == [*encode("1"), EOS]

"""A task whose right answers are the long ones, and a tiny model that mostly answers too early: for `patience_length`.

    prompt "3 d"  ->  worked out: "2 d' 1 d'' 0 d''' = d''' <eos>"   or, after fewer moves, "= guess <eos>"

A prompt is a number of moves, one of MOVES, and a place on a ring of PLACES. A move decreases the number and goes two
places further. The reward is 1 for an answer that ends with the last place. A guess is right once in PLACES times; a
worked-out answer has two tokens for each move, so prompts with many moves need long answers. For each number of moves,
the prompt of one place is held out.

The model has learned from answers that give up before each move with probability GIVES_UP.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo2d.tasks.base import Prompt
from echo2d.tasks.sort_digits import write_tokenizer

PAD, EOS, EQUALS, PLACE_ZERO = 0, 1, 2, 3
PLACES = 5
MOVES = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32)
HARDEST = 3  # this many of the largest MOVES
COUNT_ZERO = PLACE_ZERO + PLACES
VOCABULARY_SIZE = COUNT_ZERO + MOVES[-1] + 1
MAX_NEW_TOKENS = 96  # the longest right answer without a detour has 67
GIVES_UP = 0.12
STEPS, BATCH, LR = 300, 128, 2e-3  # after them the model is right whenever it does not give up


def prompt_of(moves: int, place: int) -> Prompt:
    tokens = (COUNT_ZERO + moves, PLACE_ZERO + place % PLACES)
    return Prompt(tokens, tags={"moves": str(moves)})


HELD_OUT = [prompt_of(moves, moves) for moves in MOVES]
TRAINED = [prompt_of(moves, moves + other) for moves in MOVES for other in range(1, PLACES)]


def worked_out(prompt: Sequence[int]) -> list[int]:
    """The moves, without the end of the answer."""
    moves, place = prompt[0] - COUNT_ZERO, prompt[1] - PLACE_ZERO
    return [
        token
        for done in range(1, moves + 1)
        for token in (COUNT_ZERO + moves - done, PLACE_ZERO + (place + 2 * done) % PLACES)
    ]


def reward(prompt: Sequence[int], output: Sequence[int]) -> float:
    return float(list(output[-3:]) == [EQUALS, worked_out(prompt)[-1], EOS])


class Walk:
    """The prompts of training."""

    name = "walk"
    stop_token_ids: Sequence[int] = (EOS,)

    def __init__(self, rng_seed: int) -> None:
        self._rng_seed = rng_seed

    def prompt(self, index: int) -> Prompt:
        return random.Random(f"walk {self._rng_seed} {index}").choice(TRAINED)

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        return reward(prompt.tokens, output)


def make_model(cache: Path, rng_seed: int) -> Path:
    """The model's directory under `cache`; it is made now unless it exists."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = cache / f"walk-{rng_seed}"
    if directory.is_dir():
        return directory
    chance = random.Random(f"walk model {rng_seed}")
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE, hidden_size=96, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        max_position_embeddings=128, initializer_range=0.05, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng_seed)
        model: Any = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(STEPS):
        prompts = [each.tokens for each in chance.choices(TRAINED, k=BATCH)]
        rows = [[*prompt, *_shown(prompt, chance)] for prompt in prompts]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        labels = tokens.masked_fill(tokens == PAD, -100)
        labels[:, : len(prompts[0])] = -100
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 30, (STEPS - step) / 100)
        optimizer.zero_grad()
        torch.autograd.backward(model(input_ids=tokens, labels=labels, use_cache=False).loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(directory)
    write_tokenizer(directory)  # a model must have a tokenizer, which is never used here
    return directory


def _shown(prompt: Sequence[int], chance: random.Random) -> list[int]:
    """An answer that the model learns from."""
    whole = worked_out(prompt)
    for done in range(0, len(whole), 2):
        if chance.random() < GIVES_UP:
            return [*whole[:done], EQUALS, PLACE_ZERO + chance.randrange(PLACES), EOS]
    return [*whole, EQUALS, whole[-1], EOS]

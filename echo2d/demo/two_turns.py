"""The demo's game of two turns: sort the digits of the prompt, and try again.

    prompt "31415926>"  ->  answer "11324569<eos>"
    hint  "<31415926>"  ->  answer "11234569<eos>"       the hint begins with "+" if the first answer was right

Prompts and alphabet are those of the task `sort_digits`. The reward is the share of the two answers that are right. The
module also measures how often a model's second answer is right.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2d.tasks.base import Prompt, Reward, Split
from echo2d.tasks.environment import End, Environment, EnvironmentAnswer, Turn
from echo2d.tasks.sort_digits import EOS, PAD, VOCABULARY, SortDigits, answer

if TYPE_CHECKING:
    import torch

RIGHT, WRONG = VOCABULARY.index("+"), VOCABULARY.index("<")
OPENING = WRONG  # the first token of every call of an outside agent


class TwoTurnDigits(Environment):
    """Sort digits, learn whether the answer was right, and sort the same digits again.

    digits_min, digits_max: limits of a prompt's length, which is drawn for each prompt.
    """

    name = "two_turn_digits"
    in_text = False
    stop_token_ids = (EOS,)

    def __init__(
        self, rng_seed: int = 0, digits_min: int = 8, digits_max: int = 8, split: Split = "train"
    ) -> None:
        self._task = SortDigits(rng_seed, digits_min, digits_max, split)
        self._asked: Sequence[int] = ()
        self._first: bool | None = None

    def reset(self, row: int, seed: int) -> Turn:  # noqa: ARG002 - nothing is left to chance
        prompt = self._task.prompt(row)
        self._asked, self._first = prompt.tokens, None
        return Turn(tokens=self._asked, tags=prompt.tags)

    def step(self, given: EnvironmentAnswer) -> Turn | End:
        right = tuple(given.tokens) == answer(self._asked)
        if self._first is None:
            self._first = right
            hint = (RIGHT if right else WRONG, *self._asked)
            return Turn(tokens=hint)
        parts = {"first": float(self._first), "second": float(right)}
        return End(Reward(sum(parts.values()) / 2, parts))

    def save(self) -> bytes:
        return json.dumps([list(self._asked), self._first]).encode()

    def restore(self, state: bytes) -> None:
        self._asked, self._first = json.loads(state)


def second_turn_accuracy(
    directory: Path, prompts: Sequence[Prompt], opening: Sequence[int] = ()
) -> float:
    """The share of prompts that the model in `directory` answers right in its second turn, by greedy decoding in
    float32. All prompts have the same length. opening: tokens that stand before those of the first turn.
    """
    import torch

    from echo2d.demo.tiny_model import load_tiny_model

    model = load_tiny_model(directory)
    asked = torch.tensor([list(prompt.tokens) for prompt in prompts])
    length = asked.shape[1]  # An answer has the same length, with the end token in place of ">".
    asked_first = torch.tensor([[*opening, *prompt.tokens] for prompt in prompts])
    first = _greedy(model, asked_first, length)
    right = _right(first, prompts)
    hints = torch.where(right, RIGHT, WRONG)[:, None]
    second = _greedy(model, torch.cat([asked_first, first, hints, asked], dim=1), length)
    return float(_right(second, prompts).float().mean())


def _greedy(model: Any, tokens: "torch.Tensor", length: int) -> "torch.Tensor":
    """Decode `length` tokens for each row, with PAD behind an end token."""
    import torch

    rows = tokens
    ended = torch.zeros(len(rows), dtype=torch.bool)
    with torch.inference_mode():
        for _ in range(length):
            best = model(input_ids=rows, use_cache=False).logits[:, -1].argmax(-1)
            best = torch.where(ended, PAD, best)
            ended |= best == EOS
            rows = torch.cat([rows, best[:, None]], dim=1)
    return rows[:, tokens.shape[1] :]


def _right(answers: "torch.Tensor", prompts: Sequence[Prompt]) -> "torch.Tensor":
    import torch

    wanted = [list(answer(prompt.tokens)) for prompt in prompts]
    return (answers == torch.tensor(wanted)).all(dim=1)

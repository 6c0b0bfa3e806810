"""How often the demo's model sorts digits right, with and without a second turn."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2d.demo.tiny_model import load_tiny_model
from echo2d.tasks.base import Prompt
from echo2d.tasks.environments.two_turn_digits import RIGHT, WRONG
from echo2d.tasks.sort_digits import EOS, PAD, answer

if TYPE_CHECKING:
    import torch


# What the calls of an agent outside begin with.
OPENING = WRONG


def second_turn_accuracy(
    directory: Path, prompts: Sequence[Prompt], opening: Sequence[int] = ()
) -> float:
    """The share of prompts that the model in `directory` answers right in its second turn, by greedy
    decoding in float32. All prompts have the same length. opening: tokens before the first turn's.
    """
    import torch

    model = load_tiny_model(directory)
    asked = torch.tensor([list(prompt.tokens) for prompt in prompts])
    length = asked.shape[1]  # of an answer, too: a sign less, and the end token
    asked_first = torch.tensor([[*opening, *prompt.tokens] for prompt in prompts])
    first = _greedy(model, asked_first, length)
    right = _right(first, prompts)
    hints = torch.where(right, RIGHT, WRONG)[:, None]
    second = _greedy(model, torch.cat([asked_first, first, hints, asked], dim=1), length)
    return float(_right(second, prompts).float().mean())


def _greedy(model: Any, tokens: "torch.Tensor", length: int) -> "torch.Tensor":
    """So many tokens for each row; PAD behind an end token."""
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

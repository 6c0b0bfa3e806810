"""The task "gym": problems that reasoning-gym generates, scored by their own generator.

A generator makes problem i from (rng_seed, i), so nothing is stored. Problems whose question is
held out never come in training: index i is the first of some candidates that is on its side.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Answer, NoMorePrompts, Split, TextPrompt, TextTask
from echo2d.tasks.rows.split import is_held_out, row_key

# Candidates for one index, over the share of the wanted side: a side has none of them once in
# exp(40) indices.
CANDIDATES = 40
# reasoning-gym wants to know how many problems there will be.
SIZE = 1 << 40


class GymTask(TextTask):
    """Problems that reasoning-gym generates.

    dataset: a generator of reasoning-gym, such as "chain_sum". settings: of the generator.

    prompt: a text with the question in braces. held_out, split: as of the task "rows".
    """

    name = "gym"

    def __init__(
        self,
        dataset: str,
        settings: Mapping[str, Any] | None = None,
        prompt: str = "{question}",
        held_out: float = 0.2,
        split: Split = "train",
        rng_seed: int = 0,
    ) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise OperatorFault("gym: it needs reasoning-gym: pip install 'echo2d[gym]'") from error
        if split not in ("train", "heldout"):
            raise OperatorFault(f'gym: split: expected "train" or "heldout"; found {split!r}')
        if not 0 <= held_out < 1 or (split == "heldout" and not held_out):
            raise OperatorFault(f"gym: held_out: expected 0 to less than 1; found {held_out}")
        try:
            self._problems = reasoning_gym.create_dataset(
                dataset, seed=rng_seed, size=SIZE, **(settings or {})
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise OperatorFault(f"gym: {dataset}: {error}") from error
        self._prompt, self._held_out, self._split = prompt, held_out, split
        share = held_out if split == "heldout" else 1 - held_out
        self._candidates = ceil(CANDIDATES / share)
        self.name = dataset

    def prompt(self, index: int) -> TextPrompt:
        for number in range(index * self._candidates, (index + 1) * self._candidates):
            problem = self._problems[number]
            question = problem["question"]
            key = row_key(question)
            if is_held_out(key, self._held_out) == (self._split == "heldout"):
                break
        else:
            raise NoMorePrompts
        content = self._prompt.format(question=question)
        return TextPrompt([{"role": "user", "content": content}], secret=number, row=key)

    def reward(self, prompt: TextPrompt, answer: Answer) -> float:
        return float(
            self._problems.score_answer(answer.text.strip(), self._problems[prompt.secret])
        )

"""A task whose answers never end by themselves; used by test_handover.py inside a task process."""

from collections.abc import Sequence

from echo2d.tasks.base import Prompt


class LongTask:
    name = "long"
    stop_token_ids = ()

    def prompt(self, index: int) -> Prompt:
        return Prompt([3, 4, 5 + index % 16], secret=index)

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        return float(len(output))

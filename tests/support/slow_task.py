"""A task whose rewards take a while."""

import time
from collections.abc import Sequence

from echo2d.tasks.base import Prompt


class SlowTask:
    name = "slow"
    stop_token_ids: Sequence[int] = ()

    def __init__(self, reward_s: float) -> None:
        self._reward_s = reward_s

    def prompt(self, index: int) -> Prompt:
        return Prompt(tokens=[2, 3, index % 256])

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        time.sleep(self._reward_s)
        return 1.0

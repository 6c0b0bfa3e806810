"""Tasks in text, used inside task processes."""

import asyncio
import time
from pathlib import Path

from echo2d.tasks.base import Answer, NoMorePrompts, Reward, TextPrompt, TextTask
from echo2d.tasks.scorers.base import Expected


class Echo(TextTask):
    """Ask for a number of letters; the reward knows how the answer ended."""

    name = "echo"

    def __init__(self, count: int = 4) -> None:
        self._count = count

    def prompt(self, index: int) -> TextPrompt:
        if index >= self._count:
            raise NoMorePrompts
        return TextPrompt(
            [{"role": "user", "content": "é" * (index + 1)}],
            index,
            {"level": str(index)},
            f"r{index}",
        )

    def reward(self, prompt: TextPrompt, answer: Answer) -> Reward:
        right = answer.text == prompt.messages[0]["content"]
        parts = {"right": float(right), "tokens": float(answer.tokens)}
        return Reward(right - 0.5 * (answer.finish == "length"), parts)


class Judge(TextTask):
    """Rewards that wait, as for a remote judge; "never" and "block" take for ever.

    beside: no reward is given before this many were requested.
    """

    name = "judge"

    def __init__(self, beside: int = 0) -> None:
        self._beside, self._asked = beside, 0
        self._all_asked = asyncio.Event()

    def prompt(self, index: int) -> TextPrompt:
        return TextPrompt([{"role": "user", "content": "?"}])

    async def reward(self, prompt: TextPrompt, answer: Answer) -> float:
        self._asked += 1
        if self._asked >= self._beside:
            self._all_asked.set()
        await self._all_asked.wait()
        await asyncio.sleep(600 if answer.text == "never" else 0)
        if answer.text == "block":
            time.sleep(600)  # noqa: ASYNC251 - it blocks on purpose
        if answer.text == "raise":
            raise ValueError("no")
        return float(len(answer.text))


def list_home(answer: Answer, expected: Expected, home: str) -> float:
    """The number of entries that the task's process sees in this folder."""
    return float(len(list(Path(home).iterdir())))

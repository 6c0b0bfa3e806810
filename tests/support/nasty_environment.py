"""Environments that do what an answer says; used inside task processes.

The first token of an answer is an act. Every step that is executed leaves a line in `directory`.
"""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from echo2d.tasks.base import NoMorePrompts, Reward, Unjudged
from echo2d.tasks.environment import STATE_BYTES_MAX, End, Environment, EnvironmentAnswer, Turn
from echo2d.tasks.served_environment import GIVEN_TOKENS_MAX

ACTS = (
    "go on", "end", "nan", "raise", "unjudged", "kill once", "kill", "hang", "block", "deaf", "big",
    "wide", "lock", "forget", "nothing", "messages", "tools", "text", "program", "wait", "who", "meet",
)  # fmt: skip
ROWS = 1000
MEETING = 64


def act(name: str, *more: int) -> list[int]:
    """The answer that makes the environment do this."""
    return [ACTS.index(name), *more]


class Nasty(Environment):
    name = "nasty"
    in_text = False
    stop_token_ids = (1,)

    def __init__(self, directory: str = "/nowhere") -> None:
        self._directory = Path(directory)
        self.sum = self.row = self.seed = 0

    def reset(self, row: int, seed: int) -> Turn:
        if row >= ROWS:
            raise NoMorePrompts
        self.__dict__ = {"_directory": self._directory, "sum": 0, "row": row, "seed": seed}
        return Turn(tokens=[row, row], tags={"row": str(row)}, row=f"r{row}")

    def step(self, answer: EnvironmentAnswer) -> Turn | End:
        return self._act(ACTS[answer.tokens[0]], answer)

    def save(self) -> bytes | None:
        if getattr(self, "dies", False) and self._first("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        return None if getattr(self, "forgets", False) else super().save()

    def _act(self, name: str, answer: EnvironmentAnswer) -> Turn | End:
        self.sum += sum(answer.tokens[1:])
        self._note(f"{self.row} {name} {self.sum}")
        acts: dict[str, Callable[[], Turn | End | None]] = {
            "end": lambda: End(Reward(float(self.sum), {"seed": float(self.seed)}), [_said("bye")]),
            "nan": lambda: End(float("nan")),
            "raise": _refuse,
            "unjudged": _give_up,
            # It dies after this step, before its result is sent.
            "kill once": lambda: setattr(self, "dies", True),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "hang": lambda: time.sleep(600),
            "block": lambda: time.sleep(600),
            "deaf": self._be_deaf_once,
            "big": lambda: setattr(self, "noise", os.urandom(STATE_BYTES_MAX)),
            "lock": lambda: setattr(self, "lock", threading.Lock()),
            "forget": lambda: setattr(self, "forgets", True),
            "wide": lambda: Turn(tokens=[1] * (GIVEN_TOKENS_MAX + 1)),
            "nothing": Turn,
            "messages": lambda: Turn([_said("hi")]),
            "tools": lambda: Turn(tokens=[1], tools=[{}]),
            "text": lambda: "a turn",  # type: ignore[dict-item,return-value]  # nasty on purpose
            "program": lambda: self._note(str(subprocess.Popen(["sleep", "600"]).pid)),
            "who": lambda: Turn(tokens=[os.getpid()]),
        }
        return acts.get(name, _nothing)() or Turn(tokens=[self.sum])

    def _be_deaf_once(self) -> None:
        """Sleep the first time, and block the signal that would interrupt it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        if self._first("deaf"):
            time.sleep(600)

    def _note(self, line: str) -> None:
        path = self._directory / "notes"
        new = not path.exists()
        with path.open("a") as file:
            file.write(f"{line}\n")
        if new:
            path.chmod(0o666)  # the next process may have another user

    def _first(self, what: str) -> bool:
        """Whether this is the first time in any process."""
        mark = self._directory / what
        if mark.exists():
            return False
        mark.touch()
        return True


class NastyAsync(Nasty):
    """`Nasty` with many episodes at the same time; "wait" takes half a second.

    "meet" ends when MEETING episodes of the process are in it.
    """

    name = "nasty_async"
    met, all_met = 0, asyncio.Event()

    async def step(self, answer: EnvironmentAnswer) -> Turn | End:  # type: ignore[override]
        name = ACTS[answer.tokens[0]]
        if name in ("hang", "wait"):
            await asyncio.sleep(600 if name == "hang" else 0.5)
            name = "go on"
        if name == "meet":
            NastyAsync.met += 1
            if NastyAsync.met >= MEETING:
                NastyAsync.all_met.set()
            await NastyAsync.all_met.wait()
        return self._act(name, answer)


class Talk(Environment):
    """An environment in text. A tool repeats an answer as often as its first word says."""

    name = "talk"

    def reset(self, row: int, seed: int) -> Turn:
        return Turn([_said(f"row {row}")], tools=[{"name": "repeat"}] if row else ())

    def step(self, answer: EnvironmentAnswer) -> Turn | End:
        if answer.tool_calls:
            (call,) = answer.tool_calls
            text = str(call.arguments["text"]) * int(call.arguments["times"])
            return Turn([{"role": "tool", "content": text, "tool_call_id": call.id}])
        if answer.text == "more":
            return Turn([_said("and?")])
        return End(float(len(answer.text)), [_said(answer.finish)])


def _nothing() -> None:
    pass


def _refuse() -> None:
    raise ValueError("no")


def _give_up() -> None:
    raise Unjudged("too hard")


def _said(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}

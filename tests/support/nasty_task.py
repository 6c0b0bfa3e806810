"""A task that does whatever the secret of a prompt says; used by test_pool.py inside task processes."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from echo2d.tasks.base import Prompt, Reward, Unjudged
from echo2d.tasks.pool_child import HEADER, pack

HUGE = 2 << 20
FORGED = pack(["ok", [99.0, {}]])
ACTS = (
    "fine", "raise", "quit", "crash", "hang", "spin", "fork", "detach", "print", "chat", "memory",
    "file", "twice", "forge", "who", "nan", "text", "none", "unjudged", "deaf", "parts", "alarm",
)  # fmt: skip
FIRST_ACT = 1 << 30


def index_of(act: str) -> int:
    """The prompt whose reward does this."""
    return FIRST_ACT + ACTS.index(act)


class NastyTask:
    name = "nasty"
    stop_token_ids = (1,)

    def __init__(self, directory: str = "/nowhere", *, refuse: bool = False) -> None:
        if refuse:
            raise ValueError("I refuse")
        self._directory = Path(directory)

    def prompt(self, index: int) -> Prompt:
        if index < 0:
            os._exit(3)
        if index >= FIRST_ACT:
            return Prompt([1, 2], ACTS[index - FIRST_ACT])
        stuck = self._directory / f"draw-{index}"
        if stuck.is_fifo():
            stuck.write_text(f"{os.getpid()} {os.getppid()}")
            time.sleep(600)
        return Prompt(range(index), secret="fine", tags={"index": str(index)})

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        acts: dict[str, Callable[[], object]] = {
            "raise": lambda: 1 / 0,
            "quit": lambda: sys.exit(0),
            "crash": lambda: os._exit(1),
            "hang": lambda: time.sleep(600),
            "spin": lambda: sum(1 for _ in iter(int, 1)),
            "fork": lambda: self._fork(2),
            "detach": self._detach,
            "print": lambda: [os.write(1, b"x" * HUGE) for _ in range(1024)],
            "deaf": _deaf,
            "unjudged": _unjudged,
            "alarm": lambda: signal.signal(signal.SIGALRM, lambda *_: os._exit(1)),
            "chat": lambda: print("x" * 100_000),  # noqa: T201
            "memory": lambda: bytearray(1 << 34),
            "file": lambda: (self._directory / "big").write_bytes(b"x" * (8 << 20)),
            "twice": lambda: _write_to_all(HEADER.pack(len(FORGED), 1) + FORGED),
            "forge": lambda: _write_to_all(b"\xff\xff\xff\xff" + b"x" * HUGE),
            "who": lambda: (self._directory / "who").write_text(
                f"{os.getpid()} {os.getuid()} {dict(os.environ)}"
            ),
        }
        values: dict[str, object] = {
            "nan": float("nan"),
            "text": "x" * HUGE,
            "none": None,
            "fine": len(output),
            "parts": Reward(0.5, {"form": 1, "length": -0.5}),
        }
        secret = str(prompt.secret)
        if secret in acts:
            acts[secret]()
        return values.get(secret, 0.0)  # type: ignore[return-value]  # nasty on purpose

    def _fork(self, count: int) -> None:
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
            with (self._directory / "pids").open("a") as file:
                file.write(f"{pid}\n")

    def _detach(self) -> None:
        """Start a grandchild whose parent has ended."""
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        os.wait()


def _deaf() -> None:
    """Sleep, and block the signal that would interrupt it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)


def _unjudged() -> None:
    raise Unjudged("too hard for me")


def _write_to_all(data: bytes) -> int:
    written = 0
    for descriptor in range(3, 4096):  # a test process may have many files open
        with contextlib.suppress(OSError):
            written += os.write(descriptor, data)
    return written

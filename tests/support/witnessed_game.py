"""An environment that reports each step to an outside witness before it executes the step.

    step 1 --the tool works for TOOL_S--> the digits again --> step 2 --> ... --> step TURNS --> End

`Witness` listens in the test's process, which is never killed.
"""

import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from echo2d.demo.two_turns import WRONG
from echo2d.tasks.environment import End, Environment, EnvironmentAnswer, Turn
from echo2d.tasks.sort_digits import EOS, SortDigits

TURNS = 3
TOOL_S = 0.03


@dataclass(frozen=True, slots=True)
class Execution:
    """A step that a process of the environment began. at_s: by the clock of this machine."""

    pid: int
    at_s: float
    seed: int
    turn: int
    answer: list[int]


def worth(answers: Sequence[Sequence[int]]) -> float:
    """A reward that tells episodes apart."""
    return sum(map(sum, answers)) % 97 / 97


class WitnessedGame(Environment):
    """Sort the same digits TURNS times. port: where the witness listens."""

    name = "witnessed"
    in_text = False
    stop_token_ids = (EOS,)
    _link: socket.socket | None = None  # of this process

    def __init__(self, port: int) -> None:
        self._port, self._task = port, SortDigits()
        self._row, self._seed = 0, 0
        self._answers: list[list[int]] = []

    def reset(self, row: int, seed: int) -> Turn:
        self._row, self._seed, self._answers = row, seed, []
        return Turn(tokens=self._task.prompt(row).tokens)

    def step(self, given: EnvironmentAnswer) -> Turn | End:
        self._answers.append(list(given.tokens))
        self._tell([os.getpid(), time.time(), self._seed, len(self._answers), list(given.tokens)])
        time.sleep(TOOL_S)
        if len(self._answers) < TURNS:
            return Turn(tokens=(WRONG, *self._task.prompt(self._row).tokens))
        return End(worth(self._answers))

    def save(self) -> bytes:
        return json.dumps([self._row, self._seed, self._answers]).encode()

    def restore(self, state: bytes) -> None:
        self._row, self._seed, self._answers = json.loads(state)

    def _tell(self, fact: list[Any]) -> None:
        cls = type(self)
        cls._link = cls._link or socket.create_connection(("127.0.0.1", self._port))
        # The kernel delivers this even if the process is killed at once.
        cls._link.sendall(json.dumps(fact).encode() + b"\n")


class Witness:
    """Keeps the reports of the environment's processes in `executions`."""

    def __init__(self) -> None:
        self.executions: list[Execution] = []
        keep = self.executions

        class Listen(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    keep.append(Execution(*json.loads(line)))

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Listen)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

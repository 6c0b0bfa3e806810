"""A pool of killable processes that run a task: the data plane.

A call that raises, hangs, crashes, forks, prints without end or answers nonsense is an error of that one call. A
process that did more than raise is killed with all it started, and the next call gets a fresh one. Calls
that were queued behind the guilty one are sent again to the fresh process.

A task process has a session of its own, an empty environment, no descriptor but its socket, limits (`Limits`), can
gain no privilege, and may print OUTPUT_BYTES_MAX per call. Where we are root it has a user id of its own and no
network: only then can it neither read what is ours nor signal us.

Not here: what a prompt or a reward means (`tasks/base.py`), the life of one process (`tasks/process.py`), its own side
of the socket (`tasks/pool_child.py`).
"""

import asyncio
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Prompt
from echo2d.tasks.pool_child import MESSAGE_BYTES_MAX, pack
from echo2d.tasks.process import TaskFailed, TaskProcess

PIPELINED_MAX = 64  # calls sent at once to a process: the replies to them fit into a socket buffer
TASK_UIDS = range(
    65520, 65534
)  # of the pool's processes in turn where we are root: a range that systemd leaves unused


@dataclass(frozen=True, slots=True)
class Score:
    """What an output is worth; finite."""

    reward: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What the kernel allows a task process and, each, what it starts."""

    memory_bytes_max: int = 4 << 30  # address space
    file_bytes_max: int = 64 << 20  # of one file
    files_max: int = 256  # open at once
    processes_max: int = 256  # of the task's user id, threads included; only where we are root
    cpu_s_max: int = 60  # of one call
    network: bool = False  # only kept away where we are root


class TaskPool:
    """Prompts and rewards of one task, made by at most `processes` processes.

    task: a name in `registry.TASKS`, or "module:Class" with a module that this interpreter can import.
    options: keyword arguments of the class, plain values. timeout_s: of one call.
    uid: the user that runs the task; None means each process one of TASK_UIDS where we are root, else our own.
    """

    def __init__(
        self,
        task: str,
        options: Mapping[str, Any] | None = None,
        *,
        processes: int = 1,
        timeout_s: float = 10.0,
        limits: Limits | None = None,
        uid: int | None = None,
    ) -> None:
        uids: Sequence[int | None] = [uid] if uid is not None or os.geteuid() != 0 else TASK_UIDS
        start = ["start", task, dict(options or {}), dataclasses.asdict(limits or Limits())]
        self._processes = [
            TaskProcess(pack([*start, uids[number % len(uids)]]), timeout_s=timeout_s)
            for number in range(processes)
        ]
        self._idle: asyncio.LifoQueue[TaskProcess] = (
            asyncio.LifoQueue()
        )  # the warmest is taken first
        for process in self._processes:
            self._idle.put_nowait(process)
        self._closed = False
        self.name = task
        self.stop_token_ids: tuple[int, ...] = ()

    async def start(self) -> None:
        """Start one process; the others start when they are needed.

        OperatorFault: the task cannot be imported or constructed.
        """
        introduction = await self._processes[-1].start()
        if isinstance(introduction, TaskFailed):
            await self.close()
            raise OperatorFault(f"task {self.name}: {introduction.reason}")
        match introduction:
            case [str() as name, list() as stop_token_ids] if _are_tokens(stop_token_ids):
                self.name, self.stop_token_ids = name, tuple(stop_token_ids)
            case _:
                await self.close()
                raise OperatorFault(
                    f"task {self.name} introduces itself with something else than name and stop tokens"
                )

    async def close(self) -> None:
        """Kill all processes; calls under way fail."""
        self._closed = True
        await asyncio.gather(*(process.kill() for process in self._processes))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def prompt(self, index: int) -> Prompt | TaskFailed:
        """Prompt number `index`."""
        (reply,) = await self._call([["prompt", index]])
        match reply:
            case TaskFailed():
                return reply
            case [list() as tokens, secret, dict() as tags] if tokens and _are_tokens(tokens):
                return Prompt(tuple(tokens), secret, tags)
        return TaskFailed("error", "a malformed prompt")

    async def reward(self, prompt: Prompt, output: Sequence[int]) -> Score | TaskFailed:
        """What the output tokens are worth."""
        (score,) = await self.rewards([(prompt, output)])
        return score

    async def rewards(
        self, calls: Iterable[tuple[Prompt, Sequence[int]]]
    ) -> list[Score | TaskFailed]:
        """As many `reward`s in one go, by one process; results in the order of the calls."""
        replies = await self._call([_reward_request(prompt, output) for prompt, output in calls])
        return [_score(reply) for reply in replies]

    async def _call(self, requests: Sequence[object]) -> list[Any]:
        """One reply or TaskFailed per request."""
        replies: list[Any] = []
        while len(replies) < len(requests):
            packed = _pack_next(requests[len(replies) :])
            if isinstance(packed, TaskFailed):
                replies.append(packed)
                continue
            process = await self._idle.get()
            try:
                replies += (
                    [TaskFailed("error", "the pool is closed")]
                    if self._closed
                    else await process.ask(packed)
                )
            finally:
                self._idle.put_nowait(process)
        return replies


def _reward_request(prompt: Prompt, output: Sequence[int]) -> list[Any]:
    return [
        "reward",
        list(map(int, prompt.tokens)),
        prompt.secret,
        prompt.tags,
        list(map(int, output)),
    ]


def _are_tokens(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _score(reply: Any) -> Score | TaskFailed:
    match reply:
        case TaskFailed():
            return reply
        case float() if math.isfinite(reply):
            return Score(reply)
    return TaskFailed("error", "a malformed reward")


def _pack_next(requests: Sequence[object]) -> list[bytes] | TaskFailed:
    """The first requests, as many as may be sent at once; TaskFailed if already the first is too long."""
    packed: list[bytes] = []
    size = 0
    for request in requests[:PIPELINED_MAX]:
        try:
            message = pack(request)
        except ValueError as error:
            return packed or TaskFailed("error", str(error))
        size += len(message)
        if packed and size > MESSAGE_BYTES_MAX:
            break
        packed.append(message)
    return packed

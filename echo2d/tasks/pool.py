"""Runs a task in a pool of processes that can be killed.

A call that raises, hangs, crashes, forks, prints without end or answers nonsense is an error of
that one call. A process that did more than raise is killed with everything that it started. Calls
queued behind the guilty one are sent again, to a fresh process.

A task process has its own session, an empty environment, the kernel limits of `Limits`, and no open
file but its socket and the three standard ones. It cannot gain privileges. Where the coordinator
runs as root, it also has its own user id and no network; only then can it neither read the
coordinator's files nor signal the coordinator.

Not here: the meaning of prompts and rewards (`base`), the life of one process (`process`), and the
child's side of the socket (`pool_child`).
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

# Calls sent at once to a process. Their replies fit into a socket buffer, so it never blocks on us.
PIPELINED_MAX = 64
# User ids of the pool's processes, in turn, where we are root. systemd leaves this range unused.
TASK_UIDS = range(65520, 65534)


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one output, a finite number."""

    reward: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The kernel's limits for a task process, and for each process that it starts."""

    memory_bytes_max: int = 4 << 30  # address space
    file_bytes_max: int = 64 << 20  # of one file
    files_max: int = 256  # open at once
    # Of the task's user id, threads included. It applies only where we are root.
    processes_max: int = 256
    cpu_s_max: int = 60  # of one call
    # False takes the network away, but only where we are root.
    network: bool = False


class TaskPool:
    """Prompts and rewards of one task, made by at most `processes` processes.

    task: a name in `registry.TASKS`, or "module:Class" of a module that this interpreter can
    import. options: keyword arguments of the class, plain values. timeout_s: of one call. uid: the
    user that runs the task; None: where we are root, one of TASK_UIDS for each process, else our
    own user.
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
        # Last in, first out: a light load keeps few processes busy, and the others never start.
        self._idle: asyncio.LifoQueue[TaskProcess] = asyncio.LifoQueue()
        for process in self._processes:
            self._idle.put_nowait(process)
        self._closed = False
        self.name = task
        self.stop_token_ids: tuple[int, ...] = ()

    async def start(self) -> None:
        """Start one process, to learn the task's name and stop tokens; others start when needed.

        OperatorFault: the task cannot be imported or constructed.
        """
        # The last process is the first that `_idle` will give out.
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
                    f"task {self.name} introduces itself wrongly: expected a string as name and "
                    "integers as stop_token_ids"
                )

    async def close(self) -> None:
        """Kill all processes. Calls under way fail."""
        self._closed = True
        await asyncio.gather(*(process.kill() for process in self._processes))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def prompt(self, index: int) -> Prompt | TaskFailed:
        """Make prompt number `index`."""
        (reply,) = await self._call([["prompt", index]])
        match reply:
            case TaskFailed():
                return reply
            case [list() as tokens, secret, dict() as tags] if tokens and _are_tokens(tokens):
                return Prompt(tuple(tokens), secret, tags)
        return TaskFailed("error", "a malformed prompt")

    async def reward(self, prompt: Prompt, output: Sequence[int]) -> Score | TaskFailed:
        """Compute the reward of one output."""
        (score,) = await self.rewards([(prompt, output)])
        return score

    async def rewards(
        self, calls: Iterable[tuple[Prompt, Sequence[int]]]
    ) -> list[Score | TaskFailed]:
        """Compute many rewards, if possible in one process; return them in order of the calls."""
        replies = await self._call([_reward_request(prompt, output) for prompt, output in calls])
        return [_score(reply) for reply in replies]

    async def _call(self, requests: Sequence[object]) -> list[Any]:
        """Return one reply or TaskFailed per request, in order."""
        replies: list[Any] = []
        while len(replies) < len(requests):
            packed = _pack_next(requests[len(replies) :])
            if isinstance(packed, TaskFailed):
                replies.append(packed)
                continue
            # A process may answer only the first requests, if one of them cost its life. The loop
            # sends the rest again.
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
    # Not `isinstance`: True and False are no tokens.
    return all(type(value) is int for value in values)


def _score(reply: Any) -> Score | TaskFailed:
    match reply:
        case TaskFailed():
            return reply
        case float() if math.isfinite(reply):
            return Score(reply)
    return TaskFailed("error", "a malformed reward")


def _pack_next(requests: Sequence[object]) -> list[bytes] | TaskFailed:
    """Pack as many of the first requests as may be sent at once.

    TaskFailed: already the first one is too long.
    """
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

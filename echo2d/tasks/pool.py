"""Runs a task in a pool of processes that can be killed.

If a call raises, hangs, crashes, forks, prints without end or answers nonsense, only that call fails. If it did
more than raise, its process is killed with everything that the process started. Calls that were queued behind
the guilty one are sent again, to a fresh process.

A task process has its own session, an empty environment, the kernel limits of `Limits`, and no open file except
its socket and the three standard ones. It cannot gain privileges. If the coordinator runs as root, the task
process also has its own user id and no network. Only then is it unable to read the coordinator's files and to
signal the coordinator.

Not here: the meaning of prompts and rewards (`base`), the life of one process (`process`), and the
child's side of the socket (`pool_child`).
"""

import asyncio
import copy
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from echo2d.core.protocol.control_messages import Finish
from echo2d.errors import OperatorFault
from echo2d.tasks.base import Reward
from echo2d.tasks.pool_child import TASK_MESSAGE_BYTES_MAX, pack
from echo2d.tasks.process import TaskFailed, TaskProcess
from echo2d.tasks.served_task import (
    TURN_TEXTS,
    checked_attachments,
    checked_reward,
    checked_tags,
    short_name,
)

# Calls sent at once to a process. Their replies fit into a socket buffer, so it never blocks on us.
PIPELINED_MAX = 64
# Most calls that are under way at once in a concurrent process.
CONCURRENT_MAX = 64


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """A prompt as the task's process made it.

    tokens: packed int32. tags: facts that reach the metrics. row: its name, if it has one. attachments:
    contents by name.
    """

    tokens: bytes
    tags: Mapping[str, str] = field(default_factory=dict)
    row: str = ""
    attachments: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """The answer to prompt `index` whose reward is wanted. tokens: the output, packed int32."""

    index: int
    tokens: bytes
    finish: Finish = "stop"


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one output, a finite number, and the named numbers that it is made of."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """The kernel's limits for a task process, and for each process that it starts."""

    memory_bytes_max: int = 4 << 30  # address space
    file_bytes_max: int = 64 << 20  # bytes of one file
    files_max: int = 256  # open at once
    # Most processes of the task's user id, threads included. The limit applies only if we are root.
    processes_max: int = 256
    cpu_s_max: int = 60  # CPU seconds of one call
    # False takes the network away, but only if we are root.
    network: bool = False
    # Files and directories that the task needs, besides Python's and its own.
    read_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where a task finds what is not in its options."""

    # Its environment variables, beside those that every task has.
    environment: Mapping[str, str] | None = None
    # Relative paths in its options count from this folder.
    folder: Path = Path("/")
    # Absolute paths of folders with the operator's own modules.
    modules: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class TextSettings:
    """How a task in text becomes tokens.

    directory: a model's, with tokenizer.json. template: replaces its chat template. system: the
    first message, if not empty. options: further variables of the template. stops: texts that end an
    answer. turns: "module:function", which makes the `TurnTexts` of an environment from `ModelFiles`.
    day: as in `ModelTexts`.
    """

    directory: str
    template: str | None = None
    system: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    turns: str = TURN_TEXTS
    day: str = ""


@dataclass(frozen=True, slots=True)
class TaskIntroduction:
    """What a task says about itself.

    digest: of its data; empty if it has none. epoch_length: after this many prompts they repeat; None: the task
    does not say. concurrent: its rewards or its turns are `async def`. in_text: echo2d makes its tokens.
    environment: it is played in turns, by `Episodes`. turn_end: the special token that the model's chat
    template puts behind an answer; None: none is known.
    """

    name: str
    stop_token_ids: tuple[int, ...]
    digest: bytes
    epoch_length: int | None
    concurrent: bool
    in_text: bool
    environment: bool = False
    turn_end: int | None = None


class TaskPool:
    """Prompts and rewards of one task, made by at most `processes` processes.

    The processes of an environment are started and ended here, too; see `episodes` for its calls.

    task: a name in `registry.TASKS`, or "module:Class" of a module that this interpreter can
    import. options: keyword arguments of the class, plain values. timeout_s: of one call. texts:
    for a task in text. told: puts a failure into words for people.
    """

    def __init__(
        self,
        task: str,
        options: Mapping[str, Any] | None = None,
        *,
        processes: int = 1,
        timeout_s: float = 10.0,
        limits: Limits | None = None,
        texts: TextSettings | None = None,
        place: TaskPlace | None = None,
        told: Callable[[TaskFailed], str] = str,
    ) -> None:
        place = place or TaskPlace()
        bounds = {**dataclasses.asdict(limits or Limits()), "timeout_s": timeout_s}
        bounds["modules"] = [str(each) for each in place.modules]
        start = ["start", task, dict(options or {}), bounds]
        model = None if texts is None else dataclasses.asdict(texts)

        def request(uid: int | None) -> bytes:
            return pack([*start, uid, model])

        def make() -> TaskProcess:
            return TaskProcess(
                request, timeout_s=timeout_s, environment=place.environment, folder=place.folder
            )

        self._make, self._task, self._told = make, task, told
        self.about = TaskIntroduction(task, (), b"", None, concurrent=False, in_text=False)
        self.take_over([make() for _ in range(processes)])

    def take_over(self, processes: Sequence[TaskProcess]) -> None:
        """Send all calls to these processes from now on."""
        self._processes = processes
        self._spares: list[TaskProcess] = []
        # Last in, first out: a light load keeps few processes busy, and the others never start.
        self._idle: asyncio.LifoQueue[TaskProcess] = asyncio.LifoQueue()
        self._closed = False
        for _ in range(CONCURRENT_MAX if self.about.concurrent else 1):
            for process in processes:
                self._idle.put_nowait(process)

    @property
    def at_once(self) -> int:
        """How many calls of `rewards` can be under way without waiting for each other."""
        return len(self._processes) * (CONCURRENT_MAX if self.about.concurrent else 1)

    @property
    def concurrent(self) -> bool:
        """Whether rewards run beside each other in one process."""
        return self.about.concurrent

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def processes(self) -> Sequence[TaskProcess]:
        return self._processes

    @property
    def printed(self) -> str:
        """The first lines that its processes printed."""
        return b"".join(each.printed for each in self._processes).decode(errors="replace")

    def spare(self) -> TaskProcess:
        """Make one more process, which gets no calls for prompts and rewards. `close` ends it, too."""
        made = self._make()
        made.introduction = self._processes[0].introduction
        self._spares.append(made)
        return made

    @asynccontextmanager
    async def aside(self, processes: int) -> AsyncIterator[Self]:
        """Another pool of the same task, for calls that must not wait behind the calls of this pool."""
        made, others = copy.copy(self), [self._make() for _ in range(processes)]
        for process in others:
            process.introduction = self._processes[0].introduction
        made.take_over(others)
        try:
            yield made
        finally:
            await made.close()

    async def start(self) -> None:
        """Start one process, to learn what the task is; others start when needed.

        OperatorFault: the task cannot be imported or constructed.
        """
        # The last process is the first that `_idle` will give out.
        introduction = await self._processes[-1].start()
        if isinstance(introduction, TaskFailed):
            await self.close()
            raise OperatorFault(f"task {self._task}: {self._told(introduction)}")
        match introduction:
            case [
                str(name),
                list(stop_token_ids),
                bytes(digest),
                length,
                bool(concurrent),
                bool(in_text),
                bool(environment),
                int() | None as turn_end,
            ] if _are_tokens(stop_token_ids) and (length is None or type(length) is int):
                stops = tuple(stop_token_ids)
                self.about = TaskIntroduction(
                    name, stops, digest, length, concurrent, in_text, environment, turn_end
                )
            case _:
                await self.close()
                raise OperatorFault(
                    f"task {self._task} introduces itself wrongly: expected a string as name and "
                    "integers as stop_token_ids"
                )
        # Prompts are asked for by number, so every process, also a later one, must read the same data.
        for process in self._processes:
            process.introduction = introduction
        if self.about.concurrent:
            self.take_over(self._processes)

    async def close(self) -> None:
        """Kill all processes. Calls under way fail."""
        self._closed = True
        await asyncio.gather(*(process.kill() for process in (*self._processes, *self._spares)))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def prompt(self, index: int) -> TaskPrompt | TaskFailed:
        """Make prompt number `index`."""
        (reply,) = [reply async for reply in self._call([["prompt", index]])]
        return parse_prompt(reply)

    async def reward(self, call: ScoreCall) -> Score | TaskFailed:
        """Compute the reward of one output."""
        (score,) = [score async for score in self.rewards([call])]
        return score

    async def judge(self, index: int, text: str) -> Score | TaskFailed:
        """Compute the reward of an answer in text to prompt `index`."""
        (reply,) = [reply async for reply in self._call([["judge", index, text]])]
        return parse_score(reply)

    async def expected(self, index: int) -> tuple[str | None, str] | TaskFailed:
        """The expected answer to prompt `index`, if the task knows one, and where the prompt is from."""
        (reply,) = [reply async for reply in self._call([["expected", index]])]
        match reply:
            case TaskFailed():
                return reply
            case [str() | None as text, str(where)]:
                return text, where
        return TaskFailed("error", "a malformed expected answer")

    async def data_caution(self) -> str:
        """What is odd about the task's data, for people; empty: nothing, or the task does not say."""
        (reply,) = [reply async for reply in self._call([["data_caution"]])]
        return reply if isinstance(reply, str) else ""

    async def rewards(self, calls: Sequence[ScoreCall]) -> AsyncIterator[Score | TaskFailed]:
        """Compute many rewards, if possible in one process; yield them in order of the calls."""
        asked = [["reward", call.index, call.tokens, call.finish] for call in calls]
        async for reply in self._call(asked):
            yield parse_score(reply)

    async def _call(self, requests: Sequence[object]) -> AsyncIterator[Any]:
        """Yield one reply or TaskFailed per request, in order."""
        if self.about.concurrent:
            for reply in await asyncio.gather(*map(self._call_beside_others, requests)):
                yield reply
            return
        done = 0
        while done < len(requests):
            packed = _pack_next(requests[done:])
            if isinstance(packed, TaskFailed) or self._closed:
                yield packed if isinstance(packed, TaskFailed) else _CLOSED
                done += 1
                continue
            # If one of the requests ends the process, the later ones get no reply. The loop sends these again.
            async with self._process() as process, aclosing(process.ask(packed)) as replies:
                async for reply in replies:
                    yield _CLOSED if self._closed else reply
                    done += 1

    async def _call_beside_others(self, request: object) -> Any:
        packed = _pack_next([request])
        if isinstance(packed, TaskFailed):
            return packed
        async with self._process() as process:
            return _CLOSED if self._closed else await process.ask_beside_others(packed[0])

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[TaskProcess]:
        process = await self._idle.get()
        try:
            yield process
        finally:
            self._idle.put_nowait(process)


_CLOSED = TaskFailed("error", "the pool is closed")


def _are_tokens(values: list[Any]) -> bool:
    # `isinstance` would accept True and False, which are no tokens.
    return all(type(value) is int for value in values)


def parse_prompt(reply: Any) -> TaskPrompt | TaskFailed:
    """The prompt that a process made. The process may be hostile, so its own checks do not count."""
    match reply:
        case TaskFailed():
            return reply
        case [bytes(tokens), dict(tags), str(row), dict(attached)] if (
            len(tokens) % 4 == 0
            and all(type(each) is str for pair in tags.items() for each in pair)
            and all(type(k) is str and type(v) is bytes for k, v in attached.items())
        ):
            with suppress(ValueError):
                attached = checked_attachments(attached)
                return TaskPrompt(tokens, checked_tags(tags), short_name(row), attached)
    return TaskFailed("error", "a malformed prompt")


def parse_score(reply: Any) -> Score | TaskFailed:
    """The score that a process gives an answer or an episode."""
    match reply:
        case TaskFailed():
            return reply
        case [float(value), dict(parts)] if all(
            type(name) is str and type(part) is float for name, part in parts.items()
        ):
            with suppress(ValueError):
                return Score(*checked_reward(Reward(value, parts)))
    return TaskFailed("error", "a malformed reward")


def _pack_next(requests: Sequence[object]) -> list[bytes] | TaskFailed:
    """Pack as many of the first requests as may be sent at once.

    TaskFailed: even the first one is too long.
    """
    packed: list[bytes] = []
    size = 0
    for request in requests[:PIPELINED_MAX]:
        try:
            message = pack(request)
        except ValueError as error:
            return packed or TaskFailed("error", str(error))
        size += len(message)
        if packed and size > TASK_MESSAGE_BYTES_MAX:
            break
        packed.append(message)
    return packed

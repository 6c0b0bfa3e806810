"""The process that runs a task. Its parent starts, limits and kills it (`process`, `pool`).

Parent and child exchange messages over one socket; a message is a header and msgpack. The child answers
requests one by one, in order, each under its number. If the task has `async def reward`, a request is answered
when its reward is ready:

    ["start", task, options, limits, uid, texts]  ->  ["ok", introduction]     once, before others
    ["prompt", index]                             ->  ["ok", [tokens, tags, row, attachments]]
                                                      or ["end", ""]
    ["reward", index, output, finish]             ->  ["ok", [value, parts]] or ["unjudged", reason]

or ["error", reason], or ["timeout", reason], or ["broken", reason] for an error after which this process should
be killed. Tokens are packed int32. The parent does not send a prompt back with its answer: if prompt `index` is
not among the last ones, the task makes it again.

An environment has episodes instead of prompts and rewards; the parent numbers them:

    ["reset", episode, row, seed]                 ->  ["ok", [*turn, tags, row]] or ["end", ""]
    ["step", episode, turns, state, transcript, answer, finish]
                                                  ->  ["ok", turn] or ["ok", [*end]]
    ["drop", episode]                             ->  ["ok", []]

    turn: ["turn", given tokens, state or nil, why there is none, "" or "word: detail" of a branch]
    end:  ["end", value, parts, last word]

turns: answers before this one. state: the state after these answers, for a process that does not have the
episode; without a state such a process replies ["died", reason]. transcript: all tokens before the answer, if
the environment is in text. A branch: the new messages cannot follow these tokens, so the given tokens are the
whole conversation. ["no_continuation", "word: detail"]: the whole conversation could not be made either. Every
reply except "ok" ends the episode.

    parent --SIGTERM, or its death--> guard --SIGKILL--> task process and all that it started

The started process forks and stays behind as the guard. It runs none of the task's code, adopts the
processes that the task process leaves, and ends when all of them are gone. So every process that a task starts,
in any session, ends with the task.

The task's module is imported while the process still has the parent's user id, which can read the
installation. Construction, prompts and rewards run under the task's user id.

Imports of this module make up the start-up time of a task process, so it imports little.
"""

import asyncio
import contextlib
import math
import os
import resource
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgpack

from echo2d.errors import OperatorFault
from echo2d.own_modules import load_own, place_in, place_of
from echo2d.registry import TASKS
from echo2d.tasks.base import NoMorePrompts, Task, TextTask, Unjudged
from echo2d.tasks.confinement import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, confine, prctl
from echo2d.tasks.environment import Environment, EpisodeLost
from echo2d.tasks.served_task import ModelFiles, ServedTask
from echo2d.texts.continuation import NoContinuation

if TYPE_CHECKING:
    from echo2d.tasks.served_environment import ServedEnvironment

# A task's module may import a lot and index many rows. A start that takes longer than this is interrupted.
TASK_START_S_MAX = 590.0
TASK_MESSAGE_BYTES_MAX = 1 << 20  # a prompt and an answer of 100,000 tokens each fit
TASK_REASON_CHARS_MAX = 500  # enough for the text of an exception; it ends up in logs
# The length of the body, and the number of the request; a reply has the number of its request.
HEADER = struct.Struct(">II")
LATE = "no answer in "
NUMBER_MAX = (1 << 32) - 1


TaskReply = tuple[str, Any]
_REWARDS = ("reward", "judge")


def main(descriptor: int) -> None:
    """Serve the socket until the parent closes it."""
    link = socket.socket(fileno=descriptor)
    guard(link)
    server = TaskServer()
    with link.makefile("rb") as stream:
        for number, request in _requests(stream):
            body = _packed(server.answer(request))
            link.sendall(HEADER.pack(len(body), number) + body)
            if server.concurrent:  # nothing was sent after "start" so far
                asyncio.run(serve_concurrently(link, server))


def guard(link: socket.socket) -> None:
    """Fork. The child returns and runs the task; the parent stays here as its guard and exits.

    The guard kills the child at SIGTERM or when its own parent dies.
    """
    # Blocked signals stay pending for `sigwait`, so none can be lost before it is called.
    wakes = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, wakes)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    parent, task = os.getppid(), os.fork()
    if task == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wakes)
        os.setsid()
        return
    # Only the child may hold the socket, so that the parent reads the end of the file when the child ends.
    link.close()
    while os.getppid() == parent and signal.sigwait(wakes) == signal.SIGCHLD and not _ended(task):
        pass
    while _kill_children():
        # Processes may start others while the guard kills them, so it looks again every 10 ms.
        signal.sigtimedwait({signal.SIGCHLD}, 0.01)
    os._exit(0)


def _ended(child: int) -> bool:
    """Return whether this child has ended. The SIGCHLD may have been for an adopted child instead."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_children() -> bool:
    """Kill and reap all present children; return whether any is left to reap."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the last ")" may hold blanks and brackets; the parent's id follows it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
        return True
    return False


class TaskServer:
    """Answers requests with the task that the first one names. It raises none of the task's exceptions."""

    def __init__(self) -> None:
        self._task: ServedTask | None = None
        self._environment: ServedEnvironment | None = None
        self._limits: Mapping[str, Any] = {
            "cpu_s_max": resource.RLIM_INFINITY,
            "timeout_s": TASK_START_S_MAX,
        }
        self._allowed: int | None = None  # the last limit of CPU time, in seconds
        self._answering = False
        self._complaint = ""  # reason for the next interruption of a call
        self._copied = False
        os.register_at_fork(after_in_child=self._note_copy)

    @property
    def _late(self) -> str:
        return f"{LATE}{self._limits['timeout_s']:g} s"

    @property
    def concurrent(self) -> bool:
        """Whether calls may run at the same time."""
        served = self._task or self._environment
        return served is not None and served.concurrent

    def answer(self, request: list[Any]) -> TaskReply:
        self._allow_cpu()
        try:
            with self._in_time(self._limits["timeout_s"], self._late):
                reply = self._perform(request)
        # SystemExit too is an error of this request only.
        except BaseException as error:  # noqa: BLE001
            reply = self._failed(error, request)
        self._end_copies()
        # Processes that an environment starts may live on between its turns.
        if self._environment is None and _has_children():
            return "broken", "it left processes behind"
        return reply

    async def answer_beside_others(self, request: list[Any]) -> TaskReply:
        self._allow_cpu()
        try:
            async with asyncio.timeout(self._limits["timeout_s"]) as limit:
                reply: TaskReply = "ok", await self._interruptible(self._perform_later(request))
        except BaseException as error:  # noqa: BLE001
            reply = ("timeout", self._late) if limit.expired() else self._failed(error, request)
        self._end_copies()
        return reply

    async def _perform_later(self, request: list[Any]) -> list[Any]:
        if self._environment is not None:
            return await self._environment.answer(request)
        match request:
            case ["reward", index, output, finish] if self._task is not None:
                return await self._task.reward_later(index, output, finish)
            case ["judge", index, text] if self._task is not None:
                return await self._task.judge_later(index, text)
        value: list[Any] = self._perform(request)[1]
        return value

    @types.coroutine
    def _interruptible(self, work: Coroutine[Any, Any, list[Any]]) -> Generator[Any, Any, Any]:
        """Await `work`. If it computes for too long without waiting, it is interrupted.

        It may compute for half of `timeout_s` at a time, because meanwhile the time of all other calls passes too.
        """
        go_on: Callable[[Any], Any] = work.send
        value: Any = None
        half_s = self._limits["timeout_s"] / 2
        while True:
            try:
                with self._in_time(half_s, f"it blocked its process for {half_s:g} s"):
                    waits_for = go_on(value)
            except StopIteration as ended:
                return ended.value
            try:
                go_on, value = work.send, (yield waits_for)
            # Pass the exception to the work, also a cancellation.
            except BaseException as error:  # noqa: BLE001
                go_on, value = work.throw, error

    def _failed(self, error: BaseException, request: list[Any]) -> TaskReply:
        """The reply to a request that raised this: with the row and the place, if the task is to blame."""
        kind, reason = _failed(error, request[0])
        if kind not in ("error", "unjudged"):
            return kind, reason
        where, (at, trace) = "", place_of(error)
        if self._task is not None:
            where = self._task.where(request)
            call = request[0]
            if (
                not at
                and call in (*_REWARDS, "prompt")
                and (code := self._task.code(call)) is not None
            ):
                # The function raised nothing, but did not return a number or a prompt.
                at = place_in(code, code.co_firstlineno)
        return kind, [reason, where, at, trace]

    def _perform(self, request: list[Any]) -> TaskReply:
        match request:
            case ["start", task, options, limits, uid, texts]:
                self._limits = limits
                # These folders come after all installed modules, because a file in them must not replace a library.
                sys.path += limits["modules"]
                make = _import(task)
                # The model is read while this process may still read all files.
                model = None if texts is None else ModelFiles.read(texts)
                reads: list[str] = []
                if hasattr(make, "locate"):
                    options, reads = _called(make.locate, options)
                confine(limits, uid, [*limits["read_paths"], *reads], limits["modules"])
                return "ok", self._serve(lambda: _called(make, options), model)
            case _ if self._environment is not None:
                return "ok", self._environment.answer_at_once(request)
            case ["prompt", index] if self._task is not None:
                return "ok", self._task.prompt(index)
            case ["reward", index, output, finish] if self._task is not None:
                return "ok", self._task.reward(index, output, finish)
            case ["judge", index, text] if self._task is not None:
                return "ok", self._task.judge(index, text)
            case ["expected", index] if self._task is not None:
                return "ok", self._task.expected(index)
            case ["data_caution"] if self._task is not None:
                return "ok", self._task.data_caution()
            case _:
                raise ValueError("an unknown request")

    def _serve(self, make: Callable[[], Any], model: ModelFiles | None) -> list[Any]:
        """Return the introduction of what is served from now on."""
        made = make()
        if not isinstance(made, Environment):
            for name in ("name", "prompt", "reward"):
                if not hasattr(made, name):
                    raise OperatorFault(
                        f"{type(made).__name__} has no {name!r}: expected a task or an environment, as "
                        "docs/guide/tasks.md says"
                    )
            self._task = ServedTask(made, model)
            return self._task.introduction()
        # Imported here because a task without turns starts faster without it.
        from echo2d.tasks.served_environment import ServedEnvironment

        self._environment = ServedEnvironment(made, make, model)
        return self._environment.introduction()

    @contextlib.contextmanager
    def _in_time(self, time_s: float, complaint: str) -> Iterator[None]:
        """Interrupt the block after `time_s`; 0: never. Only Python code can be interrupted.

        The timer is not stopped after the block, unless the task set a handler of its own: a cheap
        reward would take noticeably longer with one more system call.
        """
        if signal.getsignal(signal.SIGALRM) != self._interrupt:
            signal.signal(signal.SIGALRM, self._interrupt)
        self._answering, self._complaint = True, complaint
        signal.setitimer(signal.ITIMER_REAL, time_s)
        try:
            yield
        finally:
            self._answering = False
            if signal.getsignal(signal.SIGALRM) != self._interrupt:
                signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _interrupt(self, *_: object) -> None:
        if self._answering:
            raise OutOfTime(self._complaint)

    def _note_copy(self) -> None:
        self._copied = True

    def _end_copies(self) -> None:
        """End this process if it is a fork that the task made: only the original process may answer."""
        if self._copied:
            os._exit(0)

    def _allow_cpu(self) -> None:
        """Allow `cpu_s_max` more seconds of CPU time. After them SIGXCPU ends this process."""
        soft = self._limits["cpu_s_max"]
        if soft != resource.RLIM_INFINITY:
            soft += math.ceil(time.process_time())
        if soft != self._allowed:  # most requests come in the same second as the last one
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
            self._allowed = soft


class OutOfTime(BaseException):
    """This call took too long. A task that catches every Exception does not catch this one."""


def _failed(error: BaseException, call: str) -> TaskReply:
    """The reply to a request that raised `error`. call: the name of the request."""
    of_episode, reason = call in ("reset", "step"), str(error)[:TASK_REASON_CHARS_MAX]
    match error:
        case NoMorePrompts() if call in ("prompt", "reset"):
            return "end", reason
        case Unjudged() if call in _REWARDS or of_episode:
            return "unjudged", reason
        case OutOfTime() if call in _REWARDS:
            return "unjudged", reason
        case OutOfTime() if of_episode:
            return "timeout", reason
        case NoContinuation() if of_episode:
            return "no_continuation", f"{error.reason}: {error.detail}"[:TASK_REASON_CHARS_MAX]
        case EpisodeLost() if of_episode:
            return "died", reason
        case OperatorFault():
            return "error", reason
    return "error", f"{type(error).__name__}: {error}"[:TASK_REASON_CHARS_MAX]


async def serve_concurrently(link: socket.socket, server: TaskServer) -> None:
    """Answer requests as their answers come, until the parent closes the socket."""
    reader, writer = await asyncio.open_connection(sock=link)

    async def answer(number: int, request: list[Any]) -> None:
        body = _packed(await server.answer_beside_others(request))
        writer.write(HEADER.pack(len(body), number) + body)

    async with asyncio.TaskGroup() as answers:
        while True:
            try:
                length, number = HEADER.unpack(await reader.readexactly(HEADER.size))
                request = msgpack.unpackb(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                os._exit(0)
            answers.create_task(answer(number, request))


def pack(message: object) -> bytes:
    """Encode the body of one message.

    ValueError: it is longer than TASK_MESSAGE_BYTES_MAX. TypeError: it holds values that are not plain.
    """
    body: bytes = msgpack.packb(message)
    if len(body) > TASK_MESSAGE_BYTES_MAX:
        raise ValueError(
            f"a message of {len(body)} bytes is over the limit of {TASK_MESSAGE_BYTES_MAX}"
        )
    return body


def _packed(reply: TaskReply) -> bytes:
    try:
        return pack(reply)
    except (TypeError, ValueError, OverflowError) as error:
        return pack(("error", f"{type(error).__name__}: {error}"[:TASK_REASON_CHARS_MAX]))


def _called(make: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Call `make` with these options. OperatorFault: it does not take them."""
    try:
        return make(**options)
    except TypeError:
        # Imported here, because a task that starts does not need it.
        import inspect

        try:
            inspect.signature(make).bind(**options)
        except TypeError as error:
            raise OperatorFault(f"task.options: {error}") from error
        except ValueError:
            pass  # `make` has no signature
        raise


def _import(task: str) -> Callable[..., Task | TextTask | Environment]:
    """Import a task. OperatorFault: there is no such task."""
    module, _, name = task.partition(":")
    # The registry knows echo2d's own tasks by a short name; any other is "module:Class".
    if task not in TASKS and not (module and name):
        raise OperatorFault(
            f"expected a task of echo2d ({', '.join(TASKS)}), or yours as package.module:Class"
        )
    made: Callable[..., Task | TextTask | Environment] = load_own(TASKS.get(task, task))
    return made


def _has_children() -> bool:
    """Reap at most one ended child; return whether there was any child, ended or not."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _requests(stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of each request until the parent closes the socket."""
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        length, number = HEADER.unpack(header)
        body = stream.read(length)
        if len(body) < length:
            return
        yield number, msgpack.unpackb(body)

"""One task process as its parent sees it: started, asked, and killed at the first malformed answer.

      none --ask--> running --all replies, in time--> running
                       |
                       | timeout, end of file, malformed answer, "broken", too much output,
                       v or the asking task is cancelled
                     none

A process answers requests one by one, in order, so the first one without a reply is to blame. A
*concurrent* process, whose rewards are `async def`, answers each request when it is done; if it dies,
all its open requests fail.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgpack

from echo2d.core.base.codec import ITEMS_MAX, VALUES_MAX, values_counter
from echo2d.errors import OperatorFault
from echo2d.own_modules import TRACE_CHARS_MAX
from echo2d.tasks.pool_child import (
    HEADER,
    NUMBER_MAX,
    TASK_MESSAGE_BYTES_MAX,
    TASK_REASON_CHARS_MAX,
    TASK_START_S_MAX,
)
from echo2d.tasks.user_ids import BorrowedUser

OUTPUT_BYTES_MAX = 1 << 20  # stdout and stderr of one call; only the first lines are kept
# The process itself interrupts a call that is not over in time, and goes on. If the call cannot be
# interrupted, the process is killed this much later.
GRACE_S = 1.0
_FAILURE_TEXTS = 4
# `-I` ignores the user's settings and paths, so the child gets this interpreter's module path.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from echo2d.tasks.pool_child import main; main(int(sys.argv[2]))"
)

FailureKind = Literal["error", "unjudged", "end", "timeout", "died", "no_continuation"]


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A call without a result.

    kind "error": the task raised an exception, or its answer was malformed. "unjudged": the answer
    cannot be judged. "end": there are no more prompts. "timeout": the call did not end in time. "died":
    the process ended. "no_continuation": the texts of an episode cannot go on, and the reason begins
    with a word for a counter.
    """

    kind: FailureKind
    reason: str  # at most TASK_REASON_CHARS_MAX characters, mostly the child's own words
    where: str = field(default="", compare=False)  # the row, if a prompt is to blame
    # File, line and function of the task where it raised.
    at: str = field(default="", compare=False)
    trace: str = field(default="", compare=False)  # the traceback from there

    def __str__(self) -> str:
        row, place = f"{self.where}: " if self.where else "", f" ({self.at})" if self.at else ""
        return f"{row}{self.reason}{place}"


class TaskProcess:
    """See the module docstring.

    start_request: makes the first request to every fresh process. The request names the task and the process's
    user id: that of a `BorrowedUser` if we are root, else None for our own. timeout_s: for one request.
    environment: all environment variables of the process. folder: the process's current directory.
    """

    def __init__(
        self,
        start_request: Callable[[int | None], bytes],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        folder: Path = Path("/"),
    ) -> None:
        self._start_request = start_request
        self._user: BorrowedUser | None = None
        self._timeout_s = timeout_s
        self._environment, self._folder = dict(environment or {}), folder
        # What the process must reply to `start_request` at every start; None: anything.
        self.introduction: Any = None
        self.printed = bytearray()  # the first bytes that its processes wrote to stdout and stderr
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        # Requests so far. An answer has the number of its request, so a late answer cannot be taken
        # for the answer to another request.
        self._asked = 0

    async def ask(self, requests: Sequence[bytes]) -> AsyncGenerator[Any, None]:
        """Yield the replies as they come. If the process ends early, only the first requests have replies.

        The last one is then a TaskFailed.
        """
        if (failed := await self._make_ready()) is not None:
            yield failed
            return
        async with aclosing(self._converse(requests, self._timeout_s + GRACE_S)) as replies:
            async for reply in replies:
                yield reply

    async def ask_beside_others(self, request: bytes) -> Any:
        """Ask a concurrent process; other calls may be under way."""
        async with self._starting:
            if (failed := await self._make_ready()) is not None:
                return failed
            child = self._child
        assert child is not None
        (waiting,) = self._send(child, [request])
        reply, sound = await child.reply(waiting, self._timeout_s + GRACE_S)
        if not sound and self._child is child:
            await self.kill()
        if not sound and reply.kind == "timeout":
            # The process itself would report a late call. It did not, so some call blocks it, perhaps another one.
            return TaskFailed("died", f"the process was blocked: {reply.reason}")
        return reply

    def tell(self, request: bytes) -> None:
        """Send a request whose reply does not matter, if the process runs."""
        if self._child is not None:
            self._send(self._child, [request])

    async def start(self) -> Any:
        """Start the process, which must not run; return the reply to `start_request` or TaskFailed."""
        try:
            if os.geteuid() == 0:
                self._user = await asyncio.to_thread(BorrowedUser.borrow)
            self._child = await _spawn(self._environment, self._folder, self.printed)
        except (OSError, OperatorFault) as error:
            await self.kill()
            return TaskFailed("died", f"cannot start a task process: {error}")
        request = self._start_request(None if self._user is None else self._user.uid)
        # The process interrupts a late start itself; a start that cannot be interrupted fails 10 s later.
        async with aclosing(self._converse([request], TASK_START_S_MAX + 10.0)) as replies:
            introduction = await anext(replies)
        if isinstance(introduction, TaskFailed):
            await self.kill()
        return introduction

    async def _make_ready(self) -> TaskFailed | None:
        """Start the process if none runs. Returns None if it runs now, else the reason why not, for which no
        call is to blame.
        """
        if self._child is not None and self._child.link.fault is not None:
            await self.kill()
        if self._child is not None:
            return None
        introduction = await self.start()
        if isinstance(introduction, TaskFailed):
            return TaskFailed("died", f"it does not start: {introduction.reason}")
        if self.introduction not in (None, introduction):
            await self.kill()
            return TaskFailed("died", "its data or options have changed since the run began")
        return None

    async def kill(self) -> None:
        """End the process, if one runs, and all that it started; wait until its guard has ended."""
        child, self._child = self._child, None
        user, self._user = self._user, None
        try:
            if child is not None:
                await child.close()
        finally:
            if user is not None:
                try:
                    await asyncio.to_thread(user.end_all)
                finally:
                    user.give_back()

    async def _converse(
        self, requests: Sequence[bytes], timeout_s: float
    ) -> AsyncGenerator[Any, None]:
        child = self._child
        assert child is not None
        answered = 0
        try:
            for waiting in self._send(child, requests):
                reply, sound = await child.reply(waiting, timeout_s)
                answered += sound
                yield reply
                if not sound:
                    break
        finally:
            # If the caller left early, the process would still send answers that have no reader.
            if answered < len(requests):
                await self.kill()

    def _send(self, child: "Child", requests: Sequence[bytes]) -> list["PendingReply"]:
        first, self._asked = self._asked, self._asked + len(requests)
        numbers = [number % (NUMBER_MAX + 1) for number in range(first, self._asked)]
        return child.link.ask(dict(zip(numbers, requests, strict=True)))


PendingReply = asyncio.Future[tuple[Any, Any]]


class TaskLink(asyncio.Protocol):
    """The parent's end of the socket: matches answers with the requests that wait for them."""

    def __init__(self) -> None:
        self.fault: str | None = None  # why no more requests can be sent; None: they can
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._waiting: dict[int, PendingReply] = {}

    def ask(self, requests: Mapping[int, bytes]) -> list[PendingReply]:
        """Send these bodies, each under its number. A future fails if its answer cannot come."""
        loop = asyncio.get_running_loop()
        waiting: dict[int, PendingReply] = {number: loop.create_future() for number in requests}
        self._waiting |= waiting
        if self.fault is None:
            framed = [HEADER.pack(len(body), number) + body for number, body in requests.items()]
            self._transport.write(b"".join(framed))
        else:
            self._break(self.fault)
        return list(waiting.values())

    def close(self) -> None:
        self._break("the task process was ended")
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self.fault is None and len(self._buffer) >= HEADER.size:
            length, number = HEADER.unpack_from(self._buffer)
            if length > TASK_MESSAGE_BYTES_MAX or number not in self._waiting:
                text = f"a message of {length} bytes to request {number}"
                self._break(f"the task process answered nonsense: {text}")
            elif len(self._buffer) < HEADER.size + length:
                return
            else:
                body = bytes(self._buffer[HEADER.size : HEADER.size + length])
                del self._buffer[: HEADER.size + length]
                self._answered(number, body)

    def connection_lost(self, _: Exception | None) -> None:
        self._break("the task process died")

    def _answered(self, number: int, body: bytes) -> None:
        try:
            count = values_counter(VALUES_MAX)
            status, value = msgpack.unpackb(
                body,
                max_array_len=ITEMS_MAX,
                max_map_len=ITEMS_MAX,
                max_ext_len=0,
                list_hook=count,
                object_pairs_hook=lambda pairs: dict(count(pairs)),
            )
        except (ValueError, TypeError) as error:
            self._break(f"the task process answered nonsense: {error}")
            return
        waiting = self._waiting.pop(number)
        # The asking task may have been cancelled.
        if not waiting.done():
            waiting.set_result((status, value))

    def _break(self, why: str) -> None:
        self.fault = self.fault or why[:TASK_REASON_CHARS_MAX]
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.done():
                each.set_exception(ConnectionError(self.fault))
                # Mark the exception as read: this future may have no reader.
                each.exception()


def _failure(kind: FailureKind, said: Any) -> TaskFailed:
    """Make a TaskFailed from a process's reply: a reason, or reason, row, place and traceback."""
    texts = said if isinstance(said, list) else [said, "", "", ""]
    if len(texts) != _FAILURE_TEXTS or not all(isinstance(each, str) for each in texts):
        return TaskFailed(kind, "an error without a reason")
    reason, where, at = (each[:TASK_REASON_CHARS_MAX] for each in texts[:-1])
    return TaskFailed(kind, reason, where, at, texts[-1][-TRACE_CHARS_MAX:])


class Child(asyncio.SubprocessProtocol):
    """A running process: its socket, its end, and its output, which is counted and dropped.

    printed: gets the first TRACE_CHARS_MAX bytes of the output.
    """

    def __init__(self, link: TaskLink, printed: bytearray) -> None:
        self.link, self._first = link, printed
        self._transport: asyncio.SubprocessTransport
        self._printed = 0
        self._gone = asyncio.Event()

    async def reply(self, waiting: PendingReply, timeout_s: float) -> tuple[Any, bool]:
        """Wait for a reply.

        Returns the value or TaskFailed, and whether the process can be asked again.
        """
        self._printed = 0
        try:
            async with asyncio.timeout(timeout_s):
                status, value = await waiting
        except TimeoutError:
            return TaskFailed("timeout", f"no answer in {timeout_s:g} s"), False
        except ConnectionError as error:
            return self._why_broken(str(error)), False
        if status == "ok":
            return value, True
        sound = status in get_args(FailureKind)
        return _failure(status if sound else "error", value), sound

    async def close(self) -> None:
        self._kill()
        try:
            # The guard has this long to end everything. Then it is killed itself.
            async with asyncio.timeout(5.0):
                await self._gone.wait()
        except TimeoutError:
            # A process of the task hangs in a system call, where it cannot be killed now.
            self._signal(signal.SIGKILL)
            await self._gone.wait()
        self._transport.close()
        self.link.close()

    def _why_broken(self, fault: str) -> TaskFailed:
        if self._printed > OUTPUT_BYTES_MAX:
            return TaskFailed("error", f"it printed more than {OUTPUT_BYTES_MAX} bytes")
        return TaskFailed("error" if "nonsense" in fault else "died", fault)

    def _kill(self) -> None:
        """Tell the guard to end everything; see `pool_child.guard`."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._transport.send_signal(number)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002 - asyncio's signature
        self._printed += len(data)
        self._first += data[: TRACE_CHARS_MAX - len(self._first)]
        if self._printed > OUTPUT_BYTES_MAX:
            self._kill()

    def process_exited(self) -> None:
        self._gone.set()


# The order of sets and the time zone must be the same on all hosts, because prompts may depend on them.
_ALIKE = {"PYTHONHASHSEED": "0", "TZ": "UTC"}


async def _spawn(environment: Mapping[str, str], folder: Path, printed: bytearray) -> Child:
    """Start an isolated Python at the other end of a socket."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    with theirs:
        ours.setblocking(False)
        link = TaskLink()
        await loop.create_connection(lambda: link, sock=ours)
        paths = [entry for entry in sys.path if Path(entry).is_absolute()]
        try:
            _, child = await loop.subprocess_exec(
                lambda: Child(link, printed),
                *(
                    sys.executable,
                    "-u",
                    "-P",
                    "-s",
                    "-c",
                    _BOOT,
                    json.dumps(paths),
                    str(theirs.fileno()),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**_ALIKE, **environment},
                cwd=folder,
            )
        except BaseException:
            # If the child already reads, it sees the end of the file and exits.
            link.close()
            raise
    return child

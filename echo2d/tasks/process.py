"""One task process as its parent sees it: started, asked, and killed at the first nonsense.

      none --ask--> running --all replies, in time--> running
                       |
                       | timeout, end of file, nonsense, "broken", too much output,
                       v or the asking task is cancelled
                     none

Only one `ask` runs at a time. The process answers requests one by one, in order, so the guilty one
is the first without a reply.
"""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgpack

from echo2d.tasks.pool_child import HEADER, MESSAGE_BYTES_MAX, NUMBER_MAX, REASON_CHARS_MAX

OUTPUT_BYTES_MAX = 1 << 20  # stdout and stderr of one call; all of it is dropped
# The guard has this long to end everything. Then it is killed itself.
KILL_S = 5.0
START_TIMEOUT_S = 60.0  # the task's module may import a lot
# `-I` ignores the user's settings and paths, so the child gets this interpreter's module path.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from echo2d.tasks.pool_child import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A call without a result. kind "timeout": it did not end in time; "error": everything else.

    reason: if the child wrote it, at most REASON_CHARS_MAX characters.
    """

    kind: Literal["error", "timeout"]
    reason: str


class TaskProcess:
    """See the module docstring.

    start_request: the first request to every fresh process, which names its task. timeout_s: for
    one request.
    """

    def __init__(self, start_request: bytes, *, timeout_s: float) -> None:
        self._start_request = start_request
        self._timeout_s = timeout_s
        self._child: Child | None = None
        # Requests so far. An answer carries the number of its request, so a late answer to an
        # older request cannot pass for another one.
        self._asked = 0

    async def ask(self, requests: Sequence[bytes]) -> list[Any]:
        """Return replies to the first requests, at least one.

        After a TaskFailed that cost the process its life there are no more.
        """
        if self._child is None and isinstance(introduction := await self.start(), TaskFailed):
            return [introduction]
        return await self._converse(requests, self._timeout_s)

    async def start(self) -> Any:
        """Start the process while none runs; return the reply to `start_request` or TaskFailed."""
        try:
            self._child = await _spawn()
        except OSError as error:
            return TaskFailed("error", f"cannot start a task process: {error}")
        (introduction,) = await self._converse([self._start_request], START_TIMEOUT_S)
        if isinstance(introduction, TaskFailed):
            await self.kill()
        return introduction

    async def kill(self) -> None:
        """End the process, if any, and all that it started; wait until its guard is gone."""
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _converse(self, requests: Sequence[bytes], timeout_s: float) -> list[Any]:
        assert self._child is not None
        replies: list[Any] = []
        sound = False
        try:
            first, self._asked = self._asked, self._asked + len(requests)
            numbers = [number % (NUMBER_MAX + 1) for number in range(first, self._asked)]
            framed = (
                HEADER.pack(len(body), at) + body
                for at, body in zip(numbers, requests, strict=True)
            )
            self._child.writer.write(b"".join(framed))
            while len(replies) < len(requests):
                reply, sound = await self._child.reply(numbers[len(replies)], timeout_s)
                replies.append(reply)
                if not sound:
                    break
        finally:
            if not sound or len(replies) < len(requests):
                await self.kill()
        return replies


class Child(asyncio.SubprocessProtocol):
    """A running process: its socket, its end, and its output, which is counted and dropped."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._transport: asyncio.SubprocessTransport
        self._printed = 0
        self._gone = asyncio.Event()

    async def reply(self, number: int, timeout_s: float) -> tuple[Any, bool]:
        """Wait for the reply to request `number`.

        Returns the value or TaskFailed, and whether the process can be asked again.
        """
        self._printed = 0
        try:
            async with asyncio.timeout(timeout_s):
                status, value = await self._receive(number)
        except TimeoutError:
            return TaskFailed("timeout", f"no answer in {timeout_s:g} s"), False
        except (ValueError, TypeError, asyncio.IncompleteReadError, ConnectionError) as error:
            return TaskFailed("error", self._why_broken(error)), False
        reason = value if isinstance(value, str) else "an error without a reason"
        failed = TaskFailed("error", reason[:REASON_CHARS_MAX])
        return (value if status == "ok" else failed), status in ("ok", "error")

    async def close(self) -> None:
        self._kill()
        try:
            async with asyncio.timeout(KILL_S):
                await self._gone.wait()
        except TimeoutError:
            # A process of the task hangs in a system call, where it cannot be killed now.
            self._signal(signal.SIGKILL)
            await self._gone.wait()
        self._transport.close()
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def _receive(self, number: int) -> tuple[Any, Any]:
        length, answered = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if length > MESSAGE_BYTES_MAX or answered != number:
            raise ValueError(
                f"a message of {length} bytes to request {answered} instead of {number}"
            )
        status, value = msgpack.unpackb(await self._reader.readexactly(length))
        return status, value

    def _why_broken(self, error: Exception) -> str:
        if self._printed > OUTPUT_BYTES_MAX:
            return f"it printed more than {OUTPUT_BYTES_MAX} bytes"
        ended = isinstance(error, asyncio.IncompleteReadError | ConnectionError)
        return (
            "the task process died"
            if ended
            else f"the task process answered nonsense: {error}"[:REASON_CHARS_MAX]
        )

    def _kill(self) -> None:
        """Tell the guard to end everything; see `pool_child.guard`."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._transport.send_signal(number)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002 - asyncio's signature
        self._printed += len(data)
        if self._printed > OUTPUT_BYTES_MAX:
            self._kill()

    def process_exited(self) -> None:
        self._gone.set()


async def _spawn() -> Child:
    """Start an isolated Python at the other end of a socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        paths = [entry for entry in sys.path if Path(entry).is_absolute()]
        try:
            _, child = await asyncio.get_running_loop().subprocess_exec(
                lambda: Child(reader, writer),
                *(sys.executable, "-I", "-c", BOOT, json.dumps(paths), str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={},
                cwd="/",
            )
        except BaseException:
            # If the child already reads, it sees the end of the file and exits.
            writer.close()
            raise
    return child

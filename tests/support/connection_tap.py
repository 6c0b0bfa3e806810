"""A tap on a coordinator's connections: it reads from the wire which results the coordinator acknowledged."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from echo2d.core.protocol.control_messages import TO_PEER, SampleAnswered


class Tap:
    """Passes connections on to the address at which the coordinator of `run_dir` listens now. While the coordinator
    does not listen, the tap is closed.

    acknowledged: "lease.attempt.sample" of every result that the coordinator acknowledged to a worker.
    """

    def __init__(self, run_dir: Path) -> None:
        self.acknowledged: set[str] = set()
        self._run_dir = run_dir
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="tap", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.close()
        await asyncio.gather(
            *(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True
        )

    async def _serve(self, down: asyncio.StreamReader, to_down: asyncio.StreamWriter) -> None:
        with contextlib.closing(to_down), contextlib.suppress(OSError, ValueError):
            port = json.loads((self._run_dir / "coordinator.json").read_text())["port"]
            up, to_up = await asyncio.open_connection("127.0.0.1", port)
            ends = {to_up, to_down}
            self._open |= ends
            with contextlib.closing(to_up):
                await _pass_on(down, to_up, up, to_down, Answers(self.acknowledged))
            self._open -= ends


async def _pass_on(
    down: asyncio.StreamReader,
    to_up: asyncio.StreamWriter,
    up: asyncio.StreamReader,
    to_down: asyncio.StreamWriter,
    answers: "Answers",
) -> None:
    """Pass bytes on until either end closes."""
    try:
        async with asyncio.TaskGroup() as ways:
            ways.create_task(_copy(down, to_up, lambda _: None))
            ways.create_task(_copy(up, to_down, answers.feed))
    except* ConnectionError:
        pass


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[bytes], None]
) -> None:
    while data := await reader.read(1 << 16):
        look(data)
        writer.write(data)
        await writer.drain()
    raise ConnectionError("closed")


class Answers:
    """Reads the coordinator's messages on one connection if it is a control link: HTTP head, then WebSocket frames."""

    def __init__(self, acknowledged: set[str]) -> None:
        self._acknowledged = acknowledged
        self._bytes = bytearray()
        self._is_link: bool | None = None

    def feed(self, data: bytes) -> None:
        if self._is_link is False:
            return
        self._bytes += data
        if self._is_link is None:
            head, end, rest = self._bytes.partition(b"\r\n\r\n")
            if not end:
                return
            self._is_link, self._bytes = head.startswith(b"HTTP/1.1 101"), rest
        while self._is_link and (payload := self._frame()) is not None:
            self._note(payload)

    def _frame(self) -> bytes | None:
        """The payload of the next whole frame (empty unless it is binary). A server's frames are not masked."""
        if len(self._bytes) < 2:
            return None
        more = {126: 2, 127: 8}.get(self._bytes[1], 0)
        start = 2 + more
        length = int.from_bytes(self._bytes[2:start], "big") if more else self._bytes[1]
        if len(self._bytes) < start + length:
            return None
        opcode, payload = self._bytes[0], bytes(self._bytes[start : start + length])
        del self._bytes[: start + length]
        return payload if opcode == 0x82 else b""

    def _note(self, payload: bytes) -> None:
        with contextlib.suppress(Exception):  # messages of the handshake have another codec
            message = TO_PEER.decode(payload)
            if isinstance(message, SampleAnswered) and message.accepted:
                self._acknowledged.add(f"{message.lease}.{message.attempt}.{message.sample}")

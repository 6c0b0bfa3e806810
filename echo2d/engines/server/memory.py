"""Has a running server write a version into its memory, by our module inside it (`inside/echo2d_memory.py`).

Only the staged words are written in the pause; files are read before it, and compared with the memory after it.
A server or a model with which this cannot be done loads from disk, as does a version for which it failed.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2d.engines.server.http_client import ServerRefused
from echo2d.engines.server.weight_update import Doubtful, WeightUpdate
from echo2d.errors import EngineFault

# In a row; then all versions are loaded from disk until the worker is started again.
_FAILURES_MAX = 2
# The staged words may take this share of the available memory of the machine, or of the server's container, at all
# processes together.
_SHARE = 0.5
# For the comparison after a pause. Nothing is given out meanwhile, and a lease without a token is given back after
# 120 s. The comparison before the pause may take half of this, because the server generates beside both.
_CHECK_S_MAX = 100.0

log = logging.getLogger("echo2d.engines")

# Has the server call our module where nothing is generated; returns the number of its processes. Doubtful: it may
# have. Other EngineFault: it has not.
Call = Callable[[], Awaitable[int]]


class _Unanswered(EngineFault):
    """A process did not answer, or answered so late that the check after the pause would not end in time."""


class ServerMemory:
    """The memory of the server in use, and of those before it."""

    def __init__(self) -> None:
        self._sockets: Sequence[Path] = ()
        self._recorded = False
        self._failures = 0
        # Why versions are loaded from disk; empty: they are not.
        self.off = ""

    def gone(self) -> None:
        """The server has ended."""
        self._sockets, self._recorded = (), False

    async def open(self, folder: Path, order: WeightUpdate, call: Call) -> bool:
        """Find out where the words of the files lie, if this is not known. `folder` has the sockets of the server,
        which has just loaded `order`.

        False: it cannot be done, and the calls may have changed the memory. Doubtful: a call was not answered.
        """
        if self._recorded or self.off:
            return True
        called = bool(self._sockets)
        try:
            if not called:
                processes = await call()
                called = True
                self._sockets = await asyncio.to_thread(lambda: [*folder.glob("*.memory")])
                if len(self._sockets) != processes:
                    raise EngineFault(  # noqa: TRY301
                        f"{len(self._sockets)} of {processes} processes have a socket"
                    )
            await self._in_call("record", order, call)
            self._require_all(await self._ask(order, order.timeout_s, do="check"))
        except Doubtful as fault:
            self._failed(str(fault))
            raise
        except EngineFault as fault:
            self._turn_off(str(fault))
            # A server that refuses may have done something: SGLang unpacks and packs its weights around each call.
            if not called and not isinstance(fault, ServerRefused):
                return True
            await self._forget(order)
            return False
        self._recorded = True
        return True

    async def prepare(self, order: WeightUpdate) -> bool:
        """Stage what changes to this version, beside generation. False: load it from disk."""
        if self.off or not self._recorded:
            return False
        share, began = _SHARE / len(self._sockets), time.monotonic()
        try:
            found = await self._ask(order, order.timeout_s, do="prepare", share=share)
            self._require_all(found)
            took_s, took_s_max = time.monotonic() - began, _CHECK_S_MAX / 2
            if took_s > took_s_max:
                raise _Unanswered(  # noqa: TRY301
                    f"its files were compared in {took_s:.0f} s, expected at most {took_s_max:.0f} s: give the host "
                    "more memory, so that the files stay in the page cache, or a faster disk"
                )
        except _Unanswered as fault:
            if self._failed(str(fault)):
                await self._forget(order)
            return False
        except EngineFault as fault:
            log.warning("this version is loaded from disk: %s", fault)
            # Where parts of the model have moved, they are looked up again; all else is compared with memory.
            self._recorded = "has moved" not in str(fault)
            return False
        return True

    async def apply(self, order: WeightUpdate, call: Call) -> bool:
        """Write what is staged. False: nothing was written. Doubtful: nobody knows what was."""
        try:
            answers = await self._in_call("apply", order, call)
        except Doubtful as fault:
            self._failed(str(fault))
            raise
        except EngineFault as fault:
            self._failed(str(fault))
            return False
        if any(each.get("done") != str(order.snapshot) for each in answers):
            self._failed(str(answers))
            raise Doubtful(f"a version was written in part: {answers}")
        return True

    async def check(self, order: WeightUpdate) -> None:
        """Doubtful: the memory does not have the words of the version."""
        try:
            self._require_all(await self._ask(order, _CHECK_S_MAX, do="check"))
        except EngineFault as fault:
            self._failed(str(fault))
            raise Doubtful(str(fault)) from fault
        self._failures = 0

    def _failed(self, why: str) -> bool:
        """Count a failure. Whether all versions are loaded from disk from now on."""
        self._failures += 1
        log.warning("a version could not be written into the server's memory: %s", why)
        if self._failures >= _FAILURES_MAX:
            self._turn_off(why)
        return bool(self.off)

    def _turn_off(self, why: str) -> None:
        self.off = why
        log.info("all versions are loaded from disk until the worker is started again: %s", why)

    async def _forget(self, order: WeightUpdate) -> None:
        """Have the processes free what they keep for refits."""
        try:
            await self._ask(order, order.timeout_s, do="forget")
        except EngineFault:
            log.info("the server did not free what it keeps for refits in memory")

    async def _in_call(
        self, what: str, order: WeightUpdate, call: Call
    ) -> Sequence[Mapping[str, Any]]:
        """Doubtful: it may have been done, or by some of the processes. Other EngineFault: by none of them."""
        number = secrets.token_hex(8)
        line = self._line(order, ordered=what, number=number)
        try:
            await asyncio.to_thread(_order, self._sockets[0].parent, line)
        except OSError as error:
            raise EngineFault(f"no order can be written for the server: {error}") from error
        await call()
        try:
            found = await asyncio.to_thread(lambda: [_told(each) for each in self._sockets])
        except (OSError, ValueError) as error:
            raise Doubtful(f"a process of the server said nothing: {error!r}") from error
        doubts = [each for each in found if "doubt" in each or each.get("order") != number]
        errors = [each for each in found if "error" in each]
        if doubts or (what == "apply" and 0 < len(errors) < len(found)):
            raise Doubtful(f"only some processes did it: {doubts or errors}")
        self._require_all(found)
        return found

    def _require_all(self, found: Sequence[Mapping[str, Any]]) -> None:
        """EngineFault: a process refused."""
        for each in found:
            if "error" in each:
                raise EngineFault(str(each["error"]))

    async def _ask(
        self, order: WeightUpdate, timeout_s: float, **asked: object
    ) -> Sequence[Mapping[str, Any]]:
        """The answers of all processes. _Unanswered: one has not answered in time."""
        line = self._line(order, **asked)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.gather(*(_answer(each, line) for each in self._sockets))
        except (OSError, ValueError, TimeoutError) as error:
            raise _Unanswered(f"the server's memory: {error!r}") from error

    def _line(self, order: WeightUpdate, **asked: object) -> str:
        files = [name for name, *_ in order.files if name.endswith(".safetensors")]
        return json.dumps({**asked, "directory": str(order.snapshot), "files": files})


def _order(folder: Path, line: str) -> None:
    """Write what the processes do in the next call."""
    new = folder / "order.new"
    new.write_text(line)
    new.replace(folder / "order.json")


def _told(path: Path) -> Mapping[str, Any]:
    """What the process with this socket did in the last call."""
    found: Mapping[str, Any] = json.loads(path.with_suffix(".told").read_text())
    return found


async def _answer(path: Path, line: str) -> Mapping[str, Any]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(line.encode() + b"\n")
        await writer.drain()
        found: Mapping[str, Any] = json.loads(await reader.readline())
        return found
    finally:
        writer.close()

"""Runs the ledger in a thread of its own: SQLite blocks, and the event loop must not."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from echo2d.core.base.ids import Digest
from echo2d.core.coordinator.events import CoordinatorRecord, Recovered
from echo2d.core.tinker.operations import ModelId
from echo2d.store.ledger import Ledger, backfill

# Pages of 16 MiB. If the write-ahead log is longer, commits wait once until all of it is moved into the
# database, and the log starts over.
WAL_PAGES_MAX = 4096

_Result = TypeVar("_Result")


class LedgerThread:
    """The ledger, opened, used and closed in one thread of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._ledger: Ledger | None = None
        # Whether the log has grown since the last backfill.
        self._grown = False

    async def open(self) -> Recovered:
        """Open the ledger and read its content."""
        return await self._do(self._open)

    async def append(self, records: Sequence[CoordinatorRecord]) -> None:
        """Write records in one transaction; they are durable when this returns."""
        assert self._ledger is not None
        ledger = self._ledger
        await self._do(lambda: ledger.append(records))
        self._grown = True

    async def attach(self, contents: Sequence[bytes]) -> None:
        """See `Ledger.attach`."""
        assert self._ledger is not None
        ledger = self._ledger
        await self._do(lambda: ledger.attach(contents))
        self._grown = True

    async def attachment(self, digest: Digest) -> bytes | None:
        """See `Ledger.attachment`."""
        assert self._ledger is not None
        ledger = self._ledger
        return await self._do(lambda: ledger.attachment(digest))

    async def operation_body(self, model: ModelId, number: int) -> bytes | None:
        """See `Ledger.operation_body`."""
        assert self._ledger is not None
        ledger = self._ledger
        return await self._do(lambda: ledger.operation_body(model, number))

    async def keep_small(self) -> None:
        """Call `make_small` again and again, until cancelled."""
        while True:
            # Twice a second a backfill moves committed pages from the write-ahead log into the database.
            await asyncio.sleep(0.5)
            await self.make_small()

    async def make_small(self) -> None:
        """Delete superfluous rows and backfill the write-ahead log, if it has grown.

        Rows are trimmed in the ledger's thread, between commits. The backfill runs in another thread at
        the same time.
        """
        assert self._ledger is not None
        if not self._grown:
            return
        self._grown = False
        while await self._do(self._ledger.trim):
            pass
        pages = await asyncio.to_thread(backfill, self._path)
        if pages > WAL_PAGES_MAX:
            await self._do(self._ledger.backfill)

    async def close(self) -> None:
        if self._ledger is not None:
            await self._do(self._ledger.close)
        # The thread has nothing left to do, so there is nothing to wait for.
        self._thread.shutdown(wait=False)

    def _open(self) -> Recovered:
        self._ledger = Ledger.open(self._path)
        return self._ledger.recover()

    async def _do(self, job: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

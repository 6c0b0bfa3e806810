"""The ledger in a thread of its own: SQLite blocks, the loop does not."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from echo2d.core.coordinator.events import CoordinatorRecord, Recovered
from echo2d.store.ledger import Ledger, backfill

BACKFILL_S = 0.5  # between two moves of what was committed out of the write-ahead log
WAL_PAGES_MAX = (
    4096  # 16 MiB of log; beyond, commits wait once until all of it is moved, and it begins anew
)

_Result = TypeVar("_Result")


class LedgerThread:
    """The ledger, opened, used and closed in one thread of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._ledger: Ledger | None = None
        self._grown = False  # since the last backfill

    async def open(self) -> Recovered:
        return await self._do(self._open)

    async def append(self, records: Sequence[CoordinatorRecord]) -> None:
        assert self._ledger is not None
        ledger = self._ledger
        await self._do(lambda: ledger.append(records))
        self._grown = True

    async def keep_small(self) -> None:
        """Delete what is superfluous between commits, and empty the write-ahead log beside them; until cancelled."""
        assert self._ledger is not None
        while True:
            await asyncio.sleep(BACKFILL_S)
            if self._grown:
                self._grown = False
                while await self._do(self._ledger.trim):
                    pass
                pages = await asyncio.to_thread(backfill, self._path)
                if pages > WAL_PAGES_MAX:
                    await self._do(self._ledger.backfill)

    async def close(self) -> None:
        if self._ledger is not None:
            await self._do(self._ledger.close)
        self._thread.shutdown(wait=False)  # it has nothing left to do

    def _open(self) -> Recovered:
        self._ledger = Ledger.open(self._path)
        return self._ledger.recover()

    async def _do(self, job: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

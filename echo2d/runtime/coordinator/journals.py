"""Writes what a run keeps for people beside its ledger: its curves, samples of its answers, and audit results."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from echo2d.core.audit.events import AuditTold
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.step_history import StepSummary
from echo2d.core.coordinator.events import CoordinatorRecord
from echo2d.core.work.events import BatchCommitted
from echo2d.errors import StoreFault
from echo2d.runtime.audit.audit_log import audit_record
from echo2d.runtime.coordinator.run_history import RunHistory
from echo2d.runtime.coordinator.sample_log import SampleLog
from echo2d.runtime.coordinator.shown_samples import ShownSamples
from echo2d.store.json_log import JsonLog

log = logging.getLogger("echo2d.coordinator")


class Journals:
    """See the module docstring. samples, audits: None: that log is off. newest: the last version before this start."""

    def __init__(
        self,
        history: RunHistory,
        samples: SampleLog | None = None,
        audits: JsonLog | None = None,
        newest: VersionPublished | None = None,
    ) -> None:
        self.history, self.newest = history, newest
        self._samples, self._audits = samples, audits
        # Audit results that are not written yet. When 4,096 wait, the newest are left out of the log.
        self._audited: asyncio.Queue[AuditTold] = asyncio.Queue(4096)

    def helpers(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Tasks that write what `durable` and `audited` were given."""
        samples = () if self._samples is None else (self._samples.keep(),)
        audits = () if self._audits is None else (self._keep_audited(self._audits),)
        return (self.history.keep(), *samples, *audits)

    def durable(
        self, records: Iterable[CoordinatorRecord], summary: Callable[[int], StepSummary | None]
    ) -> None:
        """Take records that are in the ledger now. summary: returns that of a train step."""
        for record in records:
            if self._samples is not None:
                self._samples.tell(record)
            if isinstance(record, BatchCommitted) and (step := summary(record.step)) is not None:
                self.history.tell(step)

    def audited(self, told: AuditTold) -> None:
        """Take the result of an audit."""
        with suppress(asyncio.QueueFull):
            self._audited.put_nowait(told)

    def shown_samples(self, step: int | None) -> dict[str, Any]:
        return (ShownSamples() if self._samples is None else self._samples.shown).of(step)

    async def _keep_audited(self, audit_log: JsonLog) -> None:
        """Write the audit results, each time all that wait."""
        while True:
            told = [await self._audited.get()]
            while not self._audited.empty():
                told.append(self._audited.get_nowait())
            now_s = time.time()
            try:
                await asyncio.to_thread(audit_log.append, [audit_record(e, now_s) for e in told])
            except StoreFault as fault:
                log.warning("%d records of audits are lost: %s", len(told), fault)

"""Enrolments that come together become one transaction of the access table: fleets start at once, disks sync slowly.

    asked --> waiting --(whoever is first, for all)--> committed in a thread --> each is answered

Not here: who may enrol (`tokens`).
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from echo2d.core.base.ids import PeerId
from echo2d.errors import StoreFault
from echo2d.net.security.auth import Denied
from echo2d.runtime.run_dir.credentials import Enrolment

ENROLMENTS_MAX = 256  # of one transaction; more would make the first one wait

EnrolmentOutcome = PeerId | Denied | StoreFault


class Access(Protocol):
    """What is needed of tokens.AccessTable."""

    def enrol_all(self, asked: Sequence[Enrolment], *, now_s: float) -> list[PeerId | Denied]: ...


class Enrolments:
    """See the module docstring."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._waiting: list[tuple[Enrolment, asyncio.Future[EnrolmentOutcome]]] = []
        self._committing = asyncio.Lock()

    async def enrol(self, asked: Enrolment) -> PeerId:
        """Durable when this returns. Denied: not with this secret, key or proof."""
        answer: asyncio.Future[EnrolmentOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answer))
        async with self._committing:
            while not answer.done():
                await self._commit()
        outcome = answer.result()
        if isinstance(outcome, Denied | StoreFault):
            raise outcome
        return outcome

    async def _commit(self) -> None:
        """Those who waited first. If this caller hangs up meanwhile, the next one does it once more for the others."""
        part = self._waiting[:ENROLMENTS_MAX]
        outcomes: Sequence[EnrolmentOutcome]
        try:
            outcomes = await asyncio.to_thread(
                self._access.enrol_all, [asked for asked, _ in part], now_s=time.time()
            )
        except StoreFault as fault:
            outcomes = [fault] * len(part)
        del self._waiting[: len(part)]
        for (_, answer), outcome in zip(part, outcomes, strict=True):
            answer.set_result(outcome)

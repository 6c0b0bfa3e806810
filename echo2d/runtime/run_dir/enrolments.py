"""Groups concurrent enrolments into one transaction of the access table.

    recognised --> asked --> waiting --(the first caller commits for all)--> committed --> answered

A whole fleet may enrol at the same time, and a disk syncs slowly. Strangers may ask, too, so the secret
is checked before anything else. An unknown secret may belong to a token made a moment ago, so the table is
read again, but at most once every REREAD_S, however many callers ask.

Not here: which peers may enrol (`access_table`).
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from echo2d.core.base.ids import PeerId
from echo2d.errors import StoreFault
from echo2d.net.security.auth import Denied
from echo2d.runtime.run_dir.access_table import Enrolment

# One transaction has at most this many enrolments: more would delay the first one.
ENROLMENTS_MAX = 256
REREAD_S = 0.25

EnrolmentOutcome = PeerId | Denied | StoreFault


class Access(Protocol):
    """The part of `AccessTable` that is used here."""

    def recognise(self, secret: str, *, now_s: float) -> None: ...

    def reload(self) -> None: ...

    def enrol_all(self, asked: Sequence[Enrolment], *, now_s: float) -> list[PeerId | Denied]: ...


class Enrolments:
    """See the module docstring."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._waiting: list[tuple[Enrolment, asyncio.Future[EnrolmentOutcome]]] = []
        self._committing = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._reads_begun = self._reads_done = 0
        self._read_at = float("-inf")

    async def recognise(self, secret: str) -> None:
        """Denied: no machine can enrol with this secret. StoreFault: the table failed."""
        try:
            self._access.recognise(secret, now_s=time.time())
        except Denied as denied:
            if denied.code != "credential":
                raise
            await self._reread()
            self._access.recognise(secret, now_s=time.time())

    async def _reread(self) -> None:
        """Read the table, or wait for a read that began after this call."""
        asked = self._reads_begun
        async with self._reading:
            if self._reads_done > asked:
                return
            await asyncio.sleep(max(0.0, self._read_at + REREAD_S - time.monotonic()))
            self._read_at = time.monotonic()
            self._reads_begun += 1
            number = self._reads_begun
            await asyncio.to_thread(self._access.reload)
            self._reads_done = number

    async def enrol(self, asked: Enrolment) -> PeerId:
        """Enrol a peer; the enrolment is durable when this returns.

        Denied: the secret, the key or the proof is not accepted. StoreFault: the table failed.
        """
        answer: asyncio.Future[EnrolmentOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answer))
        async with self._committing:
            # An earlier caller may have committed this enrolment with its own.
            while not answer.done():
                await self._commit()
        outcome = answer.result()
        if isinstance(outcome, Denied | StoreFault):
            raise outcome
        return outcome

    async def _commit(self) -> None:
        """Commit the enrolments that have waited longest.

        They are removed from the list only afterwards: if this caller hangs up meanwhile, the next one
        commits them again for the other callers. Enrolling twice changes nothing.
        """
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

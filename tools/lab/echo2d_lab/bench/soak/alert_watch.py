"""Checks the alerts of a run against the troubles that it had: expected alerts must come, and no others.

trouble --> ExpectedAlert(kind, subject, until_s, within_s) ----+
status, every POLL_S --> alerts on show, by kind and subject --> missing, unexpected
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from echo2d.client import AsyncCoordinator
from echo2d.errors import Fault

POLL_S = 2.0
# An alert about a dead learner, another build or a full disk must be shown within this time.
WITHIN_S = 30.0


@dataclass(slots=True)
class ExpectedAlert:
    """One alert that may be shown from at_s until until_s. subject: empty: any. within_s: it must be shown
    within this time after at_s; None: it need not come. came_s: when it came, after at_s.
    """

    kind: str
    subject: str
    at_s: float
    until_s: float
    within_s: float | None = None
    came_s: float | None = None
    looked: bool = False  # whether the status could be read in that time

    def fits(self, kind: str, subject: str, now_s: float) -> bool:
        """Whether an alert is this one. subject: empty: the alert is about several workers, or about the run."""
        same = self.kind == kind and (subject == "" or self.subject in ("", subject))
        return same and self.at_s <= now_s <= self.until_s

    def overdue(self, now_s: float) -> bool:
        return self.within_s is not None and now_s > self.at_s + self.within_s

    def missing(self) -> bool:
        if self.within_s is None or not self.looked:
            return False
        return self.came_s is None or self.came_s > self.within_s


@dataclass(frozen=True, slots=True)
class UnexplainedAlert:
    """An alert that no trouble explains, as it was first seen."""

    at_s: float
    kind: str
    sentence: str


@dataclass(slots=True)
class AlertBook:
    """Records which alerts are expected and which ones came. Times are those of the monotonic clock."""

    expected: list[ExpectedAlert] = field(default_factory=list)
    unexpected: dict[tuple[str, str], UnexplainedAlert] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)  # by kind, how many expected alerts came

    def expect(
        self, kind: str, subject: str = "", *, for_s: float, within_s: float | None = None
    ) -> ExpectedAlert:
        """Expect an alert from now on, for this long."""
        now_s = time.monotonic()
        entry = ExpectedAlert(kind, subject, now_s, now_s + for_s, within_s)
        self.expected.append(entry)
        return entry

    def coordinator_killed(self, now_s: float) -> None:
        """Expected alerts need not come any more: their cause may be over when the coordinator is back."""
        for entry in self.expected:
            if entry.came_s is None and not entry.overdue(now_s):
                entry.within_s = None

    def look(self, status: Mapping[str, Any], now_s: float) -> None:
        for entry in self.expected:
            entry.looked |= entry.at_s <= now_s <= entry.until_s
        for alert in status["alerts"]:
            self._note(alert["kind"], alert["subject"], alert["sentence"], now_s)
        # One alert is about all workers of a build, and names only a few; the status names all.
        for peer in status.get("other_builds", ()):
            self._note("peer_build", peer["name"], "", now_s)

    def _note(self, kind: str, subject: str, sentence: str, now_s: float) -> None:
        explained = [entry for entry in self.expected if entry.fits(kind, subject, now_s)]
        for entry in explained:
            # An alert about several workers names none of them; a trouble of any worker explains it.
            if entry.came_s is None and entry.subject in ("", subject):
                entry.came_s = now_s - entry.at_s
                self.seen[kind] = self.seen.get(kind, 0) + 1
        if not explained:
            self.unexpected.setdefault((kind, subject), UnexplainedAlert(now_s, kind, sentence))

    def missing(self) -> list[ExpectedAlert]:
        return [entry for entry in self.expected if entry.missing()]


async def watch_alerts(coordinator: AsyncCoordinator, book: AlertBook) -> None:
    """Watch until it is cancelled. A coordinator that cannot be reached shows no alerts."""
    while True:
        with suppress(Fault):
            book.look(await coordinator.status(), time.monotonic())
        await asyncio.sleep(POLL_S)

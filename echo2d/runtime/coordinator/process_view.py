"""Adds to a run's status what only its process knows: disk, tokens, refused peers, the learner's last call."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from echo2d.core.base.ids import RunId
from echo2d.core.coordinator.process_alerts import process_alerts
from echo2d.core.status.schema import (
    DiskStatus,
    OtherBuildStatus,
    ProcessStatus,
    RefusedPeerStatus,
    RentingStatus,
    RunFacts,
    Status,
    TokenExpiry,
)
from echo2d.net.control.server import Sessions
from echo2d.runtime.coordinator.metrics import CoordinatorMetrics
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.version_files import VersionFiles
from echo2d.this_build import THIS_BUILD

# A status names at most this many peers of other builds, and counts all of them.
OTHER_BUILDS_SHOWN_MAX = 500


class ProcessView:
    """See the module docstring. status: makes the core's status."""

    def __init__(
        self,
        status: Callable[..., Status],
        run_id: RunId,
        facts: RunFacts,
        access: AccessTable,
        sessions: Sessions,
        files: VersionFiles,
        metrics: CoordinatorMetrics,
    ) -> None:
        self._status, self._run_id, self._facts = status, run_id, facts
        self._access, self._sessions, self._files = access, sessions, files
        self._metrics = metrics
        # Gives the status of renting. None: no boxes are rented.
        self.renting: Callable[[], RentingStatus] | None = None
        self._learner_heard_at: float | None = None
        # Calls of the learner that are being answered: a learner that waits for a batch is present.
        self._learner_calls = 0

    @contextmanager
    def learner_calls(self) -> Iterator[None]:
        """Count a call of the learner while it is being answered."""
        self._learner_calls += 1
        try:
            yield
        finally:
            self._learner_calls -= 1
            self._learner_heard_at = time.monotonic()

    def look(self) -> Status:
        """The core's status, with the facts of the process added."""
        now = time.monotonic()
        # A learner whose call is still open is present, however long it waits.
        heard_at = now if self._learner_calls else self._learner_heard_at
        renting = None if self.renting is None else self.renting()
        status = self._status(now=now)
        refused = self._refused_peers(status, now)
        others = tuple(
            OtherBuildStatus(each.peer, each.name, each.build.name, each.build.protocol)
            for each in self._sessions.other_builds.here(now)
        )
        process = ProcessStatus(
            run_id=self._run_id,
            run=self._facts,
            disk=self._disk(),
            expiring_tokens=self._expiring_tokens(time.time(), renting),
            peer_faults=self._sessions.faults.total,
            refused_peers=refused,
            learner_silent_s=None if heard_at is None else now - heard_at,
            renting=renting,
            build=THIS_BUILD.name,
            protocol=THIS_BUILD.protocol,
            other_builds=others[-OTHER_BUILDS_SHOWN_MAX:],
            other_builds_total=len(others),
        )
        alerts = (*status.alerts, *process_alerts(status, process))
        of_the_run_first = tuple(sorted(alerts, key=lambda alert: alert.subject != ""))
        return replace(status, process=process, alerts=of_the_run_first)

    def _disk(self) -> DiskStatus | None:
        free = self._metrics.disk_free
        return None if free is None else DiskStatus(free, self._files.bytes_max)

    def _expiring_tokens(
        self, now_s: float, renting: RentingStatus | None
    ) -> tuple[TokenExpiry, ...]:
        # A rented box has a token of its own, which must expire with the box, so it is not reported.
        rented = set() if renting is None else {box.label for box in renting.boxes}
        # The status names tokens that expire within a week.
        return tuple(
            TokenExpiry(token.name, token.role, (token.expires_at or 0.0) - now_s)
            for token in self._access.expiring(now_s=now_s, within_s=7 * 86400.0)
            if token.name not in rented
        )

    def _refused_peers(self, status: Status, now: float) -> tuple[RefusedPeerStatus, ...]:
        names = {peer.id: peer.name for peer in (*status.workers, *status.relays)}
        refused = self._sessions.faults.refused(now)
        tokens = {each.peer: self._access.token_of(each.peer) or "" for each in refused}
        enrolled = {token: len(self._access.peers_of(token)) for token in {*tokens.values()}}
        return tuple(
            RefusedPeerStatus(
                id=each.peer,
                name=names.get(each.peer, ""),
                refused_s=each.refused_s,
                token=tokens[each.peer],
                token_peers=enrolled[tokens[each.peer]],
            )
            for each in refused
        )

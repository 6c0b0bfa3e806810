"""What the owner of a token may know about the run: its own boxes, and how far the run is.

It shows nothing about other boxes. Of what audits found it shows only convictions, because an owner
who saw each flagged answer could learn how to lie.
"""

from collections.abc import Collection, Iterable
from dataclasses import fields, replace

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.earned import WorkerEarned
from echo2d.core.coordinator.alerts import worker_alerts
from echo2d.core.status.schema import (
    EarnedStatus,
    OwnPeerStatus,
    OwnStatus,
    PeerStatus,
    ProgressStatus,
    Status,
    WorkerStatus,
)


def own_status(
    status: Status,
    enrolled: Collection[PeerId],
    convicted: Collection[PeerId],
    earned: EarnedStatus,
) -> OwnStatus:
    """Make the status for the owner of one token.

    enrolled: the peers of the token. convicted: peers of any token that an audit convicted. earned:
    what the enrolled peers earned.
    """
    mine, broadcast = frozenset(enrolled), status.broadcast
    progress = {peer.id: peer for peer in broadcast.peers} if broadcast else {}
    rows = tuple(
        _row(status, peer, progress.get(peer.id), convicted=peer.id in convicted)
        for peer in (*status.workers, *status.relays)
        if peer.id in mine
    )
    here = {row.id for row in rows}
    return OwnStatus(
        run_id="" if status.process is None else status.process.run_id,
        committed_step=status.committed_step,
        staleness_max=status.staleness_max,
        newest_version=status.newest_version,
        spreading_version=None if broadcast is None else broadcast.version,
        spreading_bytes=None if broadcast is None else broadcast.wire_bytes,
        peers=rows,
        absent=tuple(sorted(mine - here)),
        convicted=tuple(sorted(mine & frozenset(convicted))),
        earned=earned,
    )


def earned_together(workers: Iterable[WorkerEarned]) -> EarnedStatus:
    known = tuple(workers)
    return EarnedStatus(
        accepted_trajectories=sum(each.accepted for each in known),
        trained_trajectories=sum(each.trained for each in known),
        sent_bytes=sum(each.sent_bytes for each in known),
    )


def _row(
    status: Status, peer: PeerStatus, progress: ProgressStatus | None, *, convicted: bool
) -> OwnPeerStatus:
    worker = peer if isinstance(peer, WorkerStatus) else None
    attention = () if worker is None else worker_alerts(_without_audit(worker), status)
    known = [each.name for each in fields(OwnPeerStatus) if hasattr(peer, each.name)]
    return OwnPeerStatus(
        **{name: getattr(peer, name) for name in known},
        convicted=convicted,
        payload_bytes=0 if progress is None else progress.payload_bytes,
        verified=progress is not None and progress.verified,
        attention=tuple(attention),
    )


def _without_audit(worker: WorkerStatus) -> WorkerStatus:
    return replace(worker, learner_k=None, standing="", verdict="")

"""`GET /v1/status`: everything there is to know about a run, as plain values (JSON). Reads, decides nothing.

Digests are hex, durations seconds, uplinks bytes/s, `lag` in versions; `leased` counts samples. `leases_end_s`: when
the first of a worker's leases goes to somebody else, if it stays silent. `reachable`: whether others can dial the peer,
null: not known yet. `duplicates`: frames that came though held. `catch_ups`: forms for peers that cannot use what
spreads. `version_bytes`: of what spread. `active`: whether it gets leases; `mu`: trajectories/s that it makes with
them, the share that is thrown away taken off. `provision`: what is needed and what there is, in trajectories/s, and
`bottleneck`. `bubble_ratio`: of the last RECENT_MAX steps. `attention`: sentences for people.
"""

from collections.abc import Iterable
from typing import Any

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.publishing import Publishing
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions, facts_of
from echo2d.core.coordinator.activation_loop import ActivationLoop
from echo2d.core.coordinator.alerts import alerts
from echo2d.core.coordinator.learner_api import LearnerCalls
from echo2d.core.gateway.calls import GatewayCalls
from echo2d.core.rollouts.groups import Groups
from echo2d.core.rollouts.leases import Lease
from echo2d.core.rollouts.staleness import Staleness


def make_status(
    rules: RunRules,
    *,
    now: float,
    members: Membership,
    versions: PublishedVersions,
    staleness: Staleness,
    groups: Groups,
    gateway: GatewayCalls,
    publishing: Publishing,
    calls: LearnerCalls,
    statistics: Statistics,
    activation_loop: ActivationLoop,
) -> dict[str, Any]:
    """Of one moment; `now` is monotonic seconds."""
    newest, leases = versions.newest, _by_worker(groups.leases)
    facts = {
        "epoch": calls.epoch,
        "open_step": staleness.open_step,
        "committed_step": staleness.committed,
        "checkpoint_step": staleness.checkpoint,
        "staleness_max": rules.staleness_max,
        "publish_every": calls.publish_every,
        "trajectories_per_step": rules.trajectories_per_step,
        "group_size": rules.group_size,
        "heartbeat_s": rules.heartbeat_s,
        "dissemination_bound": statistics.dissemination_bound(rules.staleness_max),
        "newest_version": _version(newest),
        "groups": {
            "buffered": staleness.buffered,
            "in_flight": groups.in_flight,
            "queued": staleness.queued(groups.in_flight),
            "leases": len(groups.leases),
            "tokens_under_way": groups.leases.tokens_under_way,
        },
        "broadcast": _broadcast(publishing.spreading, publishing.waiting, members),
        "catch_ups": [_form(transmission) for transmission in publishing.catch_ups],
        "workers": [
            {
                **_worker(peer, versions, groups, leases.get(peer.peer, []), now),
                **activation_loop.of(peer),
            }
            for peer in members
            if peer.kind == "worker"
        ],
        "provision": activation_loop.facts(),
        "relays": [_peer(peer, now) for peer in members if peer.kind == "relay"],
        "seed_alive": members.seed is not None,
        "seed_uplink": None if members.seed is None else members.seed.uplink,
        "gateway": gateway.facts(),
        **_statistics(statistics, now),
    }
    return {**facts, "attention": alerts(facts)}


def _statistics(statistics: Statistics, now: float) -> dict[str, Any]:
    return {
        "bubble_ratio": statistics.bubble_ratio,
        "learner_train_s": statistics.learner_train_s,
        "learner_wait_s": statistics.learner_wait_s,
        "versions_published": statistics.versions_published,
        "staleness": {
            str(staleness): count for staleness, count in sorted(statistics.staleness.items())
        },
        "trajectories": {
            "trained": statistics.trajectories_trained,
            "dropped": statistics.trajectories_dropped,
        },
        "tokens_accepted": statistics.tokens_accepted,
        "handed_over": {
            "partials": statistics.partials_handed_over,
            "tokens": statistics.tokens_handed_over,
        },
        "groups_dropped": dict(statistics.dropped_groups),
        "answer_tokens": statistics.lengths,
        "results_refused": dict(statistics.refused_results),
        "rewards": [[step, reward] for step, reward in statistics.batch_rewards],
        "t_train_s": list(statistics.t_train_s),
        "t_verify_s": list(statistics.t_verify_s),
        "t_bcast_s": list(statistics.t_bcast_s),
        "refit_pause_s": list(statistics.refit_pause_s),
        "still_s": list(statistics.still_s),
        "seed_copies": {str(version): copies for version, copies in statistics.seed_copies.items()},
        "wire_bytes": statistics.wire_bytes,
        "full_bytes": statistics.full_bytes,
        "version_bytes": {
            str(version): {"wire_bytes": wire, "full_bytes": full}
            for version, (wire, full) in statistics.version_bytes.items()
        },
        "fault_counts": dict(statistics.fault_counts),
        "faults": [
            {"kind": kind, "text": text, "times": fault.times, "age_s": now - fault.at}
            for (kind, text), fault in statistics.faults.items()
        ],
    }


def _version(record: VersionPublished | None) -> dict[str, Any] | None:
    return None if record is None else facts_of(record)


def _by_worker(leases: Iterable[Lease]) -> dict[PeerId, list[Lease]]:
    found: dict[PeerId, list[Lease]] = {}
    for lease in leases:
        found.setdefault(lease.worker, []).append(lease)
    return found


def _peer(peer: Peer, now: float) -> dict[str, Any]:
    return {
        "id": peer.peer,
        "name": peer.name,
        "kind": peer.kind,
        "state": peer.state,
        "alive": peer.alive,
        "silent_s": now - peer.heard_at,
        "uplink": peer.uplink,
        "quarantined": peer.quarantined,
        "reachable": peer.reachable,
    }


def _worker(
    peer: Peer, versions: PublishedVersions, groups: Groups, leases: list[Lease], now: float
) -> dict[str, Any]:
    serving, newest = versions.live(peer.serving), versions.newest
    return {
        **_peer(peer, now),
        "slots": peer.slots,
        "running": peer.running,
        "leases": len(leases),
        "leases_end_s": min((lease.silent_at - now for lease in leases), default=None),
        "leased": groups.leases.load(peer.peer),
        "serving": _version(serving),
        "lag": None if serving is None or newest is None else newest.version - serving.version,
        "accepted": peer.accepted,
        "refit_pause_s": peer.refit_pause_s,
        "memory_ok": peer.memory_ok,
    }


def _broadcast(
    transmission: Transmission | None, waiting: VersionPublished | None, members: Membership
) -> dict[str, Any] | None:
    if transmission is None:
        return None
    return {
        **_form(transmission),
        "waiting_version": None if waiting is None else waiting.version,
        "peers": [_progress(peer, transmission) for peer in members.receivers()],
    }


def _form(transmission: Transmission) -> dict[str, Any]:
    plan = transmission.plan
    return {
        "version": transmission.record.version,
        "form": transmission.form,
        "base_version": None if transmission.base is None else transmission.base.version,
        "whole": transmission.totals is not None,
        "wire_bytes": None if transmission.totals is None else transmission.totals.wire_bytes,
        "full_bytes": transmission.record.full_bytes,
        "shape": None if plan is None else plan.shape,
        "predicted_s": None if plan is None else plan.predicted_s,
    }


def _progress(peer: Peer, transmission: Transmission) -> dict[str, Any]:
    payload_bytes, duplicates = transmission.received.get(peer.peer, (0, 0))
    return {
        "id": peer.peer,
        "name": peer.name,
        "payload_bytes": payload_bytes,
        "duplicates": duplicates,
        "verified": peer.peer in transmission.verified,
        "failed": peer.peer in transmission.failed,
    }

"""Makes the `Status` of a run (`core/status/schema.py`) from the parts of the coordinator.

It reads every part and decides nothing. The process around the machine adds what only it knows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from echo2d.core.audit.audits import Audits
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.capacity.bottleneck import Bottleneck
from echo2d.core.capacity.estimators import quantile
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.worker_quality import WorkerQuality
from echo2d.core.coordinator.alerts import alerts
from echo2d.core.coordinator.costs import Traffic
from echo2d.core.coordinator.parts import CoordinatorParts
from echo2d.core.rules.run import RunRules
from echo2d.core.status.schema import (
    AlertKind,
    AuditStatus,
    BroadcastStatus,
    EpisodesStatus,
    EvaluationStatus,
    FailingStatus,
    FaultStatus,
    FormStatus,
    GroupsStatus,
    HandedOverCounts,
    PeerStatus,
    ProgressStatus,
    Status,
    TaskStatus,
    TinkerStatus,
    TotalsStatus,
    TrajectoryCounts,
    VersionBytes,
    VersionStatus,
    WorkerStatus,
)
from echo2d.core.tinker.figures import Prices
from echo2d.core.work.evaluation.evaluations import Evaluations
from echo2d.core.work.evaluation.json_form import evaluated_json
from echo2d.core.work.leases import TRAINING
from echo2d.core.work.training.group_table import BetweenTurns
from echo2d.core.work.training.groups import Groups
from echo2d.core.work.training.reward_watch import FailingRewards

# With these alerts, the measurements say nothing about the present bottleneck.
NO_BOTTLENECK: Mapping[AlertKind, str] = {
    "run_finished": "none: the run is finished",
    "learner_silent": "not known: the learner is silent",
}


def make_status(parts: CoordinatorParts, *, now: float) -> Status:
    """The run at one moment; `now` is monotonic seconds."""
    rules, members, staleness = parts.rules, parts.members, parts.staleness
    groups, statistics = parts.groups, parts.statistics
    workers, costs = _Workers(parts, now), parts.costs.status(staleness.committed, now=now)
    prices = Prices(costs.workers_usd, rules.activation.learner_usd_per_h)
    status = Status(
        epoch=parts.calls.epoch,
        learner=parts.calls.learner(now),
        totals=TotalsStatus(
            statistics.run_trained, statistics.run_dropped, parts.versions.publish_seq
        ),
        open_step=staleness.open_step,
        committed_step=staleness.committed,
        checkpoint_step=staleness.checkpoint,
        staleness_max=rules.staleness_max,
        publish_every=parts.calls.publish_every,
        trajectories_per_step=rules.trajectories_per_step,
        group_size=rules.group_size,
        heartbeat_s=rules.heartbeat_s,
        dissemination_bound=statistics.dissemination_bound(rules.staleness_max),
        newest_version=_version(parts.versions.newest),
        groups=GroupsStatus(
            buffered=staleness.buffered,
            in_flight=groups.in_flight,
            queued=staleness.queued(groups.in_flight),
            leases=parts.scheduler.leases.count(TRAINING),
            tokens_under_way=parts.scheduler.leases.tokens_under_way,
        ),
        broadcast=_broadcast(parts.publishing.spreading, parts.publishing.waiting, members),
        catch_ups=tuple(map(_form, parts.publishing.catch_ups)),
        workers=tuple(workers.status(peer) for peer in members if peer.kind == "worker"),
        provision=parts.activation_loop.provision(),
        costs=costs,
        relays=tuple(
            PeerStatus(**_of_peer(peer, parts.costs.of(peer.peer).traffic, now))
            for peer in members
            if peer.kind == "relay"
        ),
        seed_alive=members.seed is not None,
        seed_uplink=None if members.seed is None else members.seed.reach.uplink,
        seed_build=None if members.seed is None else members.seed.build.name,
        gateway=parts.gateway.status(),
        tinker=None if parts.tinker is None else parts.tinker.status(prices, now=now),
        audit=None if parts.audits is None else _audit(parts.audits, members),
        tasks=_tasks(rules, groups, statistics),
        evaluations=tuple(_evaluation(parts.evaluations, each.name) for each in rules.evals),
        **_counted(statistics, rules, now),
    )
    found = tuple(alerts(status))
    kinds = {alert.kind for alert in found}
    words = next((words for kind, words in NO_BOTTLENECK.items() if kind in kinds), None)
    if status.tinker is not None:
        words = _waiting_words(status.tinker)
    if words is not None:
        unknown = Bottleneck("unknown", words)
        status = replace(status, provision=replace(status.provision, bottleneck=unknown))
    return replace(status, alerts=found)


def _waiting_words(tinker: TinkerStatus) -> str:
    """What the clients of the Tinker API wait for."""
    sessions = tinker.sessions
    learner = sum(each.operations_waiting + each.unscored for each in sessions)
    waiting = sum(each.samples_waiting for each in sessions)
    other = sum(each.other_weights for each in sessions)
    weights = f", {other} of them for other weights than those that are served" if other else ""
    return f"calls that wait for the learner: {learner}; samples that wait for workers: {waiting}{weights}"


def _counted(statistics: Statistics, rules: RunRules, now: float) -> dict[str, Any]:
    """The fields that come from counters and measurements."""
    usd_per_byte = rules.seed_usd_per_gb_up / 1e9
    return {
        "bubble_ratio": statistics.learner.bubble_ratio,
        "learner_train_s": statistics.learner.trained_s,
        "learner_wait_s": statistics.learner.waited_s,
        "versions_published": statistics.versions_published,
        "staleness": dict(sorted(statistics.staleness.items())),
        "trajectories": TrajectoryCounts(
            statistics.trajectories_trained, statistics.trajectories_dropped
        ),
        "tokens_accepted": statistics.tokens_accepted,
        "tokens_trained": statistics.tokens_trained,
        "handed_over": HandedOverCounts(
            statistics.partials_handed_over, statistics.tokens_handed_over
        ),
        "tokens_recomputed": statistics.tokens_recomputed,
        "groups_dropped": dict(statistics.dropped_groups),
        "answer_tokens": statistics.lengths,
        "wasted_tokens": dict(statistics.dropped_tokens),
        "results_refused": dict(statistics.refused_results),
        "rewards": tuple(statistics.batch_rewards),
        "flat_groups": tuple(statistics.flat_groups),
        "t_train_s": tuple(statistics.t_train_s),
        "t_verify_s": tuple(statistics.t_verify_s),
        "t_bcast_s": tuple(statistics.t_bcast_s),
        "refit_pause_s": tuple(statistics.refit_pause_s),
        "recompute_s": tuple(statistics.recompute_s),
        "still_s": tuple(statistics.still_s),
        "seed_copies": dict(statistics.sent.seed_copies),
        "seed_usd_per_gb_up": rules.seed_usd_per_gb_up,
        "seed_usd": {
            version: usd_per_byte * copies * statistics.sent.by_version[version][0]
            for version, copies in statistics.sent.seed_copies.items()
            if version in statistics.sent.by_version
        },
        "seed_sent_bytes": statistics.sent.seed_bytes,
        "seed_usd_total": usd_per_byte * statistics.sent.seed_bytes,
        "wire_bytes": statistics.sent.wire_bytes,
        "full_bytes": statistics.sent.full_bytes,
        "version_bytes": {
            version: VersionBytes(wire, full)
            for version, (wire, full) in statistics.sent.by_version.items()
        },
        "fault_counts": dict(statistics.fault_counts),
        "faults": tuple(
            FaultStatus(kind, text, fault.times, now - fault.at)
            for (kind, text), fault in statistics.faults.items()
        ),
    }


def _version(record: VersionPublished | None) -> VersionStatus | None:
    if record is None:
        return None
    return VersionStatus(record.version, record.digest.hex(), record.publish_seq)


def _of_peer(peer: Peer, traffic: Traffic, now: float) -> dict[str, Any]:
    """The fields that both workers and relays have."""
    return {
        "id": peer.peer,
        "name": peer.name,
        "kind": peer.kind,
        "state": peer.state,
        "alive": peer.alive,
        "silent_s": now - peer.heard_at,
        "uplink": peer.reach.uplink,
        "quarantined": peer.reach.quarantined,
        "misreports": peer.service.misreports,
        "token": peer.token,
        "cordoned": peer.service.cordoned,
        "draining": peer.service.draining,
        "reachable": peer.reach.reachable,
        "build": peer.build.name,
        "protocol": peer.build.protocol,
        "received_bytes": traffic.received,
        "sent_bytes": traffic.sent,
    }


def _audit(audits: Audits, members: Membership) -> AuditStatus:
    limits, mixed = audits.baseline.limits, audits.mixed.limits
    return AuditStatus(
        auditors=sum(peer.kind == "auditor" and peer.alive for peer in members),
        trusts=audits.trusts,
        learnt=audits.baseline.learnt,
        k_max=None if limits is None else limits.k,
        misses_max=None if limits is None else limits.misses,
        learnt_mixed=audits.mixed.learnt if audits.in_place else None,
        k_max_mixed=None if mixed is None else mixed.k,
        held_back=tuple(
            sorted(
                {peer.quantization for peer in members.workers() if peer.service.held_back} - {""}
            )
        ),
        pending=audits.scorers.pending,
        waiting=len(audits.waiting),
        scored=audits.scorers.scored,
        skipped=audits.skipped,
        delay_s=audits.waiting.delay_s,
        scoring_s=audits.scorers.scoring_s,
        loading_s=audits.scorers.loading_s,
    )


class _Workers:
    """Makes the status of each worker."""

    def __init__(self, parts: CoordinatorParts, now: float) -> None:
        self._audits, self._costs = parts.audits, parts.costs
        self._set_aside = parts.groups.watch.set_aside
        self._versions, self._statistics = parts.versions, parts.statistics
        self._activation_loop = parts.activation_loop
        self._now = now
        self._leases, self._deliveries = parts.scheduler.leases, parts.scheduler.deliveries
        self._version = cache(_version)  # most workers serve the same few versions

    def status(self, peer: Peer) -> WorkerStatus:
        now, leases = self._now, self._leases.of_worker(peer.peer)
        serving, newest = self._versions.live(peer.engine.serving), self._versions.newest
        value = self._activation_loop.of(peer)
        case = None if self._audits is None else self._audits.cases.get(peer.peer)
        # A worker without a scored trajectory has no quality yet.
        quality = self._statistics.qualities.of(peer.peer) or WorkerQuality()
        bill = self._costs.of(peer.peer)
        return WorkerStatus(
            **_of_peer(peer, bill.traffic, now),
            slots=peer.slots,
            usable=min(peer.slots, self._deliveries.bounds(peer.peer)[0]),
            tokens_per_s=self._deliveries.rate(peer.peer),
            slower=self._deliveries.slower(peer.peer),
            running=peer.engine.running,
            leases=len(leases),
            leases_end_s=min([lease.silent_at - now for lease in leases], default=None),
            leased=self._leases.load(peer.peer),
            serving=self._version(serving),
            lag=None if serving is None or newest is None else newest.version - serving.version,
            accepted=peer.engine.accepted,
            refit_pause_s=peer.engine.refit_pause_s,
            recomputed_tokens=peer.engine.recomputed_tokens,
            recompute_s=peer.engine.recompute_s,
            memory_ok=peer.engine.memory_ok,
            disk_free_bytes=peer.engine.disk_free,
            active=peer.service.active and peer.state == "joined" and not peer.service.retiring,
            leaving=peer.service.leaving,
            mu=value.mu,
            mu_sd=value.mu_sd,
            usd_per_h=value.price.usd_per_h,
            usd_per_gb_down=value.price.usd_per_gb_down,
            usd_per_gb_up=value.price.usd_per_gb_up,
            rho=value.rho,
            cost_usd=bill.at(now),
            reward=quality.reward if quality.scored else None,
            reward_above=quality.above,
            answer_tokens=quality.tokens if quality.scored else None,
            used=self._statistics.measurements.yields.of(peer.peer),
            trained=quality.trained,
            audited=0 if case is None else case.audited,
            flagged=0 if case is None else case.flagged,
            standing="" if self._audits is None else self._audits.standing(peer.peer),
            verdict="" if case is None else case.verdict,
            learner_k=quality.learner_k,
            learner_z=quality.learner_z,
            set_aside=self._set_aside.get(peer.peer, "") if peer.service.cordoned else "",
        )


def _broadcast(
    transmission: Transmission | None, waiting: VersionPublished | None, members: Membership
) -> BroadcastStatus | None:
    if transmission is None:
        return None
    form = _form(transmission)
    return BroadcastStatus(
        version=form.version,
        form=form.form,
        base_version=form.base_version,
        whole=form.whole,
        wire_bytes=form.wire_bytes,
        full_bytes=form.full_bytes,
        shape=form.shape,
        predicted_s=form.predicted_s,
        waiting_version=None if waiting is None else waiting.version,
        peers=tuple(_progress(peer, transmission) for peer in members.receivers()),
    )


def _form(transmission: Transmission) -> FormStatus:
    plan, totals = transmission.plan, transmission.totals
    return FormStatus(
        version=transmission.record.version,
        form=transmission.form,
        base_version=None if transmission.base is None else transmission.base.version,
        whole=totals is not None,
        wire_bytes=None if totals is None else totals.wire_bytes,
        full_bytes=transmission.record.full_bytes,
        shape=None if plan is None else plan.shape,
        predicted_s=None if plan is None else plan.predicted_s,
    )


def _progress(peer: Peer, transmission: Transmission) -> ProgressStatus:
    payload_bytes, duplicates = transmission.received.get(peer.peer, (0, 0))
    return ProgressStatus(
        peer.peer,
        peer.name,
        payload_bytes,
        duplicates,
        verified=peer.peer in transmission.verified,
        failed=peer.peer in transmission.failed,
    )


def _tasks(rules: RunRules, groups: Groups, statistics: Statistics) -> tuple[TaskStatus, ...]:
    total = sum(task.weight for task in rules.tasks)
    between = groups.between_turns() if any(task.episode for task in rules.tasks) else {}
    return tuple(
        TaskStatus(
            name=task.name,
            weight=float(task.weight / total),
            in_flight=groups.in_flight_by_task.get(task.name, 0),
            retired=groups.prompts[task.name].sampler.retired,
            passed=groups.prompts[task.name].sampler.passed,
            episodes=None
            if task.episode is None
            else _episodes(
                between.get(task.name, BetweenTurns()), statistics.tool_s.get(task.name, ())
            ),
            failing=_failing(
                groups.watch.status(task.name, group_size=rules.drawn(task), now=statistics.now)
            ),
        )
        for task in rules.tasks
    )


def _failing(found: FailingRewards | None) -> FailingStatus | None:
    return None if found is None else FailingStatus(**asdict(found))


def _episodes(between: BetweenTurns, tool_s: Iterable[float]) -> EpisodesStatus:
    return EpisodesStatus(
        offered=between.offered,
        parked=between.parked,
        waiting=between.waiting,
        tool_s_median=quantile(tool_s, 0.5),
        tool_s_p90=quantile(tool_s, 0.9),
    )


def _evaluation(evaluations: Evaluations, name: str) -> EvaluationStatus:
    newest = next((each for each in reversed(evaluations.known) if each.name == name), None)
    found = {} if newest is None else evaluated_json(newest)
    open_ = next((each for each in evaluations.open if each.rules.name == name), None)
    return EvaluationStatus(
        name=name,
        version=found.get("version"),
        rows=found.get("rows", 0),
        of=found.get("of", 0),
        samples=found.get("samples", 0),
        mean=found.get("mean"),
        se=found.get("se"),
        truncated=found.get("truncated"),
        tokens=found.get("tokens"),
        open_version=None if open_ is None else open_.key.version,
        open_answers=0 if open_ is None else open_.answered,
        open_of=0 if open_ is None else open_.of * open_.rules.samples,
    )

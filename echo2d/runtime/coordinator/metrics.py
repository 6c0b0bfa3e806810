"""The coordinator's metrics for Prometheus: a table of families, each read off a `Status`.

`GET /metrics` serves them to any credential that may read the status. The help texts are repeated
in docs/metrics.md, and a test compares the two. A family without samples means that there is no
value now: before the first version, or where nothing is rented.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client import Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from echo2d.core.capacity.bottleneck import BOTTLENECK_KINDS
from echo2d.core.capacity.estimators import quantile
from echo2d.core.cluster.statistics import RECENT_MAX
from echo2d.core.status.schema import (
    ALERT_KINDS,
    NOTICES,
    AuditStatus,
    EpisodesStatus,
    EvaluationStatus,
    RentingStatus,
    Status,
    TaskStatus,
    WorkerStatus,
)
from echo2d.runtime.process.prometheus import (
    PERSIST_BUCKETS_S,
    Family,
    LoopMetrics,
    Samples,
    by_key,
    counter,
    gauge,
)

PERCENTILES = (50, 95, 99)
STANDINGS = ("trusted", "new", "clear", "flagged", "convicted", "suspected")


Number = float | None


def _peers(status: Status) -> Samples:
    count = Counter((peer.kind, peer.state) for peer in (*status.workers, *status.relays))
    return list(count.items())


def _recent(
    name: str, about: str, durations: Callable[[Status], Sequence[float]]
) -> Family[Status]:
    """A gauge with percentiles of the newest durations, in seconds.

    It is no summary of Prometheus: that has a sum and a count of all durations ever.
    """

    def samples(status: Status) -> Samples:
        return [((str(each),), quantile(durations(status), each / 100)) for each in PERCENTILES]

    return Family(
        f"echo2d_recent_{name}_seconds",
        f"{about}; of the last {RECENT_MAX}",
        samples,
        ("percentile",),
    )


def _broadcast_peers(status: Status) -> Samples:
    states = Counter(
        "verified" if peer.verified else "failed" if peer.failed else "receiving"
        for peer in (() if status.broadcast is None else status.broadcast.peers)
    )
    return [((state,), states[state]) for state in ("receiving", "verified", "failed")]


def _alerts(status: Status) -> Samples:
    count = Counter(alert.kind for alert in status.alerts)
    return [((kind,), count[kind]) for kind in ALERT_KINDS]


def _seed_copies(status: Status) -> Samples:
    # The mapping is in the order of measurement: the last entry is the newest.
    return [((), copies) for copies in list(status.seed_copies.values())[-1:]]


def _mu_min(status: Status) -> Number:
    provision = status.provision
    # Measured, and no number would do: infinitely many are missing, and alerts fire.
    return (
        math.inf if provision.feasible is False and provision.mu_min is None else provision.mu_min
    )


def _newest_full_bytes(status: Status) -> Number:
    sizes = status.version_bytes
    return sizes[max(sizes)].full_bytes if sizes else None


def _renting(status: Status) -> RentingStatus | None:
    return None if status.process is None else status.process.renting


def _rented(name: str, about: str, read: Callable[[RentingStatus], float]) -> Family[Status]:
    """A gauge about renting; it has no sample where nothing is rented."""

    def number(status: Status) -> float | None:
        renting = _renting(status)
        return None if renting is None else read(renting)

    return gauge(f"echo2d_rented_{name}", about, number)


def _rented_boxes(status: Status) -> Samples:
    renting = _renting(status)
    return [] if renting is None else [((state,), n) for state, n in renting.states.items()]


def _bottleneck(status: Status) -> Samples:
    return [((kind,), kind == status.provision.bottleneck.kind) for kind in BOTTLENECK_KINDS]


def _audit(
    name: str, about: str, read: Callable[[AuditStatus], Number], *, counter: bool = False
) -> Family[Status]:
    """A metric about the audit; it has no sample where nothing is audited."""

    def samples(status: Status) -> Samples:
        number = None if status.audit is None else read(status.audit)
        return [] if number is None else [((), number)]

    return Family(f"echo2d_audit_{name}", about, samples, (), counter)


def _standings(status: Status) -> Samples:
    count = Counter(worker.standing for worker in status.workers)
    return [((standing,), count[standing]) for standing in STANDINGS]


def _of_worker(
    name: str, help_text: str, read: Callable[[WorkerStatus], Number], *, counter: bool = False
) -> Family[Status]:
    """A metric of each worker that is not gone."""

    def samples(status: Status) -> Samples:
        return [
            ((worker.id, worker.name), read(worker))
            for worker in status.workers
            if worker.state != "gone"
        ]

    return Family(f"echo2d_worker_{name}", help_text, samples, ("worker", "name"), counter)


def _of_eval(
    name: str, about: str, read: Callable[[EvaluationStatus], Number | None]
) -> Family[Status]:
    """A gauge of each [[eval]]; it has no sample before the first score."""

    def samples(status: Status) -> Samples:
        numbers = [((each.name,), read(each)) for each in status.evaluations]
        return [(labels, number) for labels, number in numbers if number is not None]

    return Family(f"echo2d_eval_{name}", about, samples, ("name",))


def _of_task(
    name: str, about: str, read: Callable[[TaskStatus], Number], *, counter: bool = False
) -> Family[Status]:
    def samples(status: Status) -> Samples:
        return [((task.name,), read(task)) for task in status.tasks]

    return Family(f"echo2d_task_{name}", about, samples, ("task",), counter)


def _of_environment(
    name: str, about: str, read: Callable[[EpisodesStatus], Number]
) -> Family[Status]:
    """A gauge of each task that is an environment."""

    def samples(status: Status) -> Samples:
        return [
            ((task.name,), read(task.episodes))
            for task in status.tasks
            if task.episodes is not None
        ]

    return Family(f"echo2d_task_{name}", about, samples, ("task",))


def _tool_seconds(status: Status) -> Samples:
    return [
        ((task.name, share), number)
        for task in status.tasks
        if (each := task.episodes) is not None
        for share, number in (("50", each.tool_s_median), ("90", each.tool_s_p90))
    ]


_FAMILIES: tuple[Family[Status], ...] = (
    gauge("echo2d_epoch", "Learner session in force; 0: none yet", lambda status: status.epoch),
    gauge(
        "echo2d_open_step",
        "Lowest train step whose batch is not full",
        lambda status: status.open_step,
    ),
    gauge(
        "echo2d_committed_step",
        "Last train step that the learner committed",
        lambda status: status.committed_step,
    ),
    gauge(
        "echo2d_checkpoint_step",
        "Last train step that is durable at the learner",
        lambda status: status.checkpoint_step,
    ),
    gauge(
        "echo2d_newest_version",
        "Newest published policy version; no sample before the first",
        lambda status: None if status.newest_version is None else status.newest_version.version,
    ),
    counter(
        "echo2d_versions_published", "Publishes accepted", lambda status: status.versions_published
    ),
    gauge("echo2d_staleness_max", "S, in train steps", lambda status: status.staleness_max),
    gauge(
        "echo2d_publish_every",
        "kappa in force, in train steps",
        lambda status: status.publish_every,
    ),
    gauge(
        "echo2d_seed_alive", "1 while the seed can be spoken to", lambda status: status.seed_alive
    ),
    Family("echo2d_peers", "Workers and relay peers, by state", _peers, ("kind", "state")),
    Family(
        "echo2d_groups",
        "Groups that are in no batch yet",
        by_key(
            lambda status: {
                "in_flight": status.groups.in_flight,
                "buffered": status.groups.buffered,
            }
        ),
        ("state",),
    ),
    gauge("echo2d_leases", "Leases that run", lambda status: status.groups.leases),
    Family(
        "echo2d_gateway_choices",
        "Samples that calls of the gateway wait for",
        by_key(
            lambda status: {
                "waiting": status.gateway.waiting,
                "running": status.gateway.running,
            }
        ),
        ("state",),
    ),
    Family(
        "echo2d_gateway_calls",
        "Calls that ended, by how",
        by_key(lambda status: status.gateway.ended),
        ("outcome",),
        counter=True,
    ),
    counter(
        "echo2d_gateway_tokens", "Tokens told to callers", lambda status: status.gateway.tokens
    ),
    counter(
        "echo2d_gateway_handed_over",
        "Samples of calls that went on at another worker",
        lambda status: status.gateway.handed_over,
    ),
    Family(
        "echo2d_groups_dropped",
        "Groups given up, by reason",
        by_key(lambda status: status.groups_dropped),
        ("reason",),
        counter=True,
    ),
    Family(
        "echo2d_results_refused",
        "Results refused, by reason",
        by_key(lambda status: status.results_refused),
        ("reason",),
        counter=True,
    ),
    counter(
        "echo2d_trajectories_trained",
        "In committed steps",
        lambda status: status.trajectories.trained,
    ),
    counter(
        "echo2d_trajectories_dropped",
        "Given up with their groups",
        lambda status: status.trajectories.dropped,
    ),
    Family(
        "echo2d_answer_tokens",
        "Mean tokens of trained answers, and of answers dropped with their groups, by reason",
        by_key(lambda status: status.answer_tokens),
        ("fate",),
    ),
    Family(
        "echo2d_wasted_tokens",
        "Tokens of answers that were dropped, by reason",
        by_key(lambda status: status.wasted_tokens),
        ("reason",),
        True,
    ),
    gauge(
        "echo2d_reward_mean",
        "Mean reward of the last step that was trained",
        lambda status: status.rewards[-1][1] if status.rewards else None,
    ),
    gauge(
        "echo2d_learner_silent_seconds",
        "Since the learner was last heard; 0 while a call of it waits; no sample: never",
        lambda status: None if status.process is None else status.process.learner_silent_s,
    ),
    counter(
        "echo2d_learner_train_seconds",
        "Time the learner trained",
        lambda status: status.learner_train_s,
    ),
    counter(
        "echo2d_learner_wait_seconds",
        "Time between its commits in which the learner did not train; its share is the bubble",
        lambda status: status.learner_wait_s,
    ),
    gauge(
        "echo2d_mu_pool",
        "Trajectories per second of the active workers, as measured",
        lambda status: status.provision.mu_pool,
    ),
    gauge(
        "echo2d_mu_min",
        "Trajectories per second with which the learner never waits; +Inf: no number is enough",
        _mu_min,
    ),
    gauge(
        "echo2d_active_workers",
        "Workers that get leases",
        lambda status: sum(worker.active for worker in status.workers),
    ),
    counter(
        "echo2d_activation_changes",
        "Changes of the active workers that no event forced",
        lambda status: status.provision.changes,
    ),
    Family(
        "echo2d_bottleneck",
        "1 for the bottleneck: the stage for which the run waits now",
        _bottleneck,
        ("kind",),
    ),
    Family(
        "echo2d_rented_boxes", "Rented boxes that may be there, by state", _rented_boxes, ("state",)
    ),
    _rented(
        "usd_per_hour",
        "Price of all rented boxes that may be there",
        lambda renting: renting.usd_per_h,
    ),
    _rented(
        "spent_usd",
        "Spent on rented boxes in the whole run, by its book",
        lambda renting: renting.spent_usd,
    ),
    _rented(
        "set_aside_usd",
        "What boxes may still cost until they end by themselves",
        lambda renting: renting.set_aside_usd,
    ),
    _rented(
        "left_usd", "Of the budget, neither spent nor set aside", lambda renting: renting.left_usd
    ),
    counter(
        "echo2d_tokens_accepted",
        "Tokens of accepted results",
        lambda status: status.tokens_accepted,
    ),
    counter(
        "echo2d_tokens_recomputed",
        "Prompts and outputs whose KV caches refits dropped, of all workers",
        lambda status: status.tokens_recomputed,
    ),
    counter(
        "echo2d_wire_bytes",
        "Bytes of all encoded versions, each counted once",
        lambda status: status.wire_bytes,
    ),
    counter(
        "echo2d_full_bytes",
        "Bytes of the snapshots from which these were encoded",
        lambda status: status.full_bytes,
    ),
    gauge(
        "echo2d_version_full_bytes",
        "Bytes of the newest version that was encoded, in full; the disk needs room for two",
        _newest_full_bytes,
    ),
    Family(
        "echo2d_seed_copies",
        "Bytes the seed sent per byte of the newest version measured; about 1 in a chain",
        _seed_copies,
    ),
    counter(
        "echo2d_seed_sent_bytes",
        "Bytes that the seed sent since the coordinator started",
        lambda status: status.seed_sent_bytes,
    ),
    counter(
        "echo2d_seed_usd",
        "What these cost, by link.usd_per_gb_up",
        lambda status: status.seed_usd_total,
    ),
    gauge(
        "echo2d_workers_usd_per_hour",
        "Price of all workers that are here, without traffic",
        lambda status: status.costs.workers_usd_per_h,
    ),
    counter(
        "echo2d_workers_usd",
        "What workers cost since the coordinator started",
        lambda status: status.costs.workers_usd,
    ),
    gauge(
        "echo2d_usd_per_step",
        "The same per committed step",
        lambda status: status.costs.usd_per_step,
    ),
    Family(
        "echo2d_broadcast_peers",
        "Peers of the version that is being broadcast, by state",
        _broadcast_peers,
        ("state",),
    ),
    Family(
        "echo2d_faults",
        "Faults noted, by kind",
        by_key(lambda status: status.fault_counts),
        ("kind",),
        counter=True,
    ),
    counter(
        "echo2d_peer_faults",
        "Sessions closed for what their peer sent",
        lambda status: None if status.process is None else status.process.peer_faults,
    ),
    gauge(
        "echo2d_other_build_peers",
        "Peers that are refused because of their build",
        lambda status: None if status.process is None else status.process.other_builds_total,
    ),
    gauge(
        "echo2d_attention",
        "Alerts that `echo2d status` shows, but for run_finished and run_changed; 0: all is well",
        lambda status: sum(alert.kind not in NOTICES for alert in status.alerts),
    ),
    Family(
        "echo2d_alerts",
        "All of them by kind, which docs/operating.md explains",
        _alerts,
        ("kind",),
    ),
    _recent("train_step", "Train steps, net of waiting", lambda status: status.t_train_s),
    _recent(
        "t_verify",
        "Publish accepted until the last worker has verified the version",
        lambda status: status.t_verify_s,
    ),
    _recent(
        "t_bcast",
        "Publish accepted until the last worker serves the version",
        lambda status: status.t_bcast_s,
    ),
    _recent(
        "refit_pause",
        "Time in which an engine generated nothing for a refit",
        lambda status: status.refit_pause_s,
    ),
    _recent(
        "recompute",
        "Time in which an engine computed KV caches again after a refit",
        lambda status: status.recompute_s,
    ),
    _recent(
        "still",
        "Time in which workers generated nothing for a version, on average",
        lambda status: status.still_s,
    ),
    _of_worker(
        "lag_versions", "Newest published version minus the one served", lambda worker: worker.lag
    ),
    _of_worker("slots", "Samples its engines run at once", lambda worker: worker.slots),
    _of_worker(
        "slots_usable",
        "Of its slots, those it may use, because of what it delivers",
        lambda worker: worker.usable,
    ),
    _of_worker(
        "tokens_per_second",
        "Tokens it delivered lately while it held something",
        lambda worker: worker.tokens_per_s,
    ),
    _of_worker(
        "running_samples",
        "Samples now in its engines, as its last heartbeat said",
        lambda worker: worker.running,
    ),
    _of_worker("leased_samples", "Samples it holds", lambda worker: worker.leased),
    _of_worker("silent_seconds", "Since it was last heard", lambda worker: worker.silent_s),
    _of_worker(
        "disk_free_bytes",
        "What new versions may take on its disk; no sample: it does not say",
        lambda worker: worker.disk_free_bytes,
    ),
    _of_worker(
        "active",
        "1 while it gets leases; 0: it stands by, leaves, or is away",
        lambda worker: worker.active,
    ),
    _of_worker(
        "trajectories_per_second",
        "Its throughput while its slots are leased; the expected one until it is measured",
        lambda worker: worker.mu,
    ),
    _of_worker(
        "trained_share",
        "Of its trajectories that were trained on or not worth it, those that were trained on",
        lambda worker: worker.used,
    ),
    _of_worker("reward_mean", "Reward of its trajectories", lambda worker: worker.reward),
    _of_worker(
        "reward_above_others",
        "Its reward minus that of other workers on the same prompts",
        lambda worker: worker.reward_above,
    ),
    _of_worker("answer_tokens", "Tokens of its answers", lambda worker: worker.answer_tokens),
    _of_worker(
        "learner_k",
        "Nats between its logprobs and the learner's, per token of its trained answers",
        lambda worker: worker.learner_k,
    ),
    _of_worker(
        "learner_z",
        "Mean Z of its trained answers by the learner; about 0 for tokens drawn from its model",
        lambda worker: worker.learner_z,
    ),
    _of_worker("accepted", "Its accepted results", lambda worker: worker.accepted, counter=True),
    _of_worker(
        "trained", "Its answers that were trained on", lambda worker: worker.trained, counter=True
    ),
    _of_worker(
        "audited", "Its answers that an audit scored", lambda worker: worker.audited, counter=True
    ),
    _of_worker(
        "flagged",
        "Its audited answers that are not the model's",
        lambda worker: worker.flagged,
        counter=True,
    ),
    Family(
        "echo2d_audit_workers",
        "Workers, by what the audit thinks of them",
        _standings,
        ("standing",),
    ),
    _of_task("groups_in_flight", "Its groups that are not complete", lambda task: task.in_flight),
    _of_task("retired_rows", "Its rows that are retired", lambda task: task.retired),
    _of_task(
        "passed_prompts",
        "Its prompts that were passed over",
        lambda task: task.passed,
        counter=True,
    ),
    _of_environment(
        "offered_samples",
        "Its samples that no agent outside has begun",
        lambda episodes: episodes.offered,
    ),
    _of_environment(
        "parked_samples",
        "Its samples that wait for its environment",
        lambda episodes: episodes.parked,
    ),
    _of_environment(
        "waiting_turns",
        "Its samples that wait for a worker to write their next turn",
        lambda episodes: episodes.waiting,
    ),
    Family(
        "echo2d_task_tool_seconds",
        f"Time that its environment took for a step; of the last {RECENT_MAX}",
        _tool_seconds,
        ("task", "percentile"),
    ),
    _of_eval("version", "Version that was scored last", lambda each: each.version),
    _of_eval("score", "Its mean reward on held-out questions", lambda each: each.mean),
    _of_eval("score_error", "Standard error of that score", lambda each: each.se),
    _of_eval("truncated", "Share of its answers that were cut off", lambda each: each.truncated),
    _of_eval("answer_tokens", "Tokens of one of its answers", lambda each: each.tokens),
    _audit("auditors", "Auditors that are connected", lambda audit: audit.auditors),
    _audit("pending", "Parts of answers that wait for an auditor", lambda audit: audit.pending),
    _audit("waiting", "Samples whose groups wait for a verdict", lambda audit: audit.waiting),
    _audit(
        "delay_seconds", "How long a group waits for a verdict, mean", lambda audit: audit.delay_s
    ),
    _audit("scored", "Parts of answers scored", lambda audit: audit.scored, counter=True),
    _audit("skipped", "Parts of answers given up", lambda audit: audit.skipped, counter=True),
    _audit(
        "busy_seconds",
        "Time that auditors scored or loaded versions",
        lambda audit: audit.scoring_s + audit.loading_s,
        counter=True,
    ),
)


def _staleness(status: Status) -> Iterator[Metric]:
    # A histogram of Prometheus is cumulative: each bucket counts all staleness up to its bound.
    counts = status.staleness
    buckets, seen = [], 0
    for staleness in range(max([status.staleness_max, *counts]) + 1):
        seen += counts.get(staleness, 0)
        buckets.append((f"{staleness}.0", float(seen)))
    yield HistogramMetricFamily(
        "echo2d_trained_staleness_steps",
        "Staleness of trained trajectories, in train steps; none lies above echo2d_staleness_max",
        buckets=[*buckets, ("+Inf", float(seen))],
        sum_value=float(sum(staleness * count for staleness, count in counts.items())),
    )


class CoordinatorMetrics(LoopMetrics[Status]):
    """See the module docstring. ledger: the path of the ledger's file."""

    def __init__(self, *, ledger: Path) -> None:
        super().__init__(_FAMILIES, _staleness)
        registry, self._ledger = self.registry, ledger
        self.events_waiting = Gauge(
            "echo2d_events_waiting", "Events that wait for the core", registry=registry
        )
        self.persist_s = Histogram(
            "echo2d_persist_seconds",
            "One ledger transaction",
            buckets=PERSIST_BUCKETS_S,
            registry=registry,
        )
        self._ledger_bytes = Gauge(
            "echo2d_ledger_bytes", "Size of the ledger and its log", registry=registry
        )
        self._token_expiry = Gauge(
            "echo2d_token_expiry_timestamp_seconds",
            "When the first valid token of a role expires, in Unix time",
            ["role"],
            registry=registry,
        )

    def tokens_expire(self, at_s: Mapping[str, float]) -> None:
        """The first expiry of each role, as Unix time."""
        self._token_expiry.clear()
        for role, first_s in at_s.items():
            self._token_expiry.labels(role).set(first_s)

    def _measure(self, path: Path) -> None:
        super()._measure(path)
        # The write-ahead log is a file beside the ledger, and may be the larger of the two.
        log = self._ledger.with_name(self._ledger.name + "-wal")
        self._ledger_bytes.set(sum(map(_size, (self._ledger, log))))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

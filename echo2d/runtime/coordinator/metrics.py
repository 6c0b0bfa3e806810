"""The coordinator's metrics for Prometheus: those that status fields declare, and those computed from several fields.

`GET /metrics` serves them to any credential that may read the status. A family without samples means that there is no
value now, for example before the first version, or where nothing is rented.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from prometheus_client import Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from echo2d.core.capacity.bottleneck import BOTTLENECK_KINDS
from echo2d.core.capacity.estimators import quantile
from echo2d.core.cluster.learner_time import RECENT_MAX
from echo2d.core.status.schema import ALERT_KINDS, NOTICES, Status, WorkerStatus
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
# Takes a status, and yields some of its records, each with the values of its labels.
_Records = Callable[[Status], Iterable[tuple[tuple[str, ...], Any]]]


def _declared(kind: type, rows: _Records, labels: tuple[str, ...]) -> Iterator[Family[Status]]:
    """The metrics that the fields of these records declare, and those of the records inside them."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint, read, told = hints[item.name], attrgetter(item.name), item.metadata
        inner = next(
            (
                each
                for each in (hint, *get_args(hint))
                if isinstance(each, type) and is_dataclass(each)
            ),
            None,
        )
        if told.get("metric"):
            yield _family(hint, rows, read, told, labels)
        elif inner is not None and get_origin(hint) is not tuple:
            yield from _declared(inner, _inside(rows, read), labels)
        elif inner is not None and told["rows"]:
            yield from _declared(inner, _each(rows, read, told["rows"]), tuple(told["rows"]))


def _inside(rows: _Records, read: Callable[[Any], Any]) -> _Records:
    """The records in a field, where there are any."""
    return lambda status: [
        (values, found) for values, each in rows(status) if (found := read(each)) is not None
    ]


def _each(rows: _Records, read: Callable[[Any], Any], names: Mapping[str, str]) -> _Records:
    """The rows of a field that holds a list. A worker that is gone has no row."""
    return lambda status: [
        (tuple(getattr(each, name) for name in names.values()), each)
        for _, of in rows(status)
        for each in read(of)
        if not (isinstance(each, WorkerStatus) and each.state == "gone")
    ]


def _family(
    hint: Any,
    rows: _Records,
    read: Callable[[Any], Any],
    told: Mapping[str, Any],
    labels: tuple[str, ...],
) -> Family[Status]:
    name, meaning, counts = told["metric"], told["meaning"], told["counter"]
    if told["label"]:

        def entries(status: Status) -> Samples:
            return [
                ((*values, key), number)
                for values, each in rows(status)
                for key, number in read(each).items()
            ]

        return Family(name, meaning, entries, (*labels, told["label"]), counts)
    if get_origin(hint) is tuple:
        # This is not a Prometheus summary, which has a sum and a count of all durations ever.
        def recent(status: Status) -> Samples:
            return [
                ((*values, str(share)), quantile(read(each), share / 100))
                for values, each in rows(status)
                for share in PERCENTILES
            ]

        meaning = f"{meaning}; of the last {RECENT_MAX}"
        return Family(name, meaning, recent, (*labels, "percentile"))
    return Family(
        name,
        meaning,
        lambda status: [(values, read(each)) for values, each in rows(status)],
        labels,
        counts,
    )


# --- metrics that are computed from several fields


def _peers(status: Status) -> Samples:
    count = Counter((peer.kind, peer.state) for peer in (*status.workers, *status.relays))
    return list(count.items())


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
    # If the need was measured and no number of trajectories is enough, it is infinite, and alerts fire.
    return (
        math.inf if provision.feasible is False and provision.mu_min is None else provision.mu_min
    )


def _newest_full_bytes(status: Status) -> Number:
    sizes = status.version_bytes
    return sizes[max(sizes)].full_bytes if sizes else None


def _bottleneck(status: Status) -> Samples:
    return [((kind,), kind == status.provision.bottleneck.kind) for kind in BOTTLENECK_KINDS]


def _standings(status: Status) -> Samples:
    count = Counter(worker.standing for worker in status.workers)
    return [((standing,), count[standing]) for standing in STANDINGS]


def _tool_seconds(status: Status) -> Samples:
    return [
        ((task.name, share), number)
        for task in status.tasks
        if (each := task.episodes) is not None
        for share, number in (("50", each.tool_s_median), ("90", each.tool_s_p90))
    ]


_COUNTED: tuple[Family[Status], ...] = (
    gauge(
        "echo2d_newest_version",
        "Newest published policy version; no sample before the first",
        lambda status: None if status.newest_version is None else status.newest_version.version,
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
    gauge(
        "echo2d_reward_mean",
        "Mean reward of the last step that was trained",
        lambda status: status.rewards[-1][1] if status.rewards else None,
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
    Family(
        "echo2d_bottleneck",
        "1 for the bottleneck: the stage for which the run waits now",
        _bottleneck,
        ("kind",),
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
    Family(
        "echo2d_broadcast_peers",
        "Peers of the version that is being broadcast, by state",
        _broadcast_peers,
        ("state",),
    ),
    gauge(
        "echo2d_attention",
        "Alerts that `echo2d status` shows, but for run_finished and run_changed; 0: all is well",
        lambda status: sum(alert.kind not in NOTICES for alert in status.alerts),
    ),
    Family(
        "echo2d_alerts",
        "Alerts by kind, which docs/guide/operating.md explains",
        _alerts,
        ("kind",),
    ),
    Family(
        "echo2d_audit_workers",
        "Workers, by what the audit thinks of them",
        _standings,
        ("standing",),
    ),
    Family(
        "echo2d_task_tool_seconds",
        f"Time that its environment took for a step; of the last {RECENT_MAX}",
        _tool_seconds,
        ("task", "percentile"),
    ),
    counter(
        "echo2d_audit_busy_seconds",
        "Time that auditors scored or loaded versions",
        lambda status: (
            None if status.audit is None else status.audit.scoring_s + status.audit.loading_s
        ),
    ),
)
FAMILIES = (*_declared(Status, lambda status: [((), status)], ()), *_COUNTED)


def _staleness(status: Status) -> Iterator[Metric]:
    # A histogram of Prometheus is cumulative: each bucket counts all staleness up to its bound.
    counts = status.staleness
    buckets, seen = [], 0
    for staleness in range(max([status.staleness_max, *counts]) + 1):
        seen += counts.get(staleness, 0)
        buckets.append((f"{staleness}.0", float(seen)))
    yield HistogramMetricFamily(
        "echo2d_trained_staleness_steps",
        "Staleness of trained trajectories, in train steps; none is above echo2d_staleness_max",
        buckets=[*buckets, ("+Inf", float(seen))],
        sum_value=float(sum(staleness * count for staleness, count in counts.items())),
    )


class CoordinatorMetrics(LoopMetrics[Status]):
    """See the module docstring. ledger: the path of the ledger's file."""

    def __init__(self, *, ledger: Path) -> None:
        super().__init__(FAMILIES, _staleness)
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

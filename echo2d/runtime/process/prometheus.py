"""Metrics that every daemon shares, and `Family`: a metric that is read from the daemon's status.

The families of each daemon are tables in `coordinator/metrics` and `worker/metrics`, and
docs/reference/metrics.md lists all metrics with their help texts. Not here: who may read them.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from echo2d.this_build import THIS_BUILD

# Seconds between two measurements of how late the event loop wakes.
_TICK_S = 1.0
# Ticks between two measurements of the process and the disk.
KERNEL_TICKS = 5
DELAY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
PAUSE_BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
PERSIST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)

# Without this call each counter would have a second line with its creation time, which is not used.
disable_created_metrics()  # type: ignore[no-untyped-call]

StatusT = TypeVar("StatusT")
# Label values, and the value; None: there is no value now.
Samples = Iterable[tuple[tuple[str, ...], float | None]]


@dataclass(frozen=True, slots=True)
class Family(Generic[StatusT]):
    """One metric that is read from a status."""

    name: str
    help: str
    samples: Callable[[StatusT], Samples]
    labels: tuple[str, ...] = ()
    counter: bool = False  # otherwise it is a gauge

    def collect(self, status: StatusT) -> Metric:
        make = CounterMetricFamily if self.counter else GaugeMetricFamily
        family = make(self.name, self.help, labels=self.labels)
        for values, number in self.samples(status):
            if number is not None:
                family.add_metric(values, float(number))
        return family


def gauge(name: str, about: str, read: Callable[[StatusT], float | None]) -> Family[StatusT]:
    """A gauge of one number of a status, without a label."""
    return Family(name, about, lambda status: [((), read(status))])


def counter(name: str, about: str, read: Callable[[StatusT], float | None]) -> Family[StatusT]:
    """A counter of one number of a status, without a label."""
    return Family(name, about, lambda status: [((), read(status))], counter=True)


def number(name: str) -> Callable[[Mapping[str, Any]], Samples]:
    """The number under one key of a status that is a mapping."""
    return lambda status: [((), status[name])]


def by_key(read: Callable[[StatusT], Mapping[str, float]]) -> Callable[[StatusT], Samples]:
    """The numbers of a mapping in a status, each with its key as the label."""
    return lambda status: [((key,), value) for key, value in read(status).items()]


class LoopMetrics(Generic[StatusT]):
    """The metrics that every daemon has.

    families: metrics read from a status. extra: yields metrics that a Family cannot express.
    """

    def __init__(
        self,
        families: Sequence[Family[StatusT]],
        extra: Callable[[StatusT], Iterator[Metric]] = lambda _: iter(()),
    ) -> None:
        self.registry = CollectorRegistry()
        self._families, self._extra = families, extra
        # Bytes. None: not measured yet, or it cannot be measured.
        self.disk_free: int | None = None
        self._process: list[Metric] = []
        self.events = Counter(
            "echo2d_events", "Events handled, by kind", ["kind"], registry=self.registry
        )
        # A cache: looking up a label takes longer than counting.
        self._kinds: dict[type, Counter] = {}
        self._delay_s = Histogram(
            "echo2d_event_loop_delay_seconds",
            "How late the event loop woke; above 0.1 something blocks it",
            buckets=DELAY_BUCKETS_S,
            registry=self.registry,
        )
        build = Gauge(
            "echo2d_build_info",
            "1, with the build of this daemon and its control protocol as labels",
            ["build", "protocol"],
            registry=self.registry,
        )
        build.labels(THIS_BUILD.name, str(THIS_BUILD.protocol)).set(1)
        self._disk_free = Gauge(
            "echo2d_disk_free_bytes",
            "Free where this daemon keeps its files",
            registry=self.registry,
        )

    def count(self, event: object) -> None:
        """Count an event that the loop takes, under the name of its type."""
        kind = self._kinds.get(type(event))
        if kind is None:
            kind = self._kinds[type(event)] = self.events.labels(type(event).__name__)
        kind.inc()

    def render(self, status: StatusT) -> bytes:
        """All metrics in the text format of Prometheus."""
        read = [each.collect(status) for each in self._families]
        text: bytes = generate_latest(self.registry)
        return text + generate_latest(_Once([*read, *self._extra(status), *self._process]))

    async def watch(self, path: Path) -> None:
        """Measure the loop, the process and the disk of `path` until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.to_thread(self._measure, path)
            for _ in range(KERNEL_TICKS):
                due = clock() + _TICK_S
                await asyncio.sleep(_TICK_S)
                self._delay_s.observe(max(0.0, clock() - due))

    def _measure(self, path: Path) -> None:
        """Measure the process and the disk of `path`. Blocking."""
        self._process = list(ProcessCollector(registry=None).collect())
        try:
            self.disk_free = shutil.disk_usage(path).free
            self._disk_free.set(self.disk_free)
        except OSError:
            # The code that writes to this disk reports the fault.
            self.disk_free = None
            self._disk_free.set(float("nan"))


class _Once(CollectorRegistry):
    """A registry of metrics that have been collected already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics

"""What Prometheus sees of a daemon: what its loop counts and measures, and what its status says, by name and unit.

A `Family` reads one status; those of each daemon stand in a table (`coordinator/metrics`, `worker/metrics`), and all of
them, with their help texts, in docs/metrics.md. Not here: who may read them.
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

TICK_S = 1.0  # the loop is asked so often how late it is
KERNEL_TICKS = 5  # and the kernel every so many ticks
DELAY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
PAUSE_BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
PERSIST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second line for every counter that nobody reads

StatusT = TypeVar("StatusT")
Samples = Iterable[
    tuple[tuple[str, ...], float | None]
]  # label values, and the value; None: there is none now


@dataclass(frozen=True, slots=True)
class Family(Generic[StatusT]):
    """One metric read off a status."""

    name: str
    help: str
    samples: Callable[[StatusT], Samples]
    labels: tuple[str, ...] = ()
    counter: bool = False

    def collect(self, status: StatusT) -> Metric:
        make = CounterMetricFamily if self.counter else GaugeMetricFamily
        family = make(self.name, self.help, labels=self.labels)
        for values, number in self.samples(status):
            if number is not None:
                family.add_metric(values, float(number))
        return family


def value(read: Callable[[StatusT], float | None]) -> Callable[[StatusT], Samples]:
    """One number of a status, without a label."""
    return lambda status: [((), read(status))]


def number(name: str) -> Callable[[Mapping[str, Any]], Samples]:
    """The number under this key of a status that is a mapping."""
    return lambda status: [((), status[name])]


def by_key(read: Callable[[StatusT], Mapping[str, float]]) -> Callable[[StatusT], Samples]:
    """Every number of a mapping in a status, with its key as the label."""
    return lambda status: [((key,), value) for key, value in read(status).items()]


class LoopMetrics(Generic[StatusT]):
    """The metrics that every daemon has.

    families: read off a status. extra: collects from a status what a Family cannot express.
    """

    def __init__(
        self,
        families: Sequence[Family[StatusT]],
        extra: Callable[[StatusT], Iterator[Metric]] = lambda _: iter(()),
    ) -> None:
        self.registry = CollectorRegistry()
        self._families, self._extra = families, extra
        self._process: list[Metric] = []
        self.events = Counter(
            "echo2d_events", "Events handled, by kind", ["kind"], registry=self.registry
        )
        self._kinds: dict[type, Counter] = {}  # to look a label up takes longer than to count
        self._delay_s = Histogram(
            "echo2d_event_loop_delay_seconds",
            "How late the event loop woke; more than 0.1 is a loop that somebody blocks",
            buckets=DELAY_BUCKETS_S,
            registry=self.registry,
        )
        self._disk_free = Gauge(
            "echo2d_disk_free_bytes",
            "Free where this daemon keeps its files",
            registry=self.registry,
        )

    def count(self, event: object) -> None:
        """The loop has taken this event."""
        kind = self._kinds.get(type(event))
        if kind is None:
            kind = self._kinds[type(event)] = self.events.labels(type(event).__name__)
        kind.inc()

    def render(self, status: StatusT) -> bytes:
        """All metrics in Prometheus' text format."""
        read = [each.collect(status) for each in self._families]
        text: bytes = generate_latest(self.registry)
        return text + generate_latest(_Once([*read, *self._extra(status), *self._process]))

    async def watch(self, path: Path) -> None:
        """Measure the loop, the process and the disk of `path` until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.to_thread(self._measure, path)
            for _ in range(KERNEL_TICKS):
                due = clock() + TICK_S
                await asyncio.sleep(TICK_S)
                self._delay_s.observe(max(0.0, clock() - due))

    def _measure(self, path: Path) -> None:
        """What the kernel knows. Blocking."""
        self._process = list(ProcessCollector(registry=None).collect())
        try:
            self._disk_free.set(shutil.disk_usage(path).free)
        except OSError:  # those who write there will say so
            self._disk_free.set(float("nan"))


class _Once(CollectorRegistry):
    """A registry of metrics that have been collected already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics

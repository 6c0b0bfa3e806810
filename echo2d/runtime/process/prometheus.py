"""What Prometheus sees of a daemon: what its loop counts and measures, and what its status says, by name and unit.

A `Family` reads one status; those of each daemon stand in a table (`coordinator/metrics`, `worker/metrics`), and all of
them, with their help texts, in docs/metrics.md. Not here: who may read them.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

Samples = Iterable[
    tuple[tuple[str, ...], float | None]
]  # label values, and the value; None: there is none now


@dataclass(frozen=True, slots=True)
class Family:
    """One metric read off a status."""

    name: str
    help: str
    samples: Callable[[Mapping[str, Any]], Samples]
    labels: tuple[str, ...] = ()
    counter: bool = False

    def collect(self, status: Mapping[str, Any]) -> Metric:
        make = CounterMetricFamily if self.counter else GaugeMetricFamily
        family = make(self.name, self.help, labels=self.labels)
        for values, number in self.samples(status):
            if number is not None:
                family.add_metric(values, float(number))
        return family


def _at(status: Mapping[str, Any], path: str) -> Any:
    found: Any = status
    for name in path.split("."):
        found = found[name]
    return found


def number(path: str) -> Callable[[Mapping[str, Any]], Samples]:
    """The number at `a.b` of a status."""
    return lambda status: [((), _at(status, path))]


def by_key(path: str) -> Callable[[Mapping[str, Any]], Samples]:
    """Every number of the mapping at `a.b`, its own key as the label."""
    return lambda status: [((str(key),), value) for key, value in _at(status, path).items()]


class LoopMetrics:
    """What every daemon has. extra: collects from a status what is no Family."""

    def __init__(
        self,
        families: Sequence[Family],
        extra: Callable[[Mapping[str, Any]], Iterator[Metric]] = lambda _: iter(()),
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

    def render(self, status: Mapping[str, Any]) -> bytes:
        """All of it in Prometheus' text format."""
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

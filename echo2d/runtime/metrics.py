"""What Prometheus sees of a daemon: counters of its loop, and the numbers of its status (those in lists left out)."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

GAUGES_MAX = 4096  # numbers in one status; a worker has about a dozen


class LoopMetrics:
    """Counters of one core's loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.events = Counter("echo2d_events", "Events handled, by kind", ["kind"], registry=self._registry)
        self.notes = Counter("echo2d_notes", "Facts noted by the core, by kind", ["kind"], registry=self._registry)
        self.persist_s = Histogram("echo2d_persist_seconds", "One ledger transaction", registry=self._registry)

    def render(self, status: Mapping[str, Any]) -> bytes:
        """All of it in Prometheus' text format."""
        gauges = CollectorRegistry()
        family = Gauge("echo2d_status", "A number of /v1/status, by its path", ["path"], registry=gauges)
        for number, (path, value) in enumerate(_numbers(status)):
            if number < GAUGES_MAX:
                family.labels(path).set(value)
        text: bytes = generate_latest(self._registry) + generate_latest(gauges)
        return text


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    match value:
        case bool() | int() | float():
            yield path, float(value)
        case Mapping():
            for name, item in value.items():
                yield from _numbers(item, f"{path}.{name}" if path else str(name))

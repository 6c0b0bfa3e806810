"""The result of `echo2d bench soak`: as an object, as a table, and the promises that it breaks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from echo2d_lab.bench.soak.alert_watch import ExpectedAlert, UnexplainedAlert
from echo2d_lab.bench.soak.books import Books
from echo2d_lab.bench.soak.counts import ProcessCounts
from echo2d_lab.bench.soak.plan import SoakPlan

# Memory may grow by this much between the two counts.
RSS_GROWTH_MB_MAX = 10.0
# Minutes in which histories fill, and memory and objects grow with them: both are compared only if the first
# count comes later.
MEMORY_FROM_MIN = 20.0
# Live objects may grow by this share, because the number of objects in flight changes from moment to moment.
OBJECTS_GROWTH_MAX = 0.02
TYPES_SHOWN = 8

# The coordinator remembers each machine that has ever joined, up to 10,000, with this many objects for each.
OBJECTS_PER_MACHINE = 20

# Sockets of a worker without peer links: the control link, the listener, and two of its event loop.
WORKER_SOCKETS = 4

Looks = tuple[ProcessCounts, ...]
Count = Mapping[str, Looks]  # by program


@dataclass(frozen=True, slots=True)
class SoakReport:
    """happened: how often each kind of trouble came. counts: the two counts, with several looks each.
    new_machines: machines that joined for the first time between them. seen: alerts that came as
    expected, by kind.
    """

    plan: SoakPlan
    happened: Mapping[str, int]
    books: Books
    counts: tuple[Count, ...]
    missing: tuple[ExpectedAlert, ...]
    unexpected: tuple[UnexplainedAlert, ...]
    seen: Mapping[str, int]
    new_machines: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "faults": self.faults()}

    @property
    def compares_memory(self) -> bool:
        return self.plan.ends_s[0] >= 60 * MEMORY_FROM_MIN

    def faults(self) -> list[str]:
        return [*self.books.faults(), *self._leaks(), *self._wrong_alerts()]

    def _leaks(self) -> Iterator[str]:
        first, last = self.counts
        for name, then in first.items():
            now = last.get(name)
            if now is None:
                yield f"{name} is not there at the second count"
            elif now[0].pid == then[0].pid:
                machines = self.new_machines if name == "coordinator" else 0
                # A plan may link a real worker with all others and the seed.
                links = WORKER_SOCKETS + self.plan.real if name.startswith("real-") else 0
                words = [*_growth(then, now, links)]
                if self.compares_memory:
                    words += _memory_growth(then, now, machines)
                yield from (f"{name} holds {each}" for each in words)

    def _wrong_alerts(self) -> Iterator[str]:
        for entry in self.missing:
            came = "never" if entry.came_s is None else f"after {entry.came_s:.0f} s"
            yield f"alert {entry.kind} {entry.subject} came {came}, within {entry.within_s} s expected"
        for alert in self.unexpected:
            yield f"nothing explains the alert {alert.kind}: {alert.sentence}"


def _memory_growth(then: Looks, now: Looks, machines: int) -> Iterator[str]:
    """Growth of memory and objects. machines: number that joined for the first time between the counts."""
    before_mb, after_mb = _median_mb(then), _median_mb(now)
    if after_mb > before_mb + RSS_GROWTH_MB_MAX:
        yield f"{after_mb - before_mb:.1f} MB more memory"
    before, after = _range(then, _objects), _range(now, _objects)
    if not before or not after:
        return
    if after[0] > before[1] * (1 + OBJECTS_GROWTH_MAX) + machines * OBJECTS_PER_MACHINE:
        yield f"{_words(after)} objects instead of {_words(before)} ({_most_more(then[-1], now[-1])})"


def _growth(then: Looks, now: Looks, sockets: int) -> Iterator[str]:
    """Sentences about counts that are larger in every look of the second count than in any look of the first.

    sockets: the process may always hold this many.
    """
    for what, of in EQUAL.items():
        before, after = _range(then, of), _range(now, of)
        few = what == "sockets" and after[1] <= sockets
        if before and after and after[0] > before[1] and not few:
            yield f"{_words(after)} {what} instead of {_words(before)}"


def _most_more(then: ProcessCounts, now: ProcessCounts) -> str:
    """The types whose number has grown most."""
    assert then.inside is not None
    assert now.inside is not None
    before = then.inside.by_type
    more = {name: count - before.get(name, 0) for name, count in now.inside.by_type.items()}
    most = sorted(more.items(), key=lambda item: -item[1])[:TYPES_SHOWN]
    return ", ".join(f"{count:+} {name}" for name, count in most)


def _tasks(look: ProcessCounts) -> int | None:
    return None if look.inside is None else look.inside.tasks


def _objects(look: ProcessCounts) -> int | None:
    return None if look.inside is None else look.inside.objects


EQUAL: Mapping[str, Callable[[ProcessCounts], int | None]] = {
    "threads": lambda look: look.threads,
    "sockets": lambda look: look.sockets,
    "files": lambda look: look.files,
    "tasks": _tasks,
}


def _range(looks: Looks, of: Callable[[ProcessCounts], int | None]) -> tuple[int, ...]:
    """The smallest and the largest value; empty: it was not counted."""
    found = [count for count in map(of, looks) if count is not None]
    return (min(found), max(found)) if found else ()


def _words(found: tuple[int, ...]) -> str:
    least, most = found
    return f"{least}" if least == most else f"{least} to {most}"


def _median_mb(looks: Looks) -> float:
    return median(look.rss_mb for look in looks)


def print_report(report: SoakReport) -> None:
    console = Console()
    plan, books = report.plan, report.books
    happened = ", ".join(f"{kind} {times}" for kind, times in sorted(report.happened.items()))
    seen = ", ".join(f"{kind} {times}" for kind, times in sorted(report.seen.items()))
    lines = (
        f"{plan.scripted} scripted and {plan.real} real workers, {plan.minutes:g} minutes, seed {plan.rng_seed}",
        f"happened: {happened}",
        f"answers of scripted workers: {books.accepted:,} accepted; {books.dropped:,} in dropped groups",
        f"  {books.stored:,} in stored groups, {len(books.lost)} lost",
        f"answers trained on, of all workers: {books.trained:,}; twice: {len(books.repeated)}",
        f"alerts as expected: {seen}",
    )
    for line in lines:
        console.print(line, highlight=False)
    table = Table("program", *(f"{what} 1st, 2nd" for what in _WHAT), box=SIMPLE_HEAD)
    first, last = report.counts
    for name, then in first.items():
        if name in last:
            table.add_row(name, *_cells(then, last[name]))
    console.print(table)
    if not report.compares_memory:
        console.print(
            f"memory and objects are compared if the first count comes after {MEMORY_FROM_MIN:.0f} minutes"
        )
    faults = report.faults()
    for fault in faults:
        console.print(f"! {fault}", highlight=False, markup=False)
    if not faults:
        console.print("nothing leaked, nothing was lost or doubled, and every alert was right")


_WHAT = ("MB", *EQUAL, "objects")


def _cells(then: Looks, now: Looks) -> Iterator[str]:
    again = "" if then[0].pid == now[0].pid else " (new)"
    yield f"{_median_mb(then):.1f}, {_median_mb(now):.1f}{again}"
    for of in (*EQUAL.values(), _objects):
        pair = [_range(each, of) for each in (then, now)]
        yield ", ".join(_words(found) for found in pair if found) or "-"

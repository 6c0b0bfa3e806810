"""What `echo2d bench soak` found: as an object, as a table, and what of it breaks a promise."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from echo2d.bench.soak.alert_watch import ExpectedAlert, UnexplainedAlert
from echo2d.bench.soak.books import Books
from echo2d.bench.soak.counts import ProcessCounts
from echo2d.bench.soak.plan import SoakPlan

# Memory between the two counts; bounded histories are still filling at the first one.
RSS_GROWTH_MB_MAX = 10.0
# The same for live objects: what is in flight at one moment differs by so much.
OBJECTS_GROWTH_MAX = 0.02
TYPES_SHOWN = 8

Count = Mapping[str, ProcessCounts]  # by program


@dataclass(frozen=True, slots=True)
class SoakReport:
    """happened: how often each kind of trouble came. counts: of both moments. seen: alerts that came
    as expected, by kind.
    """

    plan: SoakPlan
    happened: Mapping[str, int]
    books: Books
    counts: tuple[Count, ...]
    missing: tuple[ExpectedAlert, ...]
    unexpected: tuple[UnexplainedAlert, ...]
    seen: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "faults": self.faults()}

    def faults(self) -> list[str]:
        return [*self.books.faults(), *self._leaks(), *self._wrong_alerts()]

    def _leaks(self) -> Iterator[str]:
        first, last = self.counts
        for name, then in first.items():
            now = last.get(name)
            if now is None:
                yield f"{name} is not there at the second count"
            elif now.pid == then.pid:
                yield from (f"{name} holds {words}" for words in _growth(then, now))

    def _wrong_alerts(self) -> Iterator[str]:
        for entry in self.missing:
            came = "never" if entry.came_s is None else f"after {entry.came_s:.0f} s"
            yield f"alert {entry.kind} {entry.subject} came {came}, within {entry.within_s} s expected"
        for alert in self.unexpected:
            yield f"nothing explains the alert {alert.kind}: {alert.sentence}"


def _growth(then: ProcessCounts, now: ProcessCounts) -> Iterator[str]:
    if now.rss_mb > then.rss_mb + RSS_GROWTH_MB_MAX:
        yield f"{now.rss_mb - then.rss_mb:.1f} MB more memory"
    for what in ("threads", "sockets", "files"):
        before, after = getattr(then, what), getattr(now, what)
        if after > before:
            yield f"{after} {what} instead of {before}"
    if then.inside is None or now.inside is None:
        return
    if now.inside.tasks > then.inside.tasks:
        yield f"{now.inside.tasks} tasks instead of {then.inside.tasks}"
    if now.inside.objects > then.inside.objects * (1 + OBJECTS_GROWTH_MAX):
        more = {
            name: count - then.inside.by_type.get(name, 0)
            for name, count in now.inside.by_type.items()
        }
        most = sorted(more.items(), key=lambda item: -item[1])[:TYPES_SHOWN]
        words = ", ".join(f"{count:+} {name}" for name, count in most)
        yield f"{now.inside.objects} objects instead of {then.inside.objects} ({words})"


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
    faults = report.faults()
    for fault in faults:
        console.print(f"! {fault}", highlight=False, markup=False)
    if not faults:
        console.print("nothing leaked, nothing was lost or doubled, and every alert was right")


_WHAT = ("MB", "threads", "sockets", "files", "tasks", "objects")


def _cells(then: ProcessCounts, now: ProcessCounts) -> Iterator[str]:
    again = "" if then.pid == now.pid else " (new)"
    yield f"{then.rss_mb:.1f} {now.rss_mb:.1f}{again}"
    for what in ("threads", "sockets", "files"):
        yield f"{getattr(then, what)} {getattr(now, what)}"
    for what in ("tasks", "objects"):
        pair = [getattr(each.inside, what) for each in (then, now) if each.inside is not None]
        yield " ".join(map(str, pair)) or "-"

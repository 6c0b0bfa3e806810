"""Shows a demo to a person: a live view of its status and metrics, and tables at the end."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from echo2d.core.status.json_form import read_status
from echo2d.demo.results import DemoResult, Kill, Quantiles, bubble_ratio, staleness_histogram
from echo2d.views.status import (
    SPARK_CELLS,
    TokenRate,
    bar,
    plain_console,
    spark,
    staleness_bars,
    workers_table,
)

Rows = Sequence[Mapping[str, Any]]


class LiveView:
    """The live view on stderr: redrawn in place on a terminal, elsewhere a line every five seconds."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._plain_at = 0.0
        self._rate = TokenRate()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def show(self, facts: Mapping[str, Any], rows: Rows, *, now: float) -> None:
        """Draw the run as it is now. rows: the learner's metrics so far."""
        rate = self._rate.update(facts["tokens_accepted"], now)
        if self._console.is_terminal:
            self._live.update(run_picture(facts, rows, steps=self._steps, tokens_per_s=rate))
        elif rows and now >= self._plain_at:
            # A line every five seconds if stderr is not a terminal.
            self._plain_at = now + 5.0
            self.say(progress_line(rows, steps=self._steps, tokens_per_s=rate))


def progress_line(rows: Rows, *, steps: int, tokens_per_s: float) -> str:
    last = rows[-1]
    return (
        f"step {last['step']}/{steps}  reward {last['reward_mean']:.3f}  "
        f"staleness {staleness_histogram(rows)}  "
        f"bubble {bubble_ratio(rows):.0%}  {tokens_per_s:,.0f} tokens/s"
    )


def run_picture(
    facts: Mapping[str, Any], rows: Rows, *, steps: int, tokens_per_s: float
) -> RenderableType:
    """Draw step, reward, staleness and workers of a run as one block."""
    return Group(
        _step_line(rows, steps, tokens_per_s),
        _reward_line(rows),
        _staleness_line(rows),
        workers_table(read_status(facts), width=plain_console().width),
    )


def _step_line(rows: Rows, steps: int, tokens_per_s: float) -> Text:
    step = rows[-1]["step"] if rows else 0
    bubble = f"bubble {bubble_ratio(rows):4.0%}" if len(rows) > 1 else "waiting for the first batch"
    return Text.assemble(
        ("step ", "bold"),
        f"{step:>4}/{steps} ",
        (bar(step, steps), "cyan"),
        f"  {tokens_per_s:>8,.0f} tokens/s  {bubble}",
    )


def _reward_line(rows: Rows) -> Text:
    rewards = [float(row["reward_mean"]) for row in rows][-SPARK_CELLS:]
    newest = f"{rewards[-1]:.3f} " if rewards else "  -   "
    return Text.assemble(("reward ", "bold"), newest, (spark(rewards), "green"))


def _staleness_line(rows: Rows) -> Text:
    return Text.assemble(("staleness ", "bold"), staleness_bars(staleness_histogram(rows)))


def print_result(result: DemoResult) -> None:
    """Print the tables at the end of a demo."""
    table = Table("what", "first", "last", box=None)
    table.add_row(
        "held-out accuracy (greedy)", f"{result.accuracy_first:.3f}", f"{result.accuracy_last:.3f}"
    )
    table.add_row(
        "reward (tenths of the run)", f"{result.reward_first:.3f}", f"{result.reward_last:.3f}"
    )
    console = Console()
    console.print(table)
    facts = Table("what", "measured", box=None)
    for name, text in _measured(result):
        facts.add_row(name, text)
    console.print(facts)
    if result.kills:
        console.print(kills_table(result.kills))


def _measured(result: DemoResult) -> list[tuple[str, str]]:
    counts, share = result.trajectories, result.wire_bytes / max(1, result.full_bytes)
    return [
        (
            "steps, versions published",
            f"{result.steps}, {result.versions_published}  in {result.wall_s:.0f} s",
        ),
        (
            "staleness: trajectories",
            f"{result.staleness_histogram}, bound {result.staleness_bound}",
        ),
        ("bubble", f"{result.bubble_ratio:.1%}"),
        ("train step", f"{result.t_train_s:.3f} s"),
        ("T_bcast p50, p95, p99", quantiles(result.t_bcast_s)),
        ("refit pause p50, p95, p99", quantiles(result.refit_pause_s)),
        ("tokens per second", f"{result.tokens_per_s:,.0f}"),
        ("seed copies", f"{result.seed_copies:.2f}"),
        ("bytes on the wire, full", f"{result.wire_bytes:,}, {result.full_bytes:,}: {share:.1%}"),
        ("trajectories trained, dropped", f"{counts.trained}, {counts.dropped}"),
        (
            "steps trained again, on another batch",
            f"{result.steps_again}, {result.batches_changed}",
        ),
        (
            "workers on the last version",
            ", ".join(f"{w.id[:8]} {'ok' if w.digest_ok else 'NOT OK'}" for w in result.workers),
        ),
    ]


def kills_table(kills: Sequence[Kill]) -> Table:
    """A table with a row for each kind of process that was killed, and the seconds that the recoveries took."""
    table = Table("kill -9 of", "times", "seconds until it moved again", box=None)
    for kind in sorted({kill.kind for kill in kills}):
        waits = [kill.recovery_s for kill in kills if kill.kind == kind]
        table.add_row(
            kind,
            str(len(waits)),
            ", ".join("never" if wait is None else f"{wait:.1f}" for wait in waits),
        )
    return table


def quantiles(values: Quantiles) -> str:
    return ", ".join(
        "-" if value is None else f"{value:.3f} s" for value in (values.p50, values.p95, values.p99)
    )

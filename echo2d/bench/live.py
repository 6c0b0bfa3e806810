"""What a run looks like to a person: a live view of its status and metrics, and tables at the end."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from echo2d.bench.results import Kill, Quantiles, Result, bubble_ratio, staleness_histogram

BAR_CELLS = 24
SPARK = "▁▂▃▄▅▆▇█"
SPARK_CELLS = 50
PLAIN_EVERY_S = 5.0  # where there is no terminal: one line so often
Facts = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


class LiveView:
    """The picture while a run goes on: redrawn on a terminal, otherwise a line now and then; all of it on stderr."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def show(self, facts: Facts, rows: Rows, *, now: float) -> None:
        """The run as it is now. rows: the learner's metrics so far."""
        rate = self._rate.update(facts["tokens_accepted"], now)
        if self._console.is_terminal:
            self._live.update(run_picture(facts, rows, steps=self._steps, tokens_per_s=rate))
        elif rows and now >= self._plain_at:
            self._plain_at = now + PLAIN_EVERY_S
            self.say(progress_line(rows, steps=self._steps, tokens_per_s=rate))


class TokenRate:
    """Tokens per second over the last few updates, smoothed."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._rate = 0.0

    def update(self, tokens: int, now: float) -> float:
        if self._last is not None and now > self._last[1]:
            measured = max(0, tokens - self._last[0]) / (
                now - self._last[1]
            )  # a coordinator that restarts counts from 0
            self._rate += 0.2 * (measured - self._rate)
        self._last = (tokens, now)
        return self._rate


def progress_line(rows: Rows, *, steps: int, tokens_per_s: float) -> str:
    last = rows[-1]
    return (
        f"step {last['step']}/{steps}  reward {last['reward_mean']:.3f}  staleness {staleness_histogram(rows)}  "
        f"bubble {bubble_ratio(rows):.0%}  {tokens_per_s:,.0f} tokens/s"
    )


def run_picture(facts: Facts, rows: Rows, *, steps: int, tokens_per_s: float) -> RenderableType:
    """Step, reward, staleness and workers of a run as one block."""
    return Group(_step_line(rows, steps, tokens_per_s), _reward_line(rows), _staleness_line(rows), workers_table(facts))


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
    histogram = staleness_histogram(rows)
    total = sum(histogram.values()) or 1
    parts = (f"{staleness}: {bar(count, total, 8)} {count / total:4.0%}" for staleness, count in histogram.items())
    return Text.assemble(("staleness ", "bold"), "   ".join(parts))


def workers_table(facts: Facts) -> Table:
    """Who serves what, and how far the version that spreads has come."""
    table = Table("worker", "state", "serves", "lag", "running", "accepted", "last refit", "broadcast", box=None)
    broadcast = facts["broadcast"]
    progress = {peer["id"]: peer for peer in broadcast["peers"]} if broadcast else {}
    for worker in facts["workers"]:
        serving, pause = worker["serving"], worker["refit_pause_s"]
        table.add_row(
            escape(worker["name"]),
            worker["state"],
            "-" if serving is None else f"v{serving['version']}",
            "-" if worker["lag"] is None else str(worker["lag"]),
            f"{worker['running']}/{worker['slots']}",
            str(worker["accepted"]),
            "-" if pause is None else f"{pause * 1000:.0f} ms",
            _arrival(progress.get(worker["id"]), broadcast),
        )
    return table


def _arrival(peer: Facts | None, broadcast: Facts | None) -> str:
    if peer is None or broadcast is None:
        return ""
    total = broadcast["wire_bytes"] or broadcast["full_bytes"]
    done = total if peer["verified"] else peer["payload_bytes"]
    return f"v{broadcast['version']} {bar(done, total, 12)} {min(1.0, done / total):4.0%}"


def bar(part: float, whole: float, cells: int = BAR_CELLS) -> str:
    filled = round(cells * min(1.0, part / whole)) if whole else 0
    return "█" * filled + "░" * (cells - filled)


def spark(values: Sequence[float]) -> str:
    """Each value as one of eight heights, 0 to the largest."""
    top = max(values, default=0.0) or 1.0
    return "".join(SPARK[min(len(SPARK) - 1, int(value / top * len(SPARK)))] for value in values)


def print_status(facts: Facts) -> None:
    """`echo2d status`: a run in a few lines."""
    console = Console()
    newest, groups, counts = facts["newest_version"], facts["groups"], facts["trajectories"]
    console.print(
        f"epoch {facts['epoch']}  step {facts['committed_step']} committed, {facts['open_step']} open  "
        f"newest version {'-' if newest is None else newest['version']}  S {facts['staleness_max']}  "
        f"kappa {facts['publish_every']}\n"
        f"groups: {groups['buffered']} buffered, {groups['in_flight']} in flight   "
        f"trajectories: {counts['trained']} trained, {counts['dropped']} dropped   "
        f"seed {'alive' if facts['seed_alive'] else 'gone'}",
        highlight=False,
    )
    console.print(workers_table(facts))
    for fault in facts["faults"][-3:]:
        console.print(f"fault: {fault}", highlight=False, markup=False)


def print_result(result: Result) -> None:
    """The table at the end of a demo."""
    table = Table("what", "first", "last", box=None)
    table.add_row("held-out accuracy (greedy)", f"{result.accuracy_first:.3f}", f"{result.accuracy_last:.3f}")
    table.add_row("reward (tenths of the run)", f"{result.reward_first:.3f}", f"{result.reward_last:.3f}")
    console = Console()
    console.print(table)
    facts = Table("what", "measured", box=None)
    for name, text in _measured(result):
        facts.add_row(name, text)
    console.print(facts)
    if result.kills:
        console.print(kills_table(result.kills))


def _measured(result: Result) -> list[tuple[str, str]]:
    counts = result.trajectories
    return [
        ("steps, versions published", f"{result.steps}, {result.versions_published}  in {result.wall_s:.0f} s"),
        ("staleness: trajectories", f"{result.staleness_histogram}, bound {result.staleness_bound}"),
        ("bubble", f"{result.bubble_ratio:.1%}"),
        ("train step", f"{result.t_train_s:.3f} s"),
        ("T_bcast p50, p95, p99", quantiles(result.t_bcast_s)),
        ("refit pause p50, p95, p99", quantiles(result.refit_pause_s)),
        ("tokens per second", f"{result.tokens_per_s:,.0f}"),
        ("seed copies", f"{result.seed_copies:.2f}"),
        ("bytes on the wire, full", f"{result.wire_bytes:,}, {result.full_bytes:,}"),
        ("trajectories trained, dropped", f"{counts.trained}, {counts.dropped}"),
        ("steps trained again, on another batch", f"{result.steps_again}, {result.batches_changed}"),
        (
            "workers on the last version",
            ", ".join(f"{w.id[:8]} {'ok' if w.digest_ok else 'NOT OK'}" for w in result.workers),
        ),
    ]


def kills_table(kills: Sequence[Kill]) -> Table:
    """What was killed how often, and the seconds until things moved again."""
    table = Table("kill -9 of", "times", "seconds until it moved again", box=None)
    for kind in sorted({kill.kind for kill in kills}):
        waits = [kill.recovery_s for kill in kills if kill.kind == kind]
        table.add_row(kind, str(len(waits)), ", ".join("never" if wait is None else f"{wait:.1f}" for wait in waits))
    return table


def quantiles(values: Quantiles) -> str:
    return ", ".join("-" if value is None else f"{value:.3f} s" for value in (values.p50, values.p95, values.p99))

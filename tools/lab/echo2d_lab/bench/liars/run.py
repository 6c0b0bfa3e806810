"""`echo2d bench liars`: one real run in which each kind of liar works beside honest workers.

    echo2d coordinate with [audit], its auditor, a learner, trusted and honest workers in float32 and
    bfloat16, and one worker for each lie: all real processes on this machine, with the demo's model

It ends when every liar is convicted, or has delivered as many trajectories as are allowed for its lie.
For each worker the table has the trajectories that it delivered until then, those that were trained on,
and the findings of the audit. Not here: the lies (`lying_engine`).
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from echo2d.demo.processes import Programs
from echo2d.views.status import PLAIN_COLUMNS
from echo2d_lab.bench.liars.audited_run import AuditedRun, AuditSettings, RunWorker
from echo2d_lab.bench.liars.kinds import LIES, LieKind

POLL_S = 0.2
TOLD_S = 30.0  # within this time a convicted worker gets the message, and its process ends
SLOTS = 24
# Trajectories that a liar may deliver before it is convicted: the targets of docs/reference/security.md.
DELIVERED_MAX: Mapping[LieKind, int] = {
    "made_up": 300,
    "made_up_true_logprobs": 300,
    "version_0": 300,
    "three_old": 2000,
    "int4": 2000,
    "temperature": 2000,
    "greedy": 300,
    "best_of_4": 2000,
}
# int8 weights differ from float32 no more than bfloat16 weights do: an audit cannot distinguish them from honest ones.
HIDDEN: tuple[LieKind, ...] = ("int8",)
TRAINED_MAX = 10
HONEST = (
    RunWorker("trusted-float32", trusted=True),
    RunWorker("trusted-bfloat16", "bfloat16", trusted=True),
    RunWorker("honest-float32"),
    RunWorker("honest-bfloat16", "bfloat16"),
)
QUANTIZED = (
    RunWorker("trusted-int8", trusted=True, quantization="int8"),
    RunWorker("honest-int8", quantization="int8"),
)


@dataclass(frozen=True, slots=True)
class LiarsPlan:
    """The options. share: of its samples about which a liar lies. unseeded: seeds are not replayed, as
    with SGLang's usual engine. episodes: the task is an environment of two turns. int8: some honest
    workers compute in int8, and all liars claim to do so. liars_from: liars join from this step on,
    because before the policy has learnt anything an old version is hardly a lie. steps, seconds: the run
    ends after this many train steps, or seconds.
    """

    lies: tuple[LieKind, ...] = LIES
    share: float = 1.0
    audit_share: float = 0.05
    newcomer: int = 20
    unseeded: bool = False
    episodes: bool = False
    int8: bool = False
    liars_from: int = 30
    steps: int = 400
    seconds: float = 900.0
    rng_seed: int = 0


@dataclass(slots=True)
class WorkerRow:
    """One worker. delivered: trajectories, or turns of episodes. trained: trajectories that it finished
    and that were trained on. Both count until it was convicted, or until the end. convicted_s: seconds
    after its first trajectory; None: it was not convicted.
    """

    name: str
    lie: str = ""
    delivered: int = 0
    trained: int = 0
    audited: int = 0
    flagged: int = 0
    verdict: str = ""
    convicted_s: float | None = None
    begun_s: float | None = field(default=None, repr=False)

    def take(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Update the row from this worker's entry in the status."""
        self.delivered, self.trained = facts["accepted"], facts["trained"]
        self.audited, self.flagged = facts["audited"], facts["flagged"]
        if self.delivered and self.begun_s is None:
            self.begun_s = now_s
        if facts["verdict"] and not self.verdict:
            self.verdict = facts["verdict"]
            self.convicted_s = now_s - (self.begun_s or now_s)

    def fault(self) -> str:
        """The promise that this row breaks; empty: it breaks none."""
        if not self.lie or self.lie in HIDDEN:
            return f"{self.name} is convicted" if self.verdict else ""
        most = DELIVERED_MAX[self.lie]  # type: ignore[index]
        if not self.verdict or self.delivered > most:
            return f"{self.name} delivered {self.delivered} trajectories, of at most {most}"
        if most <= min(DELIVERED_MAX.values()) and self.trained >= TRAINED_MAX:
            return f"{self.name}: {self.trained} trajectories were trained on"
        return ""


@dataclass(frozen=True, slots=True)
class LiarsResult:
    """delay_s: mean seconds until a verdict. auditor_s: seconds in which the auditor scored and loaded."""

    rows: tuple[WorkerRow, ...]
    steps: int
    wall_s: float
    delay_s: float | None
    auditor_s: float
    scored: int
    skipped: int
    bubble: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def broken(self) -> list[str]:
        return [fault for row in self.rows if (fault := row.fault())]


def run_liars_bench(plan: LiarsPlan, *, out: Path | None, as_json: bool) -> int:
    """Run, print, and judge. Returns the exit code: 1 if a promise is broken. out: keeps the run."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=as_json or not sys.stderr.isatty())
    with bar, tempfile.TemporaryDirectory() as scratch:
        task = bar.add_task("starting", total=1.0)
        run = (out or Path(scratch) / "run").absolute()
        with Programs(run / "logs") as programs:
            result = measure_liars(
                plan,
                run,
                programs,
                lambda done, words: bar.update(task, completed=done, description=words),
            )
    print(json.dumps(result.as_dict())) if as_json else print_liars(result)
    for fault in result.broken():
        console.print(f"broken promise: {fault}", highlight=False)
    return 1 if result.broken() else 0


def print_liars(result: LiarsResult) -> None:
    """Print one line for each worker, the convicted ones first."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("worker", "delivered", "trained", "audited", "flagged", "after", "verdict"):
        table.add_column(name, justify="left" if name in ("worker", "verdict") else "right")
    for row in sorted(result.rows, key=lambda row: (not row.verdict, row.delivered)):
        after = "-" if row.convicted_s is None else f"{row.convicted_s:.1f} s"
        cells = (row.delivered, row.trained, row.audited, row.flagged)
        table.add_row(row.name, *map(str, cells), after, row.verdict or "not convicted")
    console = Console(highlight=False, width=PLAIN_COLUMNS)
    console.print(table)
    delay = "-" if result.delay_s is None else f"{result.delay_s:.2f} s"
    console.print(
        f"{result.steps} steps in {result.wall_s:.0f} s; a verdict takes {delay}; the auditor scored "
        f"{result.scored} parts of answers in {result.auditor_s:.1f} s, and left out {result.skipped}"
    )


def measure_liars(
    plan: LiarsPlan, folder: Path, programs: Programs, show: Callable[[float, str], None]
) -> LiarsResult:
    """Measure. show: gets the share of liars that are decided, and the progress of the others."""
    liars = [
        RunWorker(
            f"liar-{lie}", lie=lie, share=plan.share, late=True,
            quantization="int8" if plan.int8 else "none",
        )
        for lie in plan.lies
    ]  # fmt: skip
    honest = (*HONEST, *QUANTIZED) if plan.int8 else HONEST
    run = AuditedRun(
        folder,
        programs,
        [*honest, *liars],
        audit=AuditSettings(plan.audit_share, plan.newcomer, "none" if plan.unseeded else "torch"),
        steps=plan.steps,
        slots=SLOTS,
        rng_seed=plan.rng_seed,
        task="two_turn_digits" if plan.episodes else "sort_digits",
    )
    rows = {each.name: WorkerRow(each.name, each.lie or "") for each in (*honest, *liars)}
    with run.start() as coordinator:
        begun, late = time.monotonic(), True
        while True:
            facts, now_s = coordinator.status(), time.monotonic() - begun
            if late and facts["committed_step"] >= plan.liars_from:
                run.join_late()
                late = False
            for worker in facts["workers"]:
                if worker["name"] in rows:
                    rows[worker["name"]].take(worker, now_s)
            still_open = [row for row in rows.values() if _is_open(row)]
            show(1 - len(still_open) / max(1, len(plan.lies)), _words(still_open))
            over = not run.check() or now_s > plan.seconds
            if over or (plan.lies and not still_open):
                for row in rows.values():
                    if row.verdict:
                        programs[row.name].wait(TOLD_S)
                return _result(tuple(rows.values()), facts, now_s)
            time.sleep(POLL_S)


def _result(rows: tuple[WorkerRow, ...], facts: Mapping[str, Any], now_s: float) -> LiarsResult:
    audit = facts["audit"]
    return LiarsResult(
        rows,
        facts["committed_step"],
        now_s,
        audit["delay_s"],
        audit["scoring_s"] + audit["loading_s"],
        audit["scored"],
        audit["skipped"],
        facts["bubble_ratio"],
    )


def _is_open(row: WorkerRow) -> bool:
    """Whether a liar may still be convicted in time."""
    most = DELIVERED_MAX.get(row.lie)  # type: ignore[call-overload]
    return most is not None and not row.verdict and row.delivered <= most


def _words(rows: Sequence[WorkerRow]) -> str:
    return ", ".join(f"{row.lie} {row.delivered}" for row in rows)

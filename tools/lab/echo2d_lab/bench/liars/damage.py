"""Measures the damage of a liar: held-out accuracy of the demo with one liar of four, with an audit and without.

    python -m echo2d_lab.bench.liars.damage RESULTS.jsonl [--lies ...] [--seeds 0,1,2] [--steps 80]

Each line of RESULTS.jsonl is one run; runs that the file has are not made again. The table gives medians
over the seeds, with the smallest and the largest value.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from echo2d.demo.processes import Programs
from echo2d.demo.run import STEPS
from echo2d.demo.tiny_model import greedy_accuracy, held_out_prompts
from echo2d_lab.bench.liars.audited_run import AuditedRun, AuditSettings, RunWorker
from echo2d_lab.bench.liars.kinds import LIES, LieKind

POLL_S = 0.5
SLOTS = 72  # of each of four workers: together as many as the demo's three
NOBODY = "nobody"
# With an audit, accuracy may be lower by this much than without a liar.
LOSS_MAX = 0.03


@dataclass(frozen=True, slots=True)
class DamageRun:
    """One run. lie: "nobody" if all four workers are honest. accuracy: greedy, held-out, of the last
    version. of_liar: the liar's trajectories that were trained on.
    """

    lie: str
    audit: bool
    rng_seed: int
    steps: int
    accuracy: float = 0.0
    of_liar: int = 0
    convicted: bool = False
    bubble: float = 0.0
    auditor_s: float = 0.0
    learner_s: float = 0.0
    wall_s: float = 0.0

    @property
    def what(self) -> tuple[str, bool, int, int]:
        return self.lie, self.audit, self.rng_seed, self.steps


def wanted(lies: Sequence[str], seeds: Sequence[int], steps: int) -> Iterator[DamageRun]:
    """The runs to make, the most informative first."""
    for lie, audit in (
        (NOBODY, False),
        (NOBODY, True),
        *((lie, True) for lie in lies),
        *((lie, False) for lie in lies),
    ):
        for rng_seed in seeds:
            yield DamageRun(lie, audit, rng_seed, steps)


def measure(asked: DamageRun, folder: Path) -> DamageRun:
    """Make one run. Fault: a program that should be running has ended."""
    liar: LieKind | None = None if asked.lie == NOBODY else asked.lie  # type: ignore[assignment]
    workers = [
        RunWorker("trusted", trusted=True),
        RunWorker("honest-1"),
        RunWorker("honest-2"),
        RunWorker("fourth", lie=liar),
    ]
    with Programs(folder / "logs") as programs:
        run = AuditedRun(
            folder, programs, workers, audit=AuditSettings() if asked.audit else None,
            steps=asked.steps, slots=SLOTS, rng_seed=asked.rng_seed,
        )  # fmt: skip
        with run.start() as coordinator:
            begun = time.monotonic()
            while run.check():
                time.sleep(POLL_S)
            facts = coordinator.status()
        versions = folder / "coordinator" / "versions"
        last = greedy_accuracy(
            next(versions.glob(f"{asked.steps}-*")), held_out_prompts(run.recipe)
        )
    fourth = next(worker for worker in facts["workers"] if worker["name"] == "fourth")
    audit = facts["audit"] or {"scoring_s": 0.0, "loading_s": 0.0}
    return DamageRun(
        asked.lie,
        asked.audit,
        asked.rng_seed,
        asked.steps,
        accuracy=last,
        of_liar=fourth["trained"],
        convicted=bool(fourth["verdict"]),
        bubble=facts["bubble_ratio"],
        auditor_s=audit["scoring_s"] + audit["loading_s"],
        learner_s=facts["learner_train_s"],
        wall_s=time.monotonic() - begun,
    )


def read_results(path: Path) -> list[DamageRun]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [DamageRun(**json.loads(line)) for line in lines]


def print_damage(results: Sequence[DamageRun]) -> None:
    table = Table(box=SIMPLE_HEAD)
    for name in (
        "liar",
        "audit",
        "accuracy",
        "range",
        "of the liar trained",
        "convicted",
        "bubble",
    ):
        table.add_column(name, justify="left" if name in ("liar", "audit") else "right")
    for lie, audit in dict.fromkeys((each.lie, each.audit) for each in results):
        runs = [each for each in results if (each.lie, each.audit) == (lie, audit)]
        accuracy = [each.accuracy for each in runs]
        table.add_row(
            lie, "on" if audit else "off", f"{median(accuracy):.3f}",
            f"{min(accuracy):.3f} to {max(accuracy):.3f}", f"{median(each.of_liar for each in runs):.0f}",
            f"{sum(each.convicted for each in runs)} of {len(runs)}", f"{median(each.bubble for each in runs):.1%}",
        )  # fmt: skip
    Console(highlight=False, width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--lies", default=",".join(LIES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    seeds = [int(each) for each in options.seeds.split(",")]
    runs = list(wanted(options.lies.split(","), seeds, options.steps))
    for number, asked in enumerate(runs, start=1):
        if asked.what in {each.what for each in read_results(options.results)}:
            continue
        sys.stderr.write(f"run {number} of {len(runs)}: {asked.what}\n")
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(asked, Path(scratch) / "run")
        with options.results.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
    print_damage(read_results(options.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

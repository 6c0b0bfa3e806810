"""Measures how staleness affects learning, and which correction helps: `make staleness-sweep`, on one core.

The real coordinator core and the real learner's train step run in one process (`echo2d_lab.bench.lab.in_process`). A
worker that is always ahead makes the data as stale as the staleness bound S and the publish period kappa permit. The
task and the model are the demo's. Every finished run is a line of a file, and is not made again; remove the file to
repeat it. With the same seed the same machine gives the same numbers.

In docs/measurements:

    staleness.jsonl              60 steps: every S x kappa x {none, BEST}, and every correction in the hardest case,
                                 S = 11 with kappa = 1. Draws docs/figures/staleness.png and .csv (`staleness_figure`)
    staleness_long.jsonl         --long, 360 steps: every S x {default, clip} with kappa = 1, the freshest data that S
                                 allows. `usd_to_accuracy` computes the cost of an accuracy from it
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from echo2d.client import read_batch
from echo2d.core.base.ids import RunId
from echo2d.core.rules.run import DisseminationTable, RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.demo.run import CACHE
from echo2d.demo.tiny_model import TinyRecipe, accuracies, held_out_prompts, make_tiny_model
from echo2d.learner.batch.checks import BatchRules, Trained, faults, staleness_histogram
from echo2d.learner.batch.packing import answers_of
from echo2d.learner.config import Dtype, LearnerConfig
from echo2d.learner.model.load import load_model
from echo2d.learner.model.policy import Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks, whole
from echo2d.tasks.base import Task
from echo2d.tasks.sort_digits import EOS, VOCABULARY, SortDigits
from echo2d_lab.bench.broadcast.torch_writer import TorchWriter
from echo2d_lab.bench.lab.in_process import InProcess
from echo2d_lab.research.staleness_figure import FIGURES, draw

REPO = Path(__file__).parents[4]
RUNS, LONG_RUNS = (
    REPO / "docs" / "measurements" / "staleness.jsonl",
    REPO / "docs" / "measurements" / "staleness_long.jsonl",
)

STEPS, LONG_STEPS, LR = 60, 360, 1e-4  # the accuracy still rises at the end of short and long runs
PER_STEP, GROUP_SIZE, MAX_NEW_TOKENS = 128, 8, 12
LOOK_EVERY = 6  # steps between two looks at the accuracy
SEEDS = (0, 1, 2)
MORE_SEEDS = (3,)  # of long runs with S = 0 and 3, to measure the cost of S = 3 more exactly
BOUNDS = (0, 1, 3, 6, 11)
HARDEST = (11, 1)
# With one optimizer step per train step this means: no clip, importance p / q.
PURE = {"proximal": "recomputed"}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {**PURE, "correction": "none"},
    "tis": {**PURE, "correction": "tis"},
    "icepop": {**PURE, "correction": "icepop"},
    "sequence_mask": {**PURE, "correction": "sequence_mask"},
    "loglinear": {"proximal": "loglinear", "correction": "tis"},
    "clip": {"proximal": "rollout", "correction": "none"},
    "clip_tis": {"proximal": "rollout", "correction": "tis"},
}
BEST = "clip_tis"
# The learner's default, with its two-sided clip, and plain GRPO as in ECHO-2.
LONG = ("default", "clip")
RECIPES = {**CORRECTIONS, "default": {"clip_ratio_max": 3.0}}


@dataclass(frozen=True, slots=True)
class Case:
    """staleness: S. publish_every: kappa."""

    staleness: int
    publish_every: int
    correction: str
    seed: int

    def __str__(self) -> str:
        return f"S={self.staleness} kappa={self.publish_every} {self.correction} seed={self.seed}"


def cases() -> Iterator[Case]:
    """Each case once, seed by seed: first the corrections, then the table."""
    compared = [(*HARDEST, correction) for correction in CORRECTIONS]
    table = [
        (bound, kappa, each)
        for bound in BOUNDS
        for kappa in kappas(bound)
        for each in ("none", BEST)
    ]
    for seed in SEEDS:
        yield from (Case(*setting, seed) for setting in dict.fromkeys([*compared, *table]))


def long_cases() -> Iterator[Case]:
    """Each case once, the most important first. With S = 0 no ratio is large enough for the two recipes to differ."""
    everything = [(seed, each) for seed in SEEDS for each in LONG]
    for seed, each in sorted(everything, key=lambda one: (one[0] > 0, LONG.index(one[1]))):
        yield from (Case(bound, 1, each, seed) for bound in BOUNDS[each != "default" :])
    yield from (Case(bound, 1, "default", seed) for seed in MORE_SEEDS for bound in (0, 3))


def kappas(bound: int) -> list[int]:
    return sorted({1, max(1, bound - 1)})


class Run:
    """One learner and one swarm. dtype: as learner.dtype. rules, task: the default is those of the sweep."""

    def __init__(
        self,
        case: Case,
        steps: int = STEPS,
        dtype: Dtype = "float32",
        rules: RunRules | None = None,
        task: Task | None = None,
    ) -> None:
        self._case, self._steps = case, steps
        recipe = TinyRecipe(rng_seed=case.seed)
        model = make_tiny_model(CACHE, recipe)
        self._held_out = held_out_prompts(recipe)
        config = learner_config(case, model, steps=steps, dtype=dtype)
        self._judge = load_model(model)  # float32, for any dtype of the trained layers
        self._advantages, self._policy = advantages_of(config), Policy(config, Ranks())
        self._rules = BatchRules(
            case.staleness, PER_STEP // GROUP_SIZE, GROUP_SIZE, len(VOCABULARY), GROUP_SIZE
        )
        self._writer = TorchWriter(model, frozenset({EOS}), MAX_NEW_TOKENS, case.seed)
        self.swarm = InProcess(
            rules or sweep_rules(case), task or SortDigits(case.seed), self._writer, slots=PER_STEP
        )

    def train(self) -> dict[str, Any]:
        """Train. Returns the facts of the run."""
        began, cpu = time.monotonic(), time.process_time()
        rows, ages, trained = [], Counter[int](), Trained()
        looks = [self._look(0)]
        self.swarm.open_session()
        self._publish(0)
        for step in range(1, self._steps + 1):
            body, digest = self.swarm.take(step)
            batch = read_batch(1, digest.hex(), body)
            assert not faults(batch, step, self._rules, trained), "I1"
            trained.add(batch)
            ages.update(staleness_histogram(batch))
            answers = [
                each for group in answers_of(batch, self._rules, self._advantages) for each in group
            ]
            report = self._policy.train_step(
                step, self._policy.lay_out([answers]), self._case.staleness
            )
            rewards = [one.reward for group in batch.groups for one in group.trajectories]
            rows.append(
                {
                    **asdict(report.means),
                    "reward": sum(rewards) / len(rewards),
                    "norm": report.grad_norm,
                }
            )
            if step % LOOK_EVERY == 0:
                looks.append(self._look(step))
            every = self.swarm.commit(step, digest)
            if step % every == 0 or step == self._steps:
                self._publish(step)
        seconds = {
            "wall_s": round(time.monotonic() - began, 1),
            "cpu_s": round(time.process_time() - cpu, 1),
        }
        return {"looks": looks, "ages": dict(sorted(ages.items())), **_summary(rows), **seconds}

    def _publish(self, version: int) -> None:
        self.swarm.publish(version, self._writer.offer(self._weights()))

    def _weights(self) -> dict[str, Any]:
        return {name: whole(weight) for name, weight in self._policy.weights().items()}

    def _look(self, step: int) -> tuple[int, float]:
        """The step, and the mean probability of a right answer to the held-out prompts, which is not random."""
        self._judge.load_state_dict(self._weights())
        return step, round(accuracies(self._judge, self._held_out)[1], 4)


def _summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Means over the train steps, and the largest ones."""
    facts: dict[str, Any] = {}
    for name in ("reward", "kl", "clip_share", "corrected_share"):
        facts[name] = round(sum(row[name] for row in rows) / len(rows), 5)
    return {
        **facts,
        "ratio_max": max(row["ratio_max"] for row in rows),
        "norm_max": max(row["norm"] for row in rows),
    }


def learner_config(case: Case, model: Path, **changes: Any) -> LearnerConfig:
    """The config for the learner's parts that run here; the coordinator's address and the directories are unused."""
    # The largest ratio of these runs is 224, so a two-sided clip at 1000 drops nothing.
    config = LearnerConfig(
        url="http://127.0.0.1:1", token_file=Path("none"), model=model, snapshot_root=Path("none"),
        out_dir=Path("none"), steps=STEPS, lr=LR, threads=1, packing=False, device="cpu", rng_seed=case.seed,
        advantage_std="population", **{"clip_ratio_max": 1000.0, "mask_high": 2.0, **RECIPES[case.correction]},
    )  # fmt: skip
    return replace(config, **changes)


def sweep_rules(case: Case) -> RunRules:
    """The rules of a case. Groups with equal rewards are not replaced; they teach nothing in any of the runs."""
    return RunRules(
        run_id=RunId("sweep"),
        staleness_max=case.staleness,
        publish_every=case.publish_every,
        trajectories_per_step=PER_STEP,
        group_size=GROUP_SIZE,
        tasks=(TaskRules(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(EOS,)),),
        vocab_size=len(VOCABULARY),
        over_stale="drop",
        filter_zero_variance=False,
        group_patience=0.0,
        dissemination=DisseminationTable(shape="star", chains=1, delta=False),
    )


def finished(path: Path) -> list[dict[str, Any]]:
    """The runs in the file. A last line that was cut off does not count."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="the runs of 360 steps")
    parser.add_argument(
        "--figures", type=Path, default=FIGURES, help="where staleness.png and .csv go"
    )
    parser.add_argument("--runs", type=int, help="make at most this many runs")
    wanted = parser.parse_args()
    path, steps = (LONG_RUNS, LONG_STEPS) if wanted.long else (RUNS, STEPS)
    rows = finished(path)
    there = {Case(*(row[name] for name in Case.__slots__)) for row in rows}
    planned = list(long_cases() if wanted.long else cases())
    missing = [case for case in planned if case not in there][: wanted.runs]
    for number, case in enumerate(
        missing, len(planned) - len([c for c in planned if c not in there]) + 1
    ):
        row = {**asdict(case), **Run(case, steps).train()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
        first, last = row["looks"][0][1], row["looks"][-1][1]
        print(
            f"{number}/{len(planned)} {case}: {first:.3f} -> {last:.3f}, staleness {row['ages']}, {row['wall_s']} s"
        )
    if not wanted.long:
        draw(rows, wanted.figures)


if __name__ == "__main__":
    main()

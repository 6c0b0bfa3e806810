"""What a choice of prompts, samples or groups is worth where most rows teach nothing: docs/measurements/tasks.md.

`python -m echo2d_lab.research.sampler_table` runs the real coordinator core and the real learner's train step in one
process, as `staleness_sweep` does: its model, 60 steps of 128 trajectories in groups of 8, S and kappa of
`scenarios/mix-rented.toml`; seeds 0 to 2, ten minutes of one core. Of ROWS rows half are always solved (any answer is
right), a quarter never, and a quarter are the demo's: to sort eight digits.

Groups whose rewards are all equal are replaced (`policy.filter_zero_variance`), but only up to the limit of a step, so
a step may have more groups that teach nothing than groups that teach. The accuracy is the mean probability of the right
answer to held-out prompts. A right answer, of ANSWER_TOKENS, costs as much as a trajectory of the scenario at the
workers that `echo2d plan` chooses. The learner costs as much as there, per trajectory that it trains on.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from echo2d.core.rules.tasks import Informative, RowFilter
from echo2d.core.work.training.contrast import spread
from echo2d.plan.fleet.forecast import provision
from echo2d.plan.fleet.spec import load_fleet
from echo2d.tasks.base import Prompt
from echo2d.tasks.sort_digits import EOS, SortDigits, answer
from echo2d_lab.research.staleness_sweep import BEST, PER_STEP, STEPS, Case, Run, sweep_rules

ROWS = 512
ANSWER_TOKENS = 9  # eight digits and the end token
KINDS = ("always", "always", "never", "sometimes")  # how often each row is solved
SCENARIO = Path(__file__).parents[4] / "scenarios" / "mix-rented.toml"
# For each choice: changes of the task's rules, and of the run's rules.
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shuffle": ({}, {}),
    "filter": (
        {
            "row_filter": RowFilter(
                retire_after=1,
                retest_after=100,
            )
        },
        {},
    ),
    "informative": (
        {
            "row_filter": Informative(
                explore=0.01,
            )
        },
        {},
    ),
    "pairs": ({"pairs": True}, {}),
    "filter, and pairs": (
        {
            "row_filter": RowFilter(
                retire_after=1,
                retest_after=100,
            ),
            "pairs": True,
        },
        {},
    ),
    "priority": ({}, {"order": "priority"}),
    "filter, and priority": (
        {
            "row_filter": RowFilter(
                retire_after=1,
                retest_after=100,
            )
        },
        {"order": "priority"},
    ),
}


class MixedRows:
    """ROWS rows, each epoch in another order."""

    name = "mixed_rows"
    stop_token_ids: Sequence[int] = (EOS,)

    def __init__(self, rng_seed: int) -> None:
        self._digits, self._rng_seed = SortDigits(rng_seed), rng_seed

    def prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, ROWS)
        row = random.Random(f"rows {self._rng_seed} {epoch}").sample(range(ROWS), ROWS)[place]
        return replace(self._digits.prompt(row), row=str(row))

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        solved = KINDS[int(prompt.row) % len(KINDS)]
        if solved == "sometimes":
            return float(tuple(output) == answer(prompt.tokens))
        return float(solved == "always")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one run.

    gained: increase of the held-out accuracy. tokens: number of generated tokens. teaching: groups with
    variance that were trained on.
    """

    gained: float
    tokens: int
    teaching: int


@dataclass(frozen=True, slots=True)
class Prices:
    """usd of a token at the workers, and of a trained trajectory at the learner."""

    token: float
    trained: float

    @staticmethod
    def read(path: Path) -> "Prices":
        fleet = load_fleet(path)
        offers = provision(fleet).choice.offers
        made_per_h = 3600.0 * sum(offer.mu for offer in offers)
        step_usd = fleet.learner.usd_per_h * fleet.learner.t_train_s / 3600.0
        return Prices(
            sum(offer.usd_per_h for offer in offers) / made_per_h / ANSWER_TOKENS,
            step_usd / fleet.learner.trajectories_per_step,
        )


def play(name: str, rng_seed: int) -> Found:
    learner = load_fleet(SCENARIO).learner
    case = Case(learner.staleness_max, int(learner.publish_every), BEST, rng_seed)
    of_task, of_run = CHOICES[name]
    swept = sweep_rules(case)
    tasks = tuple(replace(task, **of_task) for task in swept.tasks)
    rules = replace(swept, tasks=tasks, filter_zero_variance=True, **of_run)
    run = Run(case, rules=rules, task=MixedRows(rng_seed))
    looks = run.train()["looks"]
    status, ledger = run.swarm.state.status(), run.swarm.ledger
    assert "stale" not in status.groups_dropped
    trained = [
        ledger.groups[group] for step in ledger.committed for group in ledger.frozen[step].groups
    ]
    rewards = [[each.reward for each in stored.record.trajectories] for stored in trained]
    return Found(
        looks[-1][1] - looks[0][1],
        status.tokens_accepted,
        sum(spread(each) > 0 for each in rewards),
    )


def line(name: str, found: Sequence[Found], prices: Prices) -> str:
    """A row of the table: means over the seeds, and the standard error of the gain."""
    gained = [each.gained for each in found]
    error = stdev(gained) / len(gained) ** 0.5 if len(gained) > 1 else float("nan")
    tokens = fmean(each.tokens for each in found)
    teaching = fmean(each.teaching for each in found)
    points, rollouts_usd = 100 * fmean(gained), tokens * prices.token
    usd = rollouts_usd + STEPS * PER_STEP * prices.trained
    cells = [
        f"{tokens / 1e3:.0f}",
        f"{teaching:.0f}",
        f"{tokens / teaching:.0f}",
        f"{points:.1f} ± {100 * error:.1f}",
        f"{1e5 * points / tokens:.1f}",
        f"{rollouts_usd:.0f}",
        f"{usd / points:.1f}",
    ]
    return f"| {' | '.join([name, *cells])} |"


HEAD = (
    "| choice | tokens generated, k | groups that teach | tokens for each | points of accuracy gained "
    "| for 100 k tokens | usd of rollouts | usd in all for a point |\n" + "| --- " * 8 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    wanted = parser.parse_args()
    prices = Prices.read(SCENARIO)
    print(HEAD)
    for name in wanted.choices:
        found = [play(name, rng_seed) for rng_seed in range(wanted.seeds)]
        print(line(name, found, prices), flush=True)


if __name__ == "__main__":
    main()

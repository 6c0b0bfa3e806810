"""Does `policy.group_patience` teach a model to answer shorter? docs/figures/patience_length.jsonl, and a table of it.

`python -m echo2d_lab.research.patience_length` runs the real coordinator core and the real learner's train step in one
process, in virtual time (`timed_process`), on a task whose right answers are the long ones (`walk_task`). An answer
takes TOKEN_S per token, times a factor that is drawn for it: the speed of its slot. The core decides which answers are
left out, which groups are dropped, and which batch takes a group. No answer moves to a faster worker, and versions
spread at once.

A seed has the same first model in each setting. The settings are values of `group_patience`, and EQUAL, the reference:
there every answer takes EQUAL_S, so that no answer is left out because of its length. Held-out prompts show what a run
has learned. Every finished run is a line of the file, and is not made again; each takes two minutes of one core.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from echo2d.client import read_batch
from echo2d.core.base.ids import RunId, Version
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.rules.run import DisseminationTable, RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.demo.run import CACHE
from echo2d.learner.batch.checks import BatchRules, Trained, faults
from echo2d.learner.batch.packing import answers_of
from echo2d.learner.model.policy import Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks, whole
from echo2d_lab.bench.broadcast.torch_writer import TorchWriter
from echo2d_lab.bench.lab.timed_process import TimedProcess
from echo2d_lab.research import staleness_sweep, walk_task
from echo2d_lab.research.artefacts import FIGURES
from echo2d_lab.research.usd_to_accuracy import interval
from echo2d_lab.research.walk_task import EOS, HARDEST, HELD_OUT, MAX_NEW_TOKENS, TRAINED, Walk

RUNS = FIGURES / "patience_length.jsonl"
STEPS, PER_STEP, GROUP_SIZE, STALENESS, LR = 200, 128, 8, 4, 4e-5
EQUAL = "equal"
SETTINGS = ("0", "3", EQUAL)
SEEDS = range(5)
T_TRAIN_S, TOKEN_S, EQUAL_S, SIGMA = 20.0, 0.75, 13.5, 0.5
SLOTS = 127  # about a fifth more than the run needs once the answers are long
NEVER_S = 1e9
LOOK_EVERY, LOOK_SAMPLES = 20, 64
LAST = 3  # the mean of this many last looks is the end of a run


class Case(NamedTuple):
    """setting: a value of `group_patience`, or EQUAL."""

    setting: str
    seed: int


class Answers(NamedTuple):
    """The number of answers, their mean tokens, and the share of right ones."""

    number: int
    tokens: float
    right: float

    @staticmethod
    def of(answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> "Answers":
        """The figures of these answers, each with its prompt."""
        found = [(len(tokens), walk_task.reward(prompt, tokens)) for prompt, tokens in answers]
        means = [fmean(column) for column in zip(*found, strict=True)] or [0.0, 0.0]
        return Answers(len(found), round(means[0], 3), round(means[1], 4))


def play(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Make one run. Returns its facts."""
    began = time.monotonic()
    model = walk_task.make_model(CACHE, case.seed)
    writer, judge = (
        TorchWriter(model, frozenset({EOS}), MAX_NEW_TOKENS, case.seed) for _ in range(2)
    )
    sweep_case = staleness_sweep.Case(STALENESS, 1, "default", case.seed)
    config = staleness_sweep.learner_config(sweep_case, model, steps=steps, lr=LR)
    policy, advantages = Policy(config, Ranks()), advantages_of(config)
    per_step = PER_STEP // GROUP_SIZE
    rules = BatchRules(STALENESS, per_step, GROUP_SIZE, walk_task.VOCABULARY_SIZE, 1)
    taken: list[tuple[Sequence[int], Sequence[int]]] = []
    trained, waited_s, left_out, looks = Trained(), 0.0, 0, [_look(judge, 0, 0.0)]
    swarm = _swarm(case, writer)

    def weights() -> dict[str, Any]:
        return {name: whole(weight) for name, weight in policy.weights().items()}

    swarm.open_session()
    swarm.publish(0, writer.offer(weights()))
    for step in range(1, steps + 1):
        asked_at = swarm.now
        body, digest = swarm.take(step)
        waited_s += swarm.now - asked_at
        batch = read_batch(1, digest.hex(), body)
        assert not faults(batch, step, rules, trained), "I1"
        trained.add(batch)
        for group in batch.groups:
            left_out += len(group.left_out)
            prompt = group.prompt.tolist()
            taken += [(prompt, each.tokens.tolist()) for each in group.trajectories]
        answers = [each for group in answers_of(batch, rules, advantages) for each in group]
        policy.train_step(step, policy.lay_out([answers]), STALENESS)
        swarm.commit(step, digest, T_TRAIN_S)
        swarm.publish(step, writer.offer(weights()))
        if step % LOOK_EVERY == 0:
            judge.refit(VersionKey(Version(step), judge.offer(weights())))
            looks.append(_look(judge, step, swarm.now))
    dropped, groups = sum(swarm.state.status().groups_dropped.values()), steps * per_step
    return {
        **case._asdict(),
        "looks": looks,
        "began": Answers.of((prompt, each.tokens) for prompt, each in swarm.began),
        "trained": Answers.of(taken),
        "cancelled": Answers.of((prompt, each.tokens) for prompt, each in swarm.cancelled),
        "left_out": round(left_out / groups / GROUP_SIZE, 5),
        "dropped": round(dropped / (groups + dropped), 5),
        "bubble": round(waited_s / swarm.now, 4),
        "virtual_s": round(swarm.now),
        "wall_s": round(time.monotonic() - began, 1),
    }


def _swarm(case: Case, writer: TorchWriter) -> TimedProcess:
    """The run of a case. Groups with equal rewards are not replaced; they teach nothing in any of the runs."""
    rules = RunRules(
        run_id=RunId("patience"),
        staleness_max=STALENESS,
        publish_every=1,
        trajectories_per_step=PER_STEP,
        group_size=GROUP_SIZE,
        tasks=(TaskRules(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(EOS,)),),
        vocab_size=walk_task.VOCABULARY_SIZE,
        over_stale="drop",
        filter_zero_variance=False,
        move_stragglers=False,
        group_patience=0.0 if case.setting == EQUAL else float(case.setting),
        dissemination=DisseminationTable(shape="star", chains=1, delta=False),
        lease_silence_s=NEVER_S,
        heartbeat_s=NEVER_S,
    )
    chance = random.Random(f"speed {case.seed}")

    def takes_s(tokens: int) -> float:
        factor = chance.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)
        return EQUAL_S if case.setting == EQUAL else TOKEN_S * tokens * factor

    prompts = [tuple(prompt.tokens) for prompt in TRAINED]
    return TimedProcess(rules, Walk(case.seed), writer, prompts, slots=SLOTS, takes_s=takes_s)


def _look(judge: TorchWriter, step: int, now: float) -> list[float]:
    """Step, virtual seconds, accuracy and tokens for the held-out prompts, and the same for the hardest ones."""
    prompts = [prompt.tokens for prompt in HELD_OUT]
    written = judge.write(prompts, [LOOK_SAMPLES] * len(prompts))
    found = [
        Answers.of((prompt, each.tokens) for each in several)
        for prompt, several in zip(prompts, written, strict=True)
    ]
    means = [
        fmean(column)
        for some in (found, found[-HARDEST:])
        for column in ([each.right for each in some], [each.tokens for each in some])
    ]
    return [step, round(now), *(round(mean, 4) for mean in means)]


# --- the answer


def facts(run: Mapping[str, Any]) -> dict[str, float]:
    """The compared facts. "end" is the mean of the last looks, "mean" that of all looks after the first step."""
    end, run_mean = (
        [fmean(column) for column in zip(*looks, strict=True)]
        for looks in (run["looks"][-LAST:], run["looks"][1:])
    )
    began, trained, cancelled = (Answers(*run[name]) for name in ("began", "trained", "cancelled"))
    return {
        "accuracy, end": end[2],
        "accuracy, mean": run_mean[2],
        "accuracy of the hardest, end": end[4],
        "accuracy of the hardest, mean": run_mean[4],
        "tokens, end": end[3],
        "tokens, mean": run_mean[3],
        "tokens of the hardest, end": end[5],
        "tokens of the hardest, mean": run_mean[5],
        "tokens of answers begun": began.tokens,
        "tokens of answers trained": trained.tokens,
        "tokens of answers cancelled": cancelled.tokens,
        "share of cancelled answers that are right": cancelled.right,
        "answers begun for one trained": began.number / trained.number,
        "answers left out": run["left_out"],
        "groups dropped": run["dropped"],
        "bubble": run["bubble"],
        "virtual seconds": run["virtual_s"],
    }


def table(runs: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """A row for each fact: its mean for each setting, and differences of runs with the same seed with intervals."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for run in runs:
        found.setdefault(run["setting"], {})[run["seed"]] = facts(run)
    pairs = [(later, first) for first, later in itertools.combinations(sorted(found), 2)]
    heads = [f"{setting}, {len(of_seeds)} seeds" for setting, of_seeds in sorted(found.items())]
    yield ["", *heads, *(f"{one} - {other}" for one, other in pairs)]
    for name in facts(runs[0]):
        means = [fmean(each[name] for each in found[setting].values()) for setting in sorted(found)]
        differences = [
            [
                found[one][seed][name] - found[other][seed][name]
                for seed in found[one]
                if seed in found[other]
            ]
            for one, other in pairs
        ]
        yield [name, *(f"{mean:.4g}" for mean in means), *map(_with_interval, differences)]


def _with_interval(values: Sequence[float]) -> str:
    ends = interval(values)
    return f"{fmean(values):+.3g}" + (
        "" if ends is None else f" ({ends[0]:+.3g} to {ends[1]:+.3g})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="values of group_patience")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    wanted = parser.parse_args()
    runs = staleness_sweep.finished(RUNS)
    there = {Case(*(run[name] for name in Case._fields)) for run in runs}
    planned = (
        Case(setting, seed) for seed, setting in itertools.product(wanted.seeds, wanted.settings)
    )
    for case in [case for case in planned if case not in there]:
        runs.append(play(case))
        with RUNS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(runs[-1]) + "\n")
        print(f"{case}: {runs[-1]['looks'][-1]}, {runs[-1]['wall_s']} s", flush=True)
    for row in table(runs):
        print(*row, sep="\t")


if __name__ == "__main__":
    main()

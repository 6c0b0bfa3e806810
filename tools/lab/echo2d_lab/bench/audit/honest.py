"""Measure whether an honest worker is ever convicted: record honest answers, and draw workers from them.

    python -m echo2d_lab.bench.audit.honest [--answers 20000] [--workers 20] [--model DIR | --log RUN_DIR]

Honest engines in float32 and bfloat16 answer the demo's prompts with the coordinator's seeds; an
auditor in float32 scores each answer with one prefill. Then each of --workers workers gets 20,000
audited answers, drawn at random with repetition: in float32, in bfloat16, or half and half. Limits are
learnt from 200 answers of trusted workers in float32 only, which is the hardest case. All of this is also
done without seeds. With --log the answers are those of a run in which all were audited, over all its versions:

    echo2d bench liars --lies "" --audit-share 1 --steps 200 --out DIR    # then --log DIR/coordinator
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from echo2d.core.audit.baseline import BASELINE_TRAJECTORIES, HonestLimits, limits_of
from echo2d.core.audit.case import Cases
from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.rules.audit import AuditRules
from echo2d.demo.run import CACHE
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.engines.torch_engine.policy import build, prepare
from echo2d.engines.torch_engine.scoring import Scorable, score_all
from echo2d.runtime.audit.audit_log import read_audit_log
from echo2d.tasks.sort_digits import EOS, SortDigits
from echo2d_lab.bench.audit.agreement import AuditBench, HonestWriter, write

GROUP_SIZE = 8
SLOTS = 64
TOGETHER = 256  # answers in one forward pass
DTYPES = ("float32", "bfloat16")


def record(model: Path, answers: int, tokens: int) -> dict[str, list[Evidence]]:
    """Evidence about honest answers, by the writer's dtype."""
    policy = build(prepare(model, None, torch.float32), torch.float32, torch.device("cpu"))
    task = SortDigits(rng_seed=1)
    prompts = [list(task.prompt(number).tokens) for number in range(-(-answers // GROUP_SIZE))]
    bench = AuditBench(
        model=model, prompts=prompts, tokens=tokens, ends=(EOS,), sampling=WHOLE,
        replay="torch",
    )  # fmt: skip
    found: dict[str, list[Evidence]] = {}
    for dtype in DTYPES:
        written = asyncio.run(write(bench, HonestWriter(dtype, SLOTS)))[:answers]
        found[dtype] = []
        for start in range(0, len(written), TOGETHER):
            part = written[start : start + TOGETHER]
            asked = [Scorable(prompts[each.group], each.tokens, each.seed) for each in part]
            for each, scored in zip(part, score_all(policy, asked, sampling=WHOLE), strict=True):
                found[dtype].append(scored.evidence(np.array(each.logprobs)))
    return found


def convicted(
    recorded: Sequence[Evidence],
    limits: HonestLimits,
    *,
    workers: int,
    audited: int,
    rng: random.Random,
) -> tuple[int, float]:
    """The number of convicted workers, and the share of all answers that is flagged."""
    count = flagged = 0
    for number in range(workers):
        cases, worker = (
            Cases(
                AuditRules(
                    trusted=("t",),
                )
            ),
            PeerId(str(number)),
        )
        for found in rng.choices(recorded, k=audited):
            cases.judge(worker, found, limits)
        case = cases.of(worker)
        count += bool(case.verdict)
        flagged += case.flagged
    return count, flagged / (workers * audited)


def recorded_in(run_dir: Path) -> dict[str, list[Evidence]]:
    """Evidence from a run's audit log, by the dtype that ends the worker's name."""
    found: dict[str, list[Evidence]] = {dtype: [] for dtype in DTYPES}
    for row in read_audit_log(run_dir):
        dtype = row["name"].rpartition("-")[2]
        # The log keeps Z and the ratios, on which verdicts are based, but not the parts of Z.
        numbers = (row["k"], row["z"], 1.0, row["cold"], row["hot"])
        found[dtype].append(
            Evidence(row["tokens"], *numbers, row["misses"] and tuple(row["misses"]))
        )
    return found


def without_seeds(recorded: Sequence[Evidence]) -> list[Evidence]:
    return [replace(e, misses=None) for e in recorded]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--log", type=Path)
    asked = parser.parse_args()
    if asked.log is None:
        model = asked.model or make_tiny_model(CACHE)
        recorded = record(model, asked.answers, asked.tokens)
    else:
        recorded = recorded_in(asked.log)
    rng = random.Random(0)
    half = min(asked.answers // 2, *map(len, recorded.values()))
    recorded["mixed"] = [each for dtype in DTYPES for each in rng.sample(recorded[dtype], half)]
    print("| workers | class | recorded | dealt to each | flagged | convicted |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, answers in recorded.items():
        for kind, of in (("seeded", answers), ("unseeded", without_seeds(answers))):
            trusted = recorded["float32"][:BASELINE_TRAJECTORIES]
            limits = limits_of(trusted if kind == "seeded" else without_seeds(trusted))
            count, flagged = convicted(
                of, limits, workers=asked.workers, audited=asked.answers, rng=rng
            )
            print(
                f"| {name} | {kind} | {len(of)} | {asked.answers} "
                f"| {flagged:.4%} | {count} of {asked.workers} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

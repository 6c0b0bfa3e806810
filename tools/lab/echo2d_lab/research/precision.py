"""Measures accuracy lost by layers in bfloat16: `python -m echo2d_lab.research.precision [--seeds 0 1 2]`, one core.

It makes the run of `staleness_sweep` with S = 0 (the demo's task and model, 60 train steps), in float32 and in bfloat16
with the same seeds. The accuracy is the mean probability of the right answer to held-out prompts, so only the training
is random.
"""

import argparse
from statistics import mean, stdev

from echo2d_lab.research.staleness_sweep import BEST, Case, Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = parser.parse_args()
    differences = []
    for seed in chosen.seeds:
        case = Case(0, 1, BEST, seed)
        (first, wide), (_, narrow) = (
            (looks[0][1], looks[-1][1])
            for dtype in ("float32", "bfloat16")
            for looks in [Run(case, dtype=dtype).train()["looks"]]
        )
        differences.append(narrow - wide)
        print(
            f"seed {seed}: from {first:.4f} to {wide:.4f} in float32, {narrow:.4f} in bfloat16",
            flush=True,
        )
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    print(f"bfloat16 - float32: {mean(differences):+.4f}, standard error {error:.4f}")


if __name__ == "__main__":
    main()

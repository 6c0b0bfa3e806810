"""Measure the cost of a refit in each mode, on a real SGLang server on the CPU.

    bash tools/sglang_cpu/setup.sh
    python -m echo2d_lab.research.refit_modes [--rounds 3] [--samples 16] [--json]

One server has one thread and a Qwen3 of 3 M parameters in float32. Samples with prompts that share
nothing run to a fixed length; meanwhile the server is refitted. The modes take turns, and so does a run
without refits: the extra time of a mode's run over that one, per refit, is the real cost of a refit.

transformers computes every logprob again, under the version that its span names; after a refit in place
it uses the KV caches of the earlier versions. So it finds every wrong span. `unlike` is the difference of the
logprobs after a refit in place from those of a clean prefill, with which an audit compares; `moved` is the
difference of a clean prefill from that of the version before. Both are means, in nats.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, get_args

from echo2d_lab.bench.refit.modes import (
    Mode,
    ModeFound,
    RefitWork,
    make_versions,
    measure,
    model_config,
)
from echo2d_lab.bench.refit.server import cpu_server

REPO = Path(__file__).resolve().parents[4]
PYTHON = REPO / "tools" / "sglang_cpu" / "python"
HEAD = ("mode", "pause s", "tokens again", "said s", "resumes s", "a refit costs s",
        "at risk", "lost", "spans wrong", "unlike", "moved")  # fmt: skip


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, smallest and largest."""
    if not values:
        return "-"
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def row(mode: Mode, found: Sequence[ModeFound], bare_s: float | None) -> list[str]:
    said = [each for one in found for each in one.recompute_s if each is not None]
    return [
        mode,
        spread([each for one in found for each in one.pause_s]),
        spread([each for one in found for each in one.tokens], 0),
        spread(said),
        spread([each for one in found for each in one.resumes_s]),
        spread(
            []
            if bare_s is None
            else [(one.wall_s - bare_s) / len(one.pause_s) for one in found if one.pause_s]
        ),
        spread([one.risk for one in found], 0),
        str(sum(one.lost for one in found)),
        f"{sum(one.wrong for one in found)} of {sum(one.checked for one in found):,}",
        f"{median(one.unlike for one in found):.4f}",
        f"{median(one.moved for one in found):.4f}",
    ]


async def run(work: RefitWork, modes: Sequence[Mode], rounds: int) -> list[ModeFound]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        versions = await asyncio.to_thread(make_versions, Path(folder), work, model_config())
        async with cpu_server(PYTHON, Path(folder) / "server", versions[0]) as server:
            for number in range(rounds):
                for mode in modes:
                    one = await measure(server, versions, work, mode)
                    print(f"round {number + 1}, {mode}: {one.wall_s:.1f} s, load "
                          f"{os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)  # fmt: skip
                    found.append(one)
    return found


def facts(work: RefitWork, found: Sequence[ModeFound]) -> dict[str, Any]:
    return {"work": {name: getattr(work, name) for name in RefitWork.__slots__},
            "runs": [one.facts() for one in found]}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=RefitWork().samples)
    parser.add_argument("--prompt-tokens", type=int, default=RefitWork().prompt_tokens)
    parser.add_argument("--answer-tokens", type=int, default=RefitWork().answer_tokens)
    parser.add_argument("--refits", type=int, default=RefitWork().refits)
    parser.add_argument("--change", type=float, default=RefitWork().change)
    parser.add_argument("--held-s", type=float, default=RefitWork().held_s)
    parser.add_argument("--modes", nargs="+", default=list(get_args(Mode)), choices=get_args(Mode))
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    work = RefitWork(
        samples=chosen.samples, prompt_tokens=chosen.prompt_tokens, answer_tokens=chosen.answer_tokens,
        refits=chosen.refits, change=chosen.change, held_s=chosen.held_s,
    )  # fmt: skip
    found = asyncio.run(run(work, chosen.modes, chosen.rounds))
    if chosen.json:
        print(json.dumps(facts(work, found)))
        return 0
    bare = [one.wall_s for one in found if one.mode == "none"]
    bare_s = median(bare) if bare else None
    print(f"without refits {spread(bare)} s")
    print("| " + " | ".join(HEAD) + " |")
    print("| " + " | ".join("---" for _ in HEAD) + " |")
    for mode in chosen.modes:
        if mode != "none":
            mine = [one for one in found if one.mode == mode]
            print("| " + " | ".join(row(mode, mine, bare_s)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

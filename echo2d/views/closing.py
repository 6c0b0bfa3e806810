"""What a run came to, in the last lines of `echo2d run`: its steps, its scores, and where the model is."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def closing_lines(metrics: Path, run_dir: Path, steps: int) -> Iterator[str]:
    """metrics: the learner's metrics.jsonl, which may not be there. steps: after which the run ends."""
    step, first, last = 0, dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    with suppress(OSError), metrics.open() as lines:
        for line in lines:
            with suppress(ValueError):
                row = json.loads(line)
                step = max(step, row["step"]) if "loss" in row else step
                for name, score in row.get("eval", {}).items():
                    if score["mean"] is not None:
                        first.setdefault(name, score)
                        last[name] = score
    if not step:
        return
    goes_on = "" if step >= steps else "; the same command goes on"
    yield f"{step} of {steps} train steps are made{goes_on}"
    for name, score in last.items():
        yield (
            f"held-out {name}: mean reward {first[name]['mean']:.3f} at version {first[name]['version']}, "
            f"{score['mean']:.3f} at version {score['version']} (standard error {score['se']:.3f}, "
            f"{score['rows']} questions)"
        )
    yield f"the model: echo2d keep export --run-dir {run_dir} --last trained"

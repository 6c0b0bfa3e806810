"""The learning rate of each train step: a linear warm-up, then constant, or down to a share by the last step."""

import math
from typing import Literal

LrSchedule = Literal["constant", "linear", "cosine"]


def lr_share(
    step: int, *, steps: int, warmup_steps: int, schedule: LrSchedule, last_share: float
) -> float:
    """The share of the configured learning rate for train step `step`, which counts from 1.

    The decay begins after the warm-up, and reaches last_share at step `steps`. cosine: half a period
    (SGDR, arXiv 1608.03983).
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    left = 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return last_share + (1.0 - last_share) * left

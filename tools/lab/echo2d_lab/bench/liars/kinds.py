"""The names of the lies (`lying_engine`)."""

from typing import Literal, get_args

LieKind = Literal[
    "made_up", "made_up_true_logprobs", "version_0", "three_old", "int4", "int8", "temperature",
    "greedy", "best_of_4",
]  # fmt: skip
LIES: tuple[LieKind, ...] = get_args(LieKind)

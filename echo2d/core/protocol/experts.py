"""The column of experts: which experts each layer of a mixture chose for each output token.

They are those of the forward pass that drew the token, which is the pass of the token before it. The first output
token has those of the prompt's last token. A layer without a router has zeros.

Suffixes of names: n = output tokens, l = layers, c = experts that a token is sent to, m = n * l.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo2d.core.base.model_config import ExpertNumbers
from echo2d.core.protocol.columns import Column, Columns

EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What the experts of one token may be."""

    layers: int  # of the model, with and without routers
    chosen: int
    experts: int
    routed: tuple[int, ...]  # the layers with a router

    def fault(self, experts_nlc: NDArray[Any]) -> str:
        """Return what is wrong with the experts of n tokens, or "" if nothing is. They may come from a stranger."""
        if experts_nlc.dtype.kind != "u" or experts_nlc.shape[1:] != (self.layers, self.chosen):
            expected = f"unsigned numbers of shape {(self.layers, self.chosen)}"
            return (
                f"experts: expected {expected}; found {experts_nlc.dtype} {experts_nlc.shape[1:]}"
            )
        sorted_nlc = np.sort(experts_nlc[:, self.routed], axis=-1)
        if sorted_nlc.size and sorted_nlc.max() >= self.experts:
            return f"experts: expected numbers below {self.experts}; found {sorted_nlc.max()}"
        if (sorted_nlc[..., 1:] == sorted_nlc[..., :-1]).any():
            return f"experts: expected {self.chosen} different ones of each layer; found one twice"
        return ""

    def differing(self, reported_nlc: NDArray[Any], own_nlc: NDArray[Any]) -> float:
        """The share of the reported experts of n tokens that are not among the own ones, in the layer where it is
        largest; 1.0 if they have a fault. A mean over many layers would hide a layer whose experts are made up.
        """
        if self.fault(reported_nlc):
            return 1.0
        reported, own = reported_nlc[:, self.routed], own_nlc[:, self.routed]
        missing_nlc = (reported[..., :, None] != own[..., None, :]).all(-1)
        return float(missing_nlc.mean((0, 2)).max(initial=0.0))


def expert_fault(columns: Columns, numbers: ExpertNumbers | None) -> str:
    """Return what no router can have chosen among the experts in these columns, or "" if there is nothing.

    The columns have the right number of bytes. numbers: what config.json says, which leaves open which layers have
    routers; None: nothing.
    """
    found = next((each for each in columns if each.name == EXPERTS), None)
    if found is None or numbers is None:
        return ""
    shape = (numbers.layers, numbers.chosen)
    if found.element not in ("u8", "u16") or found.shape != shape:
        return f"experts: expected u8 or u16 of {shape}; found {found.element} of {found.shape}"
    rows = np.frombuffer(found.data, "<u1" if found.element == "u8" else "<u2")
    rows_mc = rows.reshape(-1, numbers.chosen)
    rows_mc = rows_mc[rows_mc.any(1)]  # without layers that have no router
    if rows_mc.size and rows_mc.max() >= numbers.experts:
        return f"experts: expected numbers below {numbers.experts}; found {rows_mc.max()}"
    twice = any(
        (rows_mc[:, step:] == rows_mc[:, :-step]).any() for step in range(1, numbers.chosen)
    )
    return f"experts: expected {numbers.chosen} different ones; found one twice" if twice else ""


def column_of(experts_nlc: NDArray[Any], experts: int) -> Column:
    """The column of n tokens. experts: how many a layer has."""
    small = experts <= 1 << 8
    data = experts_nlc.astype("<u1" if small else "<u2").tobytes()
    return Column(EXPERTS, "u8" if small else "u16", experts_nlc.shape[1:], data)

"""How the tokens of an answer are drawn: a part of leases, of orders to auditors and of batches."""

import math
from dataclasses import dataclass

# Below it, logits / temperature overflow.
TEMPERATURE_MIN = 1e-3
TEMPERATURE_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that a token is drawn from.

    top_p, top_k and min_p each cut the distribution at the temperature. The token is drawn from what
    all three keep; the likeliest token always stays.
    """

    # Divides the logits; 0: the likeliest token is taken.
    temperature: float = 1.0
    # Keeps the likeliest tokens that together reach this probability.
    top_p: float = 1.0
    top_k: int = 0  # keeps this many of the likeliest tokens; 0: all
    # Keeps the tokens with at least this share of the likeliest token's probability.
    min_p: float = 0.0

    @property
    def cuts(self) -> bool:
        """Whether some tokens are never drawn, although the model gives them a probability."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def fault(self) -> str:
        """What makes it impossible to draw like this; empty: nothing."""
        heat = self.temperature
        if not (heat == 0 or TEMPERATURE_MIN <= heat < math.inf):
            return f"temperature must be 0 or at least {TEMPERATURE_MIN}"
        if not 0 < self.top_p <= 1:
            return "top_p must be in (0, 1]"
        if self.top_k < 0:
            return "top_k must be at least 0"
        return "" if 0 <= self.min_p < 1 else "min_p must be in [0, 1)"

    def __str__(self) -> str:
        cut = (
            f", top_p {self.top_p:g}" * (self.top_p < 1),
            f", top_k {self.top_k}" * (self.top_k > 0),
            f", min_p {self.min_p:g}" * (self.min_p > 0),
        )
        return f"temperature {self.temperature:g}{''.join(cut)}"


WHOLE = Sampling()

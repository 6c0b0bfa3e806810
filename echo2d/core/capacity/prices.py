"""The price of a worker: the operator's price for its name, or else the one it was started with.

Prices are stated, not measured, and nothing is billed here. Without a price a worker costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Price:
    """trajectories_per_h: expected until it is measured."""

    usd_per_h: float = 0.0
    usd_per_gb_down: float = 0.0
    usd_per_gb_up: float = 0.0
    trajectories_per_h: float | None = None

    @property
    def trajectories_per_s(self) -> float | None:
        return None if self.trajectories_per_h is None else self.trajectories_per_h / 3600.0


FREE = Price()


@dataclass(frozen=True, slots=True)
class NamedPrice:
    """Of the workers whose names match: `spot-*`."""

    workers: str
    price: Price


def price_of(named: Sequence[NamedPrice], name: str, said_usd_per_h: float | None) -> Price:
    """The first that matches; else what the worker said."""
    found = next((each.price for each in named if fnmatchcase(name, each.workers)), None)
    if found is not None:
        return found
    return Price(usd_per_h=said_usd_per_h) if said_usd_per_h else FREE

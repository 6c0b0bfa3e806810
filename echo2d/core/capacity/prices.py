"""What a worker costs: as the operator of the run says for its name, else as whoever started the worker said.

Nothing of this is measured, and nothing is billed here. Without any price all workers cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Price:
    """availability: share of the time that it is there. trajectories_per_h: expected of it until it is measured."""

    usd_per_h: float = 0.0
    usd_per_gb_down: float = 0.0
    usd_per_gb_up: float = 0.0
    availability: float = 1.0
    trajectories_per_h: float | None = None


@dataclass(frozen=True, slots=True)
class NamedPrice:
    """Of the workers whose names match: `spot-*`."""

    workers: str
    price: Price


def price_of(named: Sequence[NamedPrice], name: str, said_usd_per_h: float | None) -> Price:
    """The first that matches; else what the worker said."""
    found = next((each.price for each in named if fnmatchcase(name, each.workers)), None)
    return found or Price(usd_per_h=said_usd_per_h or 0.0)

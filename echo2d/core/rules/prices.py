"""The price of a worker: the operator's price for its name, or else the one it was started with.

Prices are stated, not measured, and nothing is billed here. Without a price a worker costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from echo2d.core.rules.table import Table, key

# More than this per hour, or per 10^9 bytes, is a typing mistake.
USD_MAX = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable(Table):
    """One [[price]]. The first one whose pattern matches a worker's name is that worker's price."""

    TABLE: ClassVar[str] = "price"

    workers: str = key('pattern of the worker names that cost this, such as "spot-*"')
    usd_per_h: float = key("usd per hour of one worker", 0.0, low=0.0, high=USD_MAX)
    usd_per_gb_down: float = key(
        "usd per 10^9 bytes that the worker receives", 0.0, low=0.0, high=USD_MAX
    )
    usd_per_gb_up: float = key(
        "usd per 10^9 bytes that the worker sends", 0.0, low=0.0, high=USD_MAX
    )
    trajectories_per_h: float = key(
        "trajectories per hour expected of one worker until it is measured;"
        " 0: as many as the other workers make",
        0.0,
        low=0.0,
    )


@dataclass(frozen=True, slots=True)
class Price:
    """What one worker costs."""

    usd_per_h: float = 0.0
    usd_per_gb_down: float = 0.0
    usd_per_gb_up: float = 0.0
    # Expected of the worker until it is measured.
    trajectories_per_h: float | None = None

    @property
    def trajectories_per_s(self) -> float | None:
        return None if self.trajectories_per_h is None else self.trajectories_per_h / 3600.0


FREE = Price()


@dataclass(frozen=True, slots=True)
class NamedPrice:
    """The price of the workers whose names match a pattern, such as `spot-*`."""

    workers: str
    price: Price


def price_of(named: Sequence[NamedPrice], name: str, said_usd_per_h: float | None) -> Price:
    """The first price that matches this name; else the one that the worker reported."""
    found = next((each.price for each in named if fnmatchcase(name, each.workers)), None)
    if found is not None:
        return found
    return Price(usd_per_h=said_usd_per_h) if said_usd_per_h else FREE

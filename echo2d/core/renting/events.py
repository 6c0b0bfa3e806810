"""The events and actions of renting, and the rules that the operator chose.

A box's label is `<prefix><provider>-<offer>-<number>`. All labels of a run have its prefix, and no
number is used twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo2d.core.renting.budget import Budget, Label, Rental, RentOffer


@dataclass(frozen=True, slots=True)
class RentRules:
    """The operator's rules for renting."""

    prefix: str  # the beginning of all labels of this run
    budget: Budget
    life_s: float  # the longest life of a box
    idle_s: float  # a box that had no work for this long is given back
    join_s: float  # a box whose worker has not served for this long is given back
    patience_s: float  # a shortfall counts when it has lasted this long
    drain_s: float = 0.0  # the worker of a box marked for return may finish its work for this long
    closing: bool = False  # start nothing, and stop everything

    def label(self, offer: RentOffer, number: int) -> Label:
        return Label(f"{self.prefix}{offer.provider}-{offer.name}-{number}")

    def number_of(self, label: Label) -> int:
        """The number in a label; 0 if the label is not one of this run."""
        number = label.rpartition("-")[2]
        ours = label.startswith(self.prefix) and number.isascii() and number.isdecimal()
        return int(number) if ours and len(number) <= 9 else 0


@dataclass(frozen=True, slots=True)
class Instance:
    """One line of a provider's list."""

    label: Label
    id: str  # the provider's name for the box


# --- events


@dataclass(frozen=True, slots=True)
class NeedMeasured:
    """What the run needs; it comes at least every few seconds."""

    # Trajectories/s by which all workers here miss the target; None: not known yet.
    shortfall_mu: float | None
    wanted: bool  # whether a learner takes the trajectories
    # How many workers are here that generate, or would if they got leases.
    workers: int
    # The rented boxes among them, with the seconds since they held a lease or began to serve.
    serving: Mapping[Label, float] = field(default_factory=dict)
    # The rented boxes whose worker has leases, or would get some.
    holding: frozenset[Label] = frozenset()
    # Measured trajectories/s of rented boxes.
    mu: Mapping[Label, float] = field(default_factory=dict)
    # The part of the target that covers noise; a shortfall below it starts no box.
    margin_mu: float = 0.0
    gb_per_h: float = 0.0  # 10^9 bytes of versions that each worker receives in an hour


@dataclass(frozen=True, slots=True)
class StartEnded:
    """A start command ended."""

    label: Label
    ok: bool
    reason: str = ""  # why it failed, in the provider's own words


@dataclass(frozen=True, slots=True)
class StopEnded:
    label: Label
    ok: bool


@dataclass(frozen=True, slots=True)
class Listed:
    """A list command ended."""

    provider: str
    began_at: float  # when it was started
    instances: tuple[Instance, ...] | None  # None if it failed
    reason: str = ""  # why it failed, in the provider's own words


RentEvent = NeedMeasured | StartEnded | StopEnded | Listed


# --- actions


@dataclass(frozen=True, slots=True)
class Keep:
    """Make this row durable before any other action; it replaces the row with the same label."""

    rental: Rental


@dataclass(frozen=True, slots=True)
class Start:
    rental: Rental
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    rental: Rental
    ids: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class List:
    provider: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Delete the box's credential, so that its worker cannot join any more."""

    label: Label


@dataclass(frozen=True, slots=True)
class RentNote:
    """A line for the log."""

    kind: str
    text: str


RentAction = Keep | Start | Stop | List | Retire | RentNote

"""The events and actions of renting, and the rules that the operator chose.

A box's label is `<prefix><provider>-<offer>-<number>`. All labels of a run have its prefix, and no
number is used twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo2d.core.renting.budget import Budget, Label, Rental, RentOffer


@dataclass(frozen=True, slots=True)
class RentRules:
    """prefix: of all labels of this run. life_s: the longest life of a box.

    idle_s: a box without work for so long is given back. join_s: so is a box whose worker has not
    served for so long. drain_s: that its worker then has to finish what it holds. patience_s: that
    a shortfall must last before it counts. closing: start nothing, and stop everything.
    """

    prefix: str
    budget: Budget
    life_s: float
    idle_s: float
    join_s: float
    patience_s: float
    drain_s: float = 0.0
    closing: bool = False

    def label(self, offer: RentOffer, number: int) -> Label:
        return Label(f"{self.prefix}{offer.provider}-{offer.name}-{number}")

    def number_of(self, label: Label) -> int:
        """The number in a label; 0 if the label is not one of this run."""
        number = label.rpartition("-")[2]
        ours = label.startswith(self.prefix) and number.isascii() and number.isdecimal()
        return int(number) if ours and len(number) <= 9 else 0


@dataclass(frozen=True, slots=True)
class Instance:
    """One line of a provider's list. id: the provider's name for the box."""

    label: Label
    id: str


# --- events


@dataclass(frozen=True, slots=True)
class NeedMeasured:
    """What the run needs; it comes at least every few seconds.

    shortfall_mu: trajectories/s that all workers here lack of the target; None: not known yet.
    wanted: a learner takes what is made.
    workers: how many are here that generate, or would if they got leases.
    serving: the rented ones among them, with the seconds since they held a lease or began to serve.
    holding: the rented boxes whose worker has leases, or would get some.
    mu: trajectories/s of rented boxes, as measured.
    margin_mu: the part of the target that is there for noise; less than that is not rented for.
    gb_per_h: what each worker receives of versions.
    """

    shortfall_mu: float | None
    wanted: bool
    workers: int
    serving: Mapping[Label, float] = field(default_factory=dict)
    holding: frozenset[Label] = frozenset()
    mu: Mapping[Label, float] = field(default_factory=dict)
    margin_mu: float = 0.0
    gb_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class StartEnded:
    """reason: why it failed, in the provider's own words."""

    label: Label
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StopEnded:
    label: Label
    ok: bool


@dataclass(frozen=True, slots=True)
class Listed:
    """A list command ended. began_at: when it was started. instances: None if it failed. reason: why, in
    the provider's own words.
    """

    provider: str
    began_at: float
    instances: tuple[Instance, ...] | None
    reason: str = ""


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
    """Delete the box's credential: its worker may not join any more."""

    label: Label


@dataclass(frozen=True, slots=True)
class RentNote:
    """A line for the log."""

    kind: str
    text: str


RentAction = Keep | Start | Stop | List | Retire | RentNote

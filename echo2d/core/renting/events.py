"""What renting is made of: events (it happened), actions (do it), and the rules that the operator chose.

A label is `<prefix><provider>-<offer>-<number>`: all of a run have its prefix, and no number is used twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo2d.core.renting.budget import Budget, Label, Rental, RentOffer

NUMBER_DIGITS_MAX = 9


@dataclass(frozen=True, slots=True)
class RentRules:
    """prefix: of all labels of this run. closing: nothing is started, and everything stopped.

    A box is given back after idle_s without work, or join_s without a worker that serves; its worker has drain_s to
    finish what it holds. A shortfall counts when it has lasted patience_s. life_s: of a box, at most.
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
        """0 of a label that is not ours."""
        number = label.rpartition("-")[2]
        ours = label.startswith(self.prefix) and number.isascii() and number.isdecimal()
        return int(number) if ours and len(number) <= NUMBER_DIGITS_MAX else 0


@dataclass(frozen=True, slots=True)
class Instance:
    """A line of a provider's list. id: the provider's own."""

    label: Label
    id: str


# --- events


@dataclass(frozen=True, slots=True)
class NeedMeasured:
    """What is known of the run, at least every few seconds.

    shortfall_mu: trajectories/s that all workers that are here lack of the target; None: nothing is known yet.
    wanted: a learner takes what is made. workers: how many are here that work, or would. serving: of the rented ones
    among them, for how many seconds nothing has been asked of it. holding: rented ones whose worker has leases, or
    would get some. mu: trajectories/s of rented ones, as measured. margin_mu: of the target, what is there for noise;
    less than that is no reason to rent. gb_per_h: that each worker receives.
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
    label: Label
    ok: bool


@dataclass(frozen=True, slots=True)
class StopEnded:
    label: Label
    ok: bool


@dataclass(frozen=True, slots=True)
class Listed:
    """began_at: when the command was started. instances: None, it failed."""

    provider: str
    began_at: float
    instances: tuple[Instance, ...] | None


RentEvent = NeedMeasured | StartEnded | StopEnded | Listed


# --- actions


@dataclass(frozen=True, slots=True)
class Keep:
    """Make this row durable, in place of the one with its label, before any other action of the list."""

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
    """Its worker is not let in any more."""

    label: Label


@dataclass(frozen=True, slots=True)
class RentNote:
    """For the log."""

    kind: str
    text: str


RentAction = Keep | Start | Stop | List | Retire | RentNote

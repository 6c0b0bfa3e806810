"""The budget is never exceeded and no box is forgotten, whatever commands, lists, clocks and crashes do.

The world bills a box from the moment its start command was sent, with started units in full. It keeps only these rules:
commands end within their time; a list is at most settle_s behind or never shows anything; a box ends by itself at its
deadline; and a clock is not set back, while the machine is off or stopped, by less than that time (nobody could see
it).
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2d.core.renting.autoscaler import Autoscaler
from echo2d.core.renting.boxes import KILL_S
from echo2d.core.renting.budget import Budget, Label, Moment, Rental, RentOffer, Terms, rent_time
from echo2d.core.renting.events import (
    Instance,
    Keep,
    List,
    Listed,
    NeedMeasured,
    RentAction,
    RentEvent,
    RentRules,
    Start,
    StartEnded,
    Stop,
    StopEnded,
)

TERMS = (
    Terms("a", command_s=60.0, settle_s=90.0, list_every_s=30.0, billed_by_s=1.0, grace_s=400.0),
    Terms("b", command_s=300.0, settle_s=40.0, list_every_s=60.0, billed_by_s=600.0, grace_s=900.0),
)
OFFERS = (
    RentOffer("a", "small", 0.4, 300.0, 6),
    RentOffer("a", "large", 1.1, 1000.0, 3),
    RentOffer("b", "spot", 0.2, 200.0, 8, availability=0.8),
)
PRICES = {(offer.provider, offer.name): offer.usd_per_h for offer in OFFERS}
SEEDS = st.integers(0, 2**32 - 1)


@dataclass
class Machine:
    """A box of the world. ends_at: by itself; hidden_until: lists omit it."""

    rental: Rental
    number: int
    id: str
    sent: float
    began: float
    ended: float
    shown: bool = False
    hidden_until: float = -math.inf

    def bill(self, now: float) -> float:
        unit = self.rental.billed_by_s
        duration = max(0.0, min(now, self.ended) - self.sent)
        return math.ceil(duration / unit * (1 - 1e-9)) * unit / 3600 * self.rental.usd_per_h


@dataclass(order=True)
class Due:
    at: float
    event: RentEvent = field(compare=False)


class World(RuleBasedStateMachine):
    """A coordinator and two clouds. true: seconds that nobody can see."""

    @initialize(
        usd_per_h=st.floats(0.1, 6.0),
        lasts_h=st.floats(0.3, 10.0),
        life_h=st.floats(0.3, 6.0),
        drain_s=st.sampled_from([0.0, 60.0, 3600.0]),
        blind=st.sampled_from(["", "", "", "a", "b"]),
    )
    def begin(
        self, usd_per_h: float, lasts_h: float, life_h: float, drain_s: float = 0.0, blind: str = ""
    ) -> None:
        """blind: a provider whose lists never show anything."""
        self.blind = blind
        budget = Budget(usd_per_h, usd_per_h * lasts_h)  # so that both ends of it are reached
        self.rent_rules = RentRules("run-", budget, life_h * 3600, 300.0, 900.0, 20.0, drain_s)
        self.true, self.boot, self.booted_at, self.unix_off = 1000.0, 0, 0.0, 0.0
        self.rows: dict[Label, Rental] = {}
        self.machines: list[Machine] = []
        self.due: list[Due] = []
        self.need = NeedMeasured(3.0, wanted=True, workers=0)
        self.cut: int | None = None
        self.kept_clock = (0.0, self.moment())
        self.start_process()

    # --- clocks

    def moment(self) -> Moment:
        return Moment(str(self.boot), self.true - self.booted_at, self.true + self.unix_off)

    @property
    def now(self) -> float:
        """The rent clock of the running process."""
        return self.clock_base + (self.moment().since_boot_s - self.process_began)

    def keep_clock(self) -> None:
        self.kept_clock = (self.now, self.moment())

    # --- the coordinator

    def start_process(self) -> None:
        clock, before = self.kept_clock
        horizon = max(
            (row.until for row in self.rows.values() if row.gone_at is None), default=-math.inf
        )
        self.clock_base = rent_time(clock, before, self.moment(), horizon=horizon)
        self.process_began = self.moment().since_boot_s
        self.due = []
        self.renting = Autoscaler(self.rent_rules, TERMS, OFFERS, self.rows.values(), now=self.now)
        self.keep_clock()

    def feed(self, event: RentEvent, rng: random.Random) -> None:
        actions = self.renting.handle(event, now=self.now)
        self.renting.check()
        for action in actions:
            if isinstance(action, Keep):
                self.rows[action.rental.label] = action.rental
        self.keep_clock()
        if self.cut is not None and any(isinstance(action, Start | Stop) for action in actions):
            doing = [action for action in actions if not isinstance(action, Keep)]
            self.perform(doing[: self.cut], rng)
            self.cut = None
            self.start_process()
        else:
            self.perform(actions, rng)

    def perform(self, actions: Iterable[RentAction], rng: random.Random) -> None:
        for action in actions:
            match action:
                case Start(rental):
                    self.started(rental, rng)
                case Stop(rental):
                    self.stopped(rental, rng)
                case List(provider):
                    self.listed(provider, rng)
                case _:
                    pass

    # --- the clouds

    def terms(self, provider: str) -> Terms:
        return next(each for each in TERMS if each.provider == provider)

    def ends_in(self, provider: str, rng: random.Random) -> float:
        """Of a command: a while, or all of its time and a bit."""
        limit = self.terms(provider).command_s
        return limit + rng.random() * KILL_S if rng.random() < 0.2 else rng.random() * limit

    def started(self, rental: Rental, rng: random.Random) -> None:
        takes, made, said = (
            self.ends_in(rental.provider, rng),
            rng.random() < 0.75,
            rng.random() < 0.8,
        )
        if rental.provider == self.blind:  # else nobody could know of anything
            takes, said = min(takes, self.terms(rental.provider).command_s), made
        assert rental.usd_per_h == PRICES[rental.provider, rental.offer]
        if made:
            began = self.true + rng.random() * takes
            by_itself = self.true + rental.life_s + rental.grace_s
            ended = min(
                by_itself, began + rng.expovariate(1 / 7200) if rng.random() < 0.4 else by_itself
            )
            name = "same" if rng.random() < 0.1 else str(len(self.machines))
            self.machines.append(
                Machine(
                    rental, len(self.machines), f"id-{name}", self.true, began, max(began, ended)
                )
            )
        ok = said and takes <= self.terms(rental.provider).command_s
        self.due.append(Due(self.true + takes, StartEnded(rental.label, ok=ok)))

    def stopped(self, rental: Rental, rng: random.Random) -> None:
        takes = self.ends_in(rental.provider, rng)
        for machine in self.machines:
            if machine.rental.label == rental.label and rng.random() < 0.6:
                machine.ended = min(
                    machine.ended, max(machine.began, self.true + rng.random() * takes)
                )
        self.due.append(Due(self.true + takes, StopEnded(rental.label, ok=rng.random() < 0.7)))

    def listed(self, provider: str, rng: random.Random) -> None:
        """As of a moment up to settle_s ago, in any order, some lines twice, some of others, one of nobody.

        A machine may be left out for less than settle_s, and is then in the next list that is read.
        """
        settle_s, takes = self.terms(provider).settle_s, self.ends_in(provider, rng)
        at = self.true - rng.random() * settle_s * (rng.random() < 0.5)
        read = rng.random() < 0.8 and takes <= self.terms(provider).command_s
        if provider == self.blind:
            self.due.append(
                Due(self.true + takes, Listed(provider, self.now, () if read else None))
            )
            return
        lines = [Instance(Label("other-7"), "x"), Instance(Label("run-a-x-9"), "y")][
            : rng.choice([1] * 40 + [0, 2])
        ]
        for machine in self.machines:
            if read and machine.rental.provider == provider and machine.began <= at < machine.ended:
                if machine.shown and self.true >= machine.hidden_until and rng.random() < 0.1:
                    machine.hidden_until, machine.shown = self.true + 0.99 * settle_s, False
                if self.true >= machine.hidden_until:
                    machine.shown = True
                    lines += [Instance(machine.rental.label, machine.id)] * rng.choice([1, 1, 2])
        rng.shuffle(lines)
        self.due.append(
            Due(self.true + takes, Listed(provider, self.now, tuple(lines) if read else None))
        )

    # --- what happens

    @rule(shortfall=st.none() | st.floats(0, 3.0), wanted=st.booleans(), workers=st.integers(0, 3))
    def need_changes(self, shortfall: float | None, wanted: bool, workers: int) -> None:
        self.need = NeedMeasured(
            shortfall, wanted=wanted or (shortfall or 0) > 0.1, workers=workers
        )

    @rule(seconds=st.floats(600, 8000), seed=SEEDS)
    def time_passes(self, seconds: float, seed: int) -> None:
        rng, end = random.Random(seed), self.true + seconds
        while self.true < end:
            self.due.sort()
            if self.due and self.due[0].at <= self.true:
                self.feed(self.due.pop(0).event, rng)
                continue
            step = min(
                end - self.true,
                rng.uniform(5, 60),
                self.due[0].at - self.true if self.due else math.inf,
            )
            self.true += max(step, 1e-3)
            serving = {
                machine.rental.label: rng.choice([0.0, 0.0, 500.0])
                for machine in self.machines
                if machine.began + 100 < self.true < machine.ended and machine.number % 4
            }
            holding = frozenset(label for label, idle_s in serving.items() if not idle_s)
            need = NeedMeasured(
                self.need.shortfall_mu, self.need.wanted, self.need.workers, serving, holding
            )
            self.feed(need, rng)
            self.within_budget()

    @rule(actions=st.integers(0, 3), seconds=st.floats(600, 3000), seed=SEEDS)
    def it_is_killed_in_a_turn(self, actions: int, seconds: float, seed: int) -> None:
        """After the rows were kept, and some of what follows was done."""
        self.cut = actions
        self.time_passes(seconds, seed)

    @rule(off_s=st.floats(0, 20_000), seed=SEEDS)
    def it_is_killed(self, off_s: float, seed: int) -> None:
        self.true += off_s
        self.start_process()
        self.time_passes(1500.0, seed)

    @rule(off_s=st.floats(0, 5000), step_s=st.floats(0, 1e6), back=st.booleans())
    def the_machine_restarts(self, off_s: float, step_s: float, back: bool) -> None:
        self.true += off_s
        self.unix_off += -(step_s + off_s + 61) if back else step_s
        self.boot, self.booted_at = self.boot + 1, self.true
        self.start_process()

    @rule(step_s=st.floats(-1e7, 1e7))
    def the_clock_is_set(self, step_s: float) -> None:
        self.all_clocks_are_read(lambda: setattr(self, "unix_off", self.unix_off + step_s))

    @rule(still_s=st.floats(0, 50_000))
    def the_virtual_machine_stops(self, still_s: float) -> None:
        """And goes on: no clock that cannot be set has noticed."""

        def stop() -> None:
            self.true += still_s
            self.booted_at += still_s

        self.all_clocks_are_read(stop)

    def all_clocks_are_read(self, happens: Callable[[], None]) -> None:
        at, before = self.now, self.moment()
        happens()
        self.clock_base = rent_time(at, before, self.moment(), horizon=self.renting.horizon)
        self.process_began = self.moment().since_boot_s
        self.keep_clock()

    @invariant()
    def within_budget(self) -> None:
        if not hasattr(self, "rent_rules"):
            return
        there = [machine for machine in self.machines if machine.began <= self.true < machine.ended]
        rate = sum(machine.rental.usd_per_h for machine in there)
        assert rate <= self.rent_rules.budget.usd_per_h * (1 + 1e-6)
        billed = sum(machine.bill(self.true) for machine in self.machines)
        if_nobody_came_back = sum(machine.bill(math.inf) for machine in self.machines)
        assert billed <= if_nobody_came_back <= self.rent_rules.budget.usd_total * (1 + 1e-6)
        status = self.renting.status(now=self.now)
        assert billed <= status.spent_usd * (1 + 1e-6) + 1e-6

    def teardown(self) -> None:
        """The clouds get well: with nothing wanted any more, nothing stays."""
        if not hasattr(self, "rent_rules"):
            return
        self.need = NeedMeasured(-100.0, wanted=True, workers=1)
        self.cut = None
        for _ in range(400):
            self.time_passes(200.0, 0)
            if not self.renting.live and not any(
                self.true < machine.ended for machine in self.machines
            ):
                break
        else:
            raise AssertionError(self.renting.status(now=self.now))


TestRenting = World.TestCase
TestRenting.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_the_simulated_world_uses_its_budgets() -> None:
    """Nothing would be shown by budgets that nobody comes near."""
    world = World()
    world.begin(usd_per_h=2.0, lasts_h=3.0, life_h=1.0)
    for seed in range(15):
        world.time_passes(2000.0, seed)
    budget = world.rent_rules.budget
    assert len(world.machines) > 10
    assert world.renting.status(now=world.now).committed_usd > 0.9 * budget.usd_total
    assert sum(machine.bill(world.true) for machine in world.machines) > 0.4 * budget.usd_total

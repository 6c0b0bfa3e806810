"""Rents boxes beside a running coordinator: it feeds the core and performs what the core decides.

    status, once a second --> need --+--> core.renting --> 1. rows are kept, in one transaction
    commands that ended -------------+                     2. commands start, each as a task
                                                           3. the coordinator is told which
                                                              workers will be removed

A box gets a credential of its own before its start command runs. The credential admits one worker until
the box's time is over, and is deleted with the box. If a row cannot be stored, the process ends
before anything is started. Not here: decisions (`core/renting/autoscaler.py`), and how commands run
(`echo2d/providers`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, assert_never, cast

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import PeerId
from echo2d.core.renting.autoscaler import Autoscaler
from echo2d.core.renting.budget import HOUR_S, Label, Rental
from echo2d.core.renting.events import (
    Keep,
    List,
    Listed,
    NeedMeasured,
    RentAction,
    RentEvent,
    RentNote,
    RentRules,
    Retire,
    Start,
    StartEnded,
    Stop,
    StopEnded,
)
from echo2d.core.status.json_form import plain
from echo2d.core.status.schema import (
    BoxStatus,
    ProvisionStatus,
    RentingStatus,
    Status,
    WorkerStatus,
)
from echo2d.errors import OperatorFault, ProviderFault, StoreFault
from echo2d.net.security.auth import write_token_file
from echo2d.net.security.urls import WILDCARDS, coordinator_url
from echo2d.providers.base import BoxOrder, Provider
from echo2d.runtime.renting.clock import RentClock, moment
from echo2d.runtime.renting.setup import (
    make_provider,
    offers_of,
    prefix_of,
    rent_plan,
    rules_of,
    terms_of,
)
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.ledger_thread import LedgerThread
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE, RunDirectory
from echo2d.store.rentals import RentalStore

RENTALS_FILE = "rentals.sqlite"  # in the run directory
# Seconds between two looks at the run's status.
_TICK_S = 1.0
# The need while all boxes are given back: no learner, no workers.
NOBODY = NeedMeasured(None, wanted=False, workers=0)

log = logging.getLogger("echo2d.renting")

PlanRemoval = Callable[[PeerId, str], Awaitable[None]]


class Renter:
    """See the module docstring."""

    def __init__(
        self,
        renting: Autoscaler,
        rules: RentRules,
        store: RentalStore,
        clock: RentClock,
        providers: Mapping[str, Provider],
        *,
        run: RunDirectory,
        access: AccessTable,
        url: str,
    ) -> None:
        self._renting = renting
        self._rules = rules
        self._store = store
        self._clock = clock
        self._providers = providers
        self._access = access
        self._directory = run
        self._url = url
        # It is no longer than the number of commands under way.
        self._ended: asyncio.Queue[RentEvent] = asyncio.Queue()
        self._asked_at: dict[Label, float] = {}
        # The workers of boxes, as of the last look.
        self._workers: Mapping[Label, WorkerStatus] = {}
        self._kept_at = clock.now()

    def status(self) -> RentingStatus:
        now = self._clock.now()
        found = self._renting.status(now=now)
        return replace(found, boxes=tuple(self._add_worker(box, now) for box in found.boxes))

    def _add_worker(self, box: BoxStatus, now: float) -> BoxStatus:
        """The box's status with the facts about its worker added."""
        label = Label(box.label)
        worker = self._workers.get(label)
        if worker is None:
            return box
        serves = worker.alive and worker.serving is not None
        idle_s = max(0.0, now - self._asked_at.get(label, now)) if serves else None
        return replace(box, worker=worker.name, idle_s=idle_s, accepted=worker.accepted)

    async def rent(self, status: Callable[[], Status], plan_removal: PlanRemoval) -> None:
        """Rent until cancelled."""
        await self._run(lambda: self._need(status()), plan_removal, until=lambda: False)

    async def give_all_back(self, within_s: float) -> bool:
        """Give back all boxes, trying for `within_s` seconds. Returns whether nothing is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._run(lambda: NOBODY, _nobody_leaves, until=lambda: self._renting.over)
        return self._renting.over

    async def _run(
        self,
        look: Callable[[], NeedMeasured],
        plan_removal: PlanRemoval,
        *,
        until: Callable[[], bool],
    ) -> None:
        await asyncio.to_thread(self._tidy)
        async with asyncio.TaskGroup() as tasks:
            while not until():
                events: list[RentEvent] = [look()]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        events.append(await self._ended.get())
                while not self._ended.empty():
                    events.append(self._ended.get_nowait())
                await self._turn(events, tasks)
                for peer, why in self._find_leaving():
                    await plan_removal(peer, why)

    async def _turn(self, events: Iterable[RentEvent], tasks: asyncio.TaskGroup) -> None:
        now = self._clock.look(self._renting.horizon)
        # Rows are durable before a command starts, so a box is never paid for without a record.
        actions = [action for event in events for action in self._renting.handle(event, now=now)]
        rows = [action.rental for action in actions if isinstance(action, Keep)]
        # The rent clock is made durable at least every 30 s.
        if rows or now >= self._kept_at + 30.0:
            await asyncio.to_thread(self._store.keep, rows, now, moment())
            self._kept_at = now
        for action in actions:
            self._perform(action, tasks)

    def _perform(self, action: RentAction, tasks: asyncio.TaskGroup) -> None:
        match action:
            case Start(rental, why):
                budget = self._renting.status(now=rental.sent_at)
                log.info(
                    "start label=%s usd_per_h=%g life_s=%.0f "
                    "spent_usd=%.2f set_aside_usd=%.2f why=%s",
                    rental.label, rental.usd_per_h, rental.life_s,
                    budget.spent_usd, budget.set_aside_usd, why,
                )  # fmt: skip
                tasks.create_task(self._start(rental))
            case Stop(rental, ids, why):
                log.info("stop label=%s ids=%s why=%s", rental.label, ",".join(ids), why)
                tasks.create_task(self._stop(rental, ids))
            case List(provider):
                tasks.create_task(self._list(provider, self._clock.now()))
            case Retire(label):
                self._asked_at.pop(label, None)
                tasks.create_task(asyncio.to_thread(self._retire, label))
            case RentNote(kind, text):
                log.info("%s %s", kind, text)
            case Keep():
                pass
            case _:
                assert_never(action)

    # --- commands

    async def _start(self, rental: Rental) -> None:
        reason = await self._try(f"start {rental.label}", self._order(rental))
        await self._ended.put(StartEnded(rental.label, ok=reason is None, reason=reason or ""))

    async def _order(self, rental: Rental) -> None:
        path, secret = await asyncio.to_thread(self._make_token, rental)
        order = BoxOrder(rental.label, rental.offer, self._url, path, rental.life_s)
        try:
            await self._providers[rental.provider].start(order)
        except ProviderFault as fault:
            # The fault will be logged. It quotes the command's output, which may contain the secret.
            raise ProviderFault(str(fault).replace(secret, "(secret)")) from None

    async def _stop(self, rental: Rental, ids: tuple[str, ...]) -> None:
        reason = await self._try(
            f"stop {rental.label}", self._providers[rental.provider].stop(rental.label, ids)
        )
        await self._ended.put(StopEnded(rental.label, ok=reason is None))

    async def _try(self, what: str, doing: Awaitable[None]) -> str | None:
        """Run a command; returns in one line why it failed, and logs that. None: it did not fail."""
        try:
            await doing
        except (ProviderFault, OperatorFault, StoreFault) as fault:
            log.warning("%s failed: %s", what, fault)
            return " ".join(str(fault).split())
        return None

    async def _list(self, provider: str, began_at: float) -> None:
        instances, reason = None, ""
        try:
            instances = await self._providers[provider].list()
        except ProviderFault as fault:
            log.warning("list %s failed: %s", provider, fault)
            reason = " ".join(str(fault).split())
        await self._ended.put(Listed(provider, began_at, instances, reason))

    # --- credentials

    def _make_token(self, rental: Rental) -> tuple[Path, str]:
        """Make the box's token file; returns its path, and the secret in it."""
        expires_at = time.time() + rental.life_s + rental.grace_s
        token = self._access.create(rental.label, "worker", max_workers=1, expires_at=expires_at)
        path = self._directory.token_path(rental.label)
        write_token_file(path, replace(token, url=self._url))
        return path, token.secret

    def _retire(self, label: Label) -> None:
        """Delete the box's credential. If that fails now, it expires by itself, and the next start
        of a coordinator deletes it."""
        try:
            self._access.retire(label)
            self._directory.token_path(label).unlink(missing_ok=True)
        except (StoreFault, OSError) as fault:
            log.warning("retire %s failed: %s", label, fault)

    def _tidy(self) -> None:
        """Delete the credentials that a killed process left for boxes that do not exist."""
        for token in self._access.tokens():
            if token.name.startswith(self._rules.prefix) and token.name not in self._renting.live:
                self._retire(Label(token.name))

    # --- the need

    def _need(self, status: Status) -> NeedMeasured:
        assert status.process is not None
        now, silent_s = self._clock.now(), status.process.learner_silent_s
        self._workers = self._rented_workers(status.workers)
        return NeedMeasured(
            status.provision.shortfall,
            wanted=silent_s is not None and silent_s < self._rules.idle_s,
            workers=sum(map(_works, status.workers)),
            serving=self._serving(now),
            holding=frozenset(label for label, worker in self._workers.items() if _holds(worker)),
            mu={
                label: worker.mu for label, worker in self._workers.items() if worker.mu is not None
            },
            margin_mu=margin_of(status.provision),
            gb_per_h=gb_per_h(status),
        )

    def _rented_workers(self, workers: Iterable[WorkerStatus]) -> dict[Label, WorkerStatus]:
        """The workers that joined with a box's credential, whatever name they gave."""
        named = {
            Label(self._access.token_of(PeerId(worker.id)) or ""): worker for worker in workers
        }
        return {label: named[label] for label in self._renting.live if label in named}

    def _find_leaving(self) -> list[tuple[PeerId, str]]:
        """The workers whose box will be removed and that are not leaving yet, each with the reason."""
        leaving = self._renting.leaving
        return [
            (PeerId(worker.id), leaving[label])
            for label, worker in self._workers.items()
            if label in leaving and worker.state != "gone" and not worker.leaving
        ]

    def _serving(self, now: float) -> dict[Label, float]:
        """The boxes whose worker serves, with the seconds since it last held a lease, or since it joined."""
        serving = dict[Label, float]()
        for label, worker in self._workers.items():
            if worker.alive and worker.serving is not None:
                if worker.leased or label not in self._asked_at:
                    self._asked_at[label] = now
                serving[label] = now - self._asked_at[label]
        return serving


async def _nobody_leaves(peer: PeerId, why: str) -> None:
    raise AssertionError(f"{peer} should leave ({why}), but no coordinator runs to tell it so")


# --- making a renter


@asynccontextmanager
async def open_renter(
    config: CoordinatorConfig,
    run: RunDirectory,
    access: AccessTable,
    *,
    url: str = "",
    closing: bool = False,
) -> AsyncIterator[Renter]:
    """Open the store and the clock, and make the renter.

    url: the URL at which this host reaches the coordinator. closing: only give boxes back.
    OperatorFault: the configuration does not allow renting.
    """
    prefix = prefix_of(run.run_id)
    rules = rules_of(config, prefix, closing=closing)
    store = await asyncio.to_thread(RentalStore, run.path / RENTALS_FILE)
    try:
        kept = await asyncio.to_thread(store.rentals)
        clock = await asyncio.to_thread(lambda: RentClock(store.clock(), kept))
        # The rent clock counts from here, even if the process ends before it is stored again.
        await asyncio.to_thread(store.keep, (), clock.now(), moment())
        offers = [offer for provider in config.providers for offer in offers_of(provider)]
        renting = Autoscaler(
            rules, list(map(terms_of, config.providers)), offers, kept, now=clock.now()
        )
        providers = {each.table.name: make_provider(each, prefix) for each in config.providers}
        url_of_boxes = "" if closing else _url_of_boxes(config, url)
        yield Renter(
            renting, rules, store, clock, providers, run=run, access=access, url=url_of_boxes
        )
    finally:
        await asyncio.to_thread(store.close)


def _url_of_boxes(config: CoordinatorConfig, url: str) -> str:
    if not config.rent.url and config.coordinator.host in WILDCARDS:
        raise OperatorFault(
            "rent.url: expected the URL at which rented boxes reach this coordinator, "
            "https://HOST:PORT; found none"
        )
    return coordinator_url(config.rent.url or url)


# --- the commands


def print_rent_plan(config: CoordinatorConfig, say: Callable[[str], None]) -> None:
    """Print what `echo2d coordinate --rent` will do. OperatorFault: the configuration does not allow renting."""
    rules_of(config, "")
    run = RunDirectory(config.run.run_dir)
    rentals, now = _kept(run.path)
    for line in rent_plan(config, prefix_of(run.run_id), rentals, now):
        say(line)


def _kept(run_dir: Path) -> tuple[tuple[Rental, ...], float]:
    store = RentalStore(run_dir / RENTALS_FILE)
    try:
        rentals = store.rentals()
        return rentals, RentClock(store.clock(), rentals).now()
    finally:
        store.close()


async def give_back(config: CoordinatorConfig, within_s: float) -> Mapping[str, Any]:
    """Stop all boxes that this run has rented, while no coordinator runs.

    Returns what is left, for JSON. OperatorFault: a coordinator runs.
    """
    run = await asyncio.to_thread(RunDirectory, config.run.run_dir)
    ledger = LedgerThread(run.path / LEDGER_FILE)
    try:
        # Opening the ledger takes its lock, which fails while a coordinator runs.
        await ledger.open()
        access = await asyncio.to_thread(AccessTable, run)
        async with open_renter(config, run, access, closing=True) as renter:
            await renter.give_all_back(within_s)
            return cast("Mapping[str, Any]", plain(renter.status()))
    finally:
        await ledger.close()


def rented(config: CoordinatorConfig) -> Mapping[str, Any]:
    """The facts in the run's own record of rentals, for JSON; the providers are not asked. A running
    coordinator also knows the boxes' workers (`with_workers`).
    """
    rentals, now = (
        _kept(config.run.run_dir) if (config.run.run_dir / RENTALS_FILE).exists() else ((), 0.0)
    )
    live = [rental for rental in rentals if rental.gone_at is None]
    costs = {rental.label: rental.cost_usd(min(now, rental.until)) for rental in rentals}
    return {
        "spent_usd": sum(costs.values()),
        "usd_total_max": config.rent.usd_total,
        "usd_per_h": sum(rental.rate for rental in live),
        "boxes": [
            {"label": rental.label, "provider": rental.provider, "offer": rental.offer,
             "usd_per_h": rental.rate, "age_s": now - rental.sent_at,
             "life_left_s": max(0.0, rental.sent_at + rental.life_s - now),
             "cost_usd": costs[rental.label]} for rental in live
        ],
    }  # fmt: skip


def with_workers(facts: Mapping[str, Any], status: Status) -> Mapping[str, Any]:
    """The facts, with state, worker and idle time of each box that a running coordinator knows."""
    renting = None if status.process is None else status.process.renting
    known = {} if renting is None else {box.label: plain(box) for box in renting.boxes}
    return {**facts, "boxes": [{**box, **known.get(box["label"], {})} for box in facts["boxes"]]}


def rented_lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts of `rented` or `give_back` as lines for a person."""
    boxes, most = facts["boxes"], facts["usd_total_max"]
    of = "" if most is None else f" of {most:g}"
    rows = [
        f"  {box['label']}  {box['usd_per_h']:g} usd/h for {box['age_s'] / 60:.0f} min: "
        f"{box['cost_usd']:.2f} usd; at most {box['life_left_s'] / 60:.0f} min more{_worker_words(box)}"
        for box in boxes
    ]
    there = (
        f"{len(boxes)} boxes may be there, {facts['usd_per_h']:g} usd/h"
        if boxes
        else "nothing is there"
    )
    return [f"spent {facts['spent_usd']:.2f}{of} usd; {there}", *rows]


def _worker_words(box: Mapping[str, Any]) -> str:
    """What a running coordinator adds about a box. Empty: no coordinator runs."""
    if "state" not in box:
        return ""
    if not box["worker"]:
        return f"; {box['state']}, no worker yet"
    idle = "" if box["idle_s"] is None else f", idle for {box['idle_s']:.0f} s"
    return f"; {box['state']}, worker {box['worker']}, {box['accepted']} accepted{idle}"


def boxes_left_alone(config: CoordinatorConfig) -> str:
    """The boxes that an earlier coordinator of the run may have left; empty if there are none."""
    facts = rented(config)
    return f"{len(facts['boxes'])} boxes, {facts['usd_per_h']:g} usd/h" if facts["boxes"] else ""


# --- the need for boxes, read from a run's status
#
# These functions read a Status and decide nothing.


def _works(worker: WorkerStatus) -> bool:
    """Whether the worker generates, or would generate if it got leases."""
    return (
        worker.alive and worker.serving is not None and not worker.leaving and not worker.cordoned
    )


def _holds(worker: WorkerStatus) -> bool:
    """Whether the worker has work to finish, or may get some. `running` also counts gateway calls."""
    return _works(worker) or bool(worker.leased) or (worker.alive and worker.running > 0)


def margin_of(provision: ProvisionStatus) -> float:
    """The part of the target, in trajectories/s, that the factor gamma adds as a margin for noise.

    The target is the rate of all workers plus the shortfall, so if the shortfall is capped
    (`CapacityPlanner.shortfall`), the margin is smaller, too.
    """
    if provision.shortfall is None:
        return 0.0
    return (provision.shortfall + provision.mu_available) * (1 - 1 / provision.gamma)


def gb_per_h(status: Status) -> float:
    """How many GB of versions each worker receives per hour; 0 until steps and versions are known."""
    sizes = [each.wire_bytes for each in status.version_bytes.values()]
    steps = status.t_train_s
    if not sizes or not steps or median(steps) <= 0:
        return 0.0
    period_s = status.publish_every * median(steps)
    return median(sizes) / 1e9 * HOUR_S / period_s

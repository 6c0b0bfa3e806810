"""Turns the configuration of renting into rules, terms, offers, prices and providers.

`rent_plan` says what that means, before anything is rented.
"""

from collections.abc import Iterable

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.config.renting import OfferTable, ProviderConfig, ProviderTable
from echo2d.core.renting.budget import HOUR_S, Budget, Rental, RentOffer, Terms
from echo2d.core.renting.events import RentRules
from echo2d.core.rules.prices import NamedPrice, Price, PriceTable
from echo2d.errors import OperatorFault
from echo2d.process_environment import command_environment
from echo2d.providers.base import Provider, ProviderOptions
from echo2d.registry import PROVIDERS, load, one_of

# Characters of the run's id in a label. 32 bits are enough to distinguish the runs of one account.
PREFIX_CHARS = 8


def prefix_of(run_id: str) -> str:
    """The prefix of the labels of all boxes of a run."""
    return f"echo2d-{run_id[:PREFIX_CHARS]}-"


def rules_of(config: CoordinatorConfig, prefix: str, *, closing: bool = False) -> RentRules:
    """The rules that the autoscaler enforces. OperatorFault: there is no budget, or no provider that rents."""
    rent = config.rent
    if rent.usd_per_h is None or rent.usd_total is None:
        raise OperatorFault(
            "--rent needs a budget: set rent.usd_per_h and rent.usd_total; nothing was rented"
        )
    if not any(provider.rents for provider in config.providers):
        kinds = one_of({name: kind for name, kind in PROVIDERS.items() if kind.rents})
        raise OperatorFault(
            f"--rent needs a [[provider]] of kind {kinds} (docs/guide/renting.md); nothing was rented"
        )
    budget = Budget(rent.usd_per_h, rent.usd_total)
    times = (rent.idle_s, rent.join_s, rent.patience_s, rent.drain_s)
    return RentRules(prefix, budget, rent.life_h * HOUR_S, *times, closing=closing)


def terms_of(provider: ProviderConfig) -> Terms:
    """The times and the billing of a provider."""
    table = provider.table
    return Terms(
        table.name,
        table.timeout_s,
        table.settle_s,
        table.list_every_s,
        table.billed_by_s,
        table.grace_s,
    )


def offers_of(provider: ProviderConfig) -> list[RentOffer]:
    """The boxes that a provider can rent; none if it does not rent."""
    return [_offer(provider, each) for each in provider.offers if provider.rents]


def _offer(provider: ProviderConfig, each: OfferTable) -> RentOffer:
    usd_per_gb = each.usd_per_gb_down + each.usd_per_gb_up
    return RentOffer(
        provider.table.name,
        each.name,
        each.usd_per_h,
        each.trajectories_per_h,
        each.max,
        each.availability,
        usd_per_gb,
    )


def prices_of(config: CoordinatorConfig, run_id: str) -> list[NamedPrice]:
    """Prices by pattern of worker names: those of [[price]], then those of offers.

    The worker of a rented box is named after the box's label. If a provider does not rent, the names of
    its offers are the patterns.
    """
    rows: list[tuple[str, PriceTable | OfferTable]] = [(row.workers, row) for row in config.prices]
    for provider in config.providers:
        prefix = f"{prefix_of(run_id)}{provider.table.name}-"
        rows += [
            (f"{prefix}{each.name}-*" if provider.rents else each.name, each)
            for each in provider.offers
        ]
    return [NamedPrice(names, _price(each)) for names, each in rows]


def _price(each: PriceTable | OfferTable) -> Price:
    return Price(
        each.usd_per_h,
        each.usd_per_gb_down,
        each.usd_per_gb_up,
        each.trajectories_per_h or None,
    )


def make_provider(config: ProviderConfig, prefix: str) -> Provider:
    """Load and make the provider of the configured kind."""
    table = config.table
    options = ProviderOptions(
        start=table.start,
        stop=table.stop,
        list=table.list,
        timeout_s=table.timeout_s,
        options=table.options,
        prefix=prefix,
        environment=command_environment(),
    )
    provider: Provider = load(PROVIDERS[table.kind].factory)(options)
    return provider


def rent_plan(
    config: CoordinatorConfig, prefix: str, kept: Iterable[Rental], now: float
) -> list[str]:
    """Lines that say what renting may cost and which commands it runs.

    OperatorFault: as in `rules_of`.
    """
    rules, rentals = rules_of(config, prefix), list(kept)
    budget, live = rules.budget, [rental for rental in rentals if rental.gone_at is None]
    usd_per_h = sum(rental.rate for rental in live)
    spent_usd = sum(rental.cost_usd(min(now, rental.until)) for rental in rentals)
    committed_usd = sum(rental.cost_usd(rental.until) for rental in rentals)
    aside_usd = committed_usd - spent_usd
    left_h = max(0.0, budget.usd_total - committed_usd) / budget.usd_per_h
    offers = sorted(
        (offer for provider in config.providers for offer in offers_of(provider)),
        key=lambda offer: offer.usd_per_h / (offer.trajectories_per_h * offer.availability),
    )
    providers = [_how(provider.table) for provider in config.providers if provider.rents]
    first = (
        "  nothing is started before a learner takes data and workers are too few; "
        "then, cheapest data first:"
    )
    lasts = f"{_duration(left_h)} at {budget.usd_per_h:g} usd/h"
    return [
        f"renting: at most {budget.usd_per_h:g} usd/h and {budget.usd_total:g} usd in all",
        f"  spent {spent_usd:.2f}, set aside {aside_usd:.2f}; the rest lasts {lasts}",
        f"  there now, by this run's book: {len(live)} boxes, {usd_per_h:g} usd/h",
        f"  labels {prefix}...; a box lives {_duration(config.rent.life_h)} at most",
        f"  it goes after {rules.idle_s:g} s without work, or {rules.join_s:g} s without serving",
        f"  then its worker has {rules.drain_s:g} s to finish what it holds",
        first,
        *_strangers(config, live),
        *map(_line, offers),
        *providers,
    ]


def _how(table: ProviderTable) -> str:
    """A line that says how this provider rents."""
    if not PROVIDERS[table.kind].commands:
        return f"  {table.name}: by kind {table.kind!r}, options {dict(table.options)}"
    return (
        f"  {table.name}: start {list(table.start)} stop {list(table.stop)} list {list(table.list)}"
    )


def _duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"


def _strangers(config: CoordinatorConfig, live: Iterable[Rental]) -> list[str]:
    """Warnings about boxes of providers that are no longer configured."""
    names = {provider.table.name for provider in config.providers if provider.rents}
    gone = sorted({rental.provider for rental in live} - names)
    return [
        f"  boxes of {name} may be there, but it is no longer a [[provider]]: stop them yourself"
        for name in gone
    ]


def _line(offer: RentOffer) -> str:
    made = offer.trajectories_per_h * offer.availability
    return (
        f"  {offer.provider}/{offer.name}: up to {offer.count_max} at {offer.usd_per_h:g} usd/h, "
        f"{made:g} trajectories/h expected: {1000 * offer.usd_per_h / made:.3f} usd per 1000"
    )

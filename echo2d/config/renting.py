"""The configuration of renting: the [rent] table, and a [[provider]] for each source of boxes.

[[provider]]
name = "aws"
kind = "exec"
start = ["/etc/echo2d/aws.sh", "start"]
...
[[provider.offer]]
name = "g6"
usd_per_h = 0.8
trajectories_per_h = 300
max = 8
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from echo2d.config.tables import print_tables, read_table, table_of
from echo2d.core.rules.prices import USD_MAX, PriceTable
from echo2d.core.rules.table import Table, key, same_key
from echo2d.errors import OperatorFault
from echo2d.registry import PROVIDERS

_SECONDS_MAX = 86400.0
# More trajectories per hour than this are a typing mistake.
_RATE_MAX = 1e9
PROVIDERS_MAX = 16
OFFERS_MAX = 64  # offers of all providers together
# A provider's name becomes part of each box's label.
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
PATTERN = re.compile(r"[A-Za-z0-9._*?-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RentTable(Table):
    TABLE: ClassVar[str] = "rent"

    usd_per_h: float | None = key(
        "most that all rented boxes together may cost per hour, in usd; --rent needs it",
        None,
        above=0.0,
        high=USD_MAX,
    )
    usd_total: float | None = key(
        "most that renting may cost in the whole run, in usd; --rent needs it",
        None,
        above=0.0,
        high=USD_MAX,
    )
    url: str = key(
        "URL at which rented boxes reach the coordinator, https://HOST:PORT; empty: the URL that"
        " this host uses",
        "",
    )
    life_h: float = key(
        "hours that a box may live; it is told to end by itself after that",
        24.0,
        above=0.0,
        high=24.0 * 90,
    )
    idle_s: float = key(
        "seconds without work after which a box is given back", 900.0, above=0.0, high=_SECONDS_MAX
    )
    join_s: float = key(
        "seconds within which a new box, or a box that stopped serving, must serve a version",
        1800.0,
        above=0.0,
        high=_SECONDS_MAX,
    )
    # At most an hour: a trajectory takes less, and a draining box costs money.
    drain_s: float = key(
        "seconds that a worker has to finish its leases before its box is given back",
        120.0,
        low=0.0,
        high=3600.0,
    )
    patience_s: float = key(
        "a box is started only if there were too few workers for this many seconds",
        60.0,
        low=0.0,
        high=_SECONDS_MAX,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderTable(Table):
    TABLE: ClassVar[str] = "provider"

    name: str = key("name in lower-case letters and digits; part of each box's label")
    kind: str = key(
        "; ".join(f"{name}: {kind.meaning}" for name, kind in PROVIDERS.items()), choices=PROVIDERS
    )
    start: tuple[str, ...] = key(
        "command that starts the box ECHO2D_LABEL (docs/guide/renting.md)", ()
    )
    stop: tuple[str, ...] = key("command that stops the box ECHO2D_LABEL", ())
    list: tuple[str, ...] = key(
        'command that prints {"label": ..., "id": ...} for every box, one per line', ()
    )
    options: dict[str, Any] = key(
        "settings that only this kind has; exec and static take none", dict
    )
    timeout_s: float = key("seconds that a command may take", 300.0, above=0.0, high=3600.0)
    settle_s: float = key(
        "seconds until lists show what a command did", 120.0, low=0.0, high=3600.0
    )
    list_every_s: float = key("seconds between two lists", 60.0, above=0.0, high=3600.0)
    billed_by_s: float = key(
        "billing period in seconds: a period that has begun is paid in full",
        60.0,
        above=0.0,
        high=_SECONDS_MAX,
    )
    grace_s: float = key(
        "most seconds billed in addition to a box's life, while it starts and stops",
        900.0,
        low=0.0,
        high=_SECONDS_MAX,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTable(Table):
    """A kind of box that a provider offers.

    If the provider does not rent boxes, the offer gives the price of the workers whose names match.
    """

    TABLE: ClassVar[str] = "provider.offer"

    name: str = key("lower-case letters and digits; with static, a pattern of worker names: lab-*")
    usd_per_h: float = key(
        "usd per hour of one box, with its disk and address", low=0.0, high=USD_MAX
    )
    trajectories_per_h: float = key(
        "trajectories per hour expected of one box until it is measured; with static, 0 means:"
        " as many as the other workers make",
        low=0.0,
        high=_RATE_MAX,
    )
    # At most 512 boxes of one offer exist at a time.
    max: int = key("most boxes at a time", 1, low=1, high=512)
    availability: float = key(
        "share of the time in which a box is available", 1.0, above=0.0, high=1.0
    )
    usd_per_gb_down: float = same_key(PriceTable, "usd_per_gb_down")
    usd_per_gb_up: float = same_key(PriceTable, "usd_per_gb_up")


@dataclass(frozen=True, slots=True)
class ProviderConfig:
    """One [[provider]] with its [[provider.offer]]s."""

    table: ProviderTable
    offers: tuple[OfferTable, ...]

    @property
    def rents(self) -> bool:
        """Whether the provider starts boxes that cost money. Otherwise boxes join by themselves."""
        return PROVIDERS[self.table.kind].rents

    def __post_init__(self) -> None:
        table, kind = self.table, PROVIDERS[self.table.kind]
        commands = {"start": table.start, "stop": table.stop, "list": table.list}
        for name, command in commands.items():
            if kind.commands != bool(command):
                expected = "a command" if kind.commands else f"nothing for kind {table.kind!r}"
                raise OperatorFault(f"provider.{name}: expected {expected}; found {list(command)}")
        if table.options and not kind.options:
            raise OperatorFault(
                f"provider.options: kind {table.kind!r} has no settings of its own; "
                f"found {', '.join(table.options)}"
            )
        _require_name("provider.name", table.name, _NAME)
        names = [offer.name for offer in self.offers]
        for offer in self.offers:
            _require_name("provider.offer.name", offer.name, _NAME if self.rents else PATTERN)
            if self.rents and not (offer.usd_per_h > 0 and offer.trajectories_per_h > 0):
                raise OperatorFault(
                    "provider.offer: expected usd_per_h and trajectories_per_h above 0 of "
                    f"{table.name}/{offer.name}"
                )
        if not names or len(set(names)) < len(names):
            raise OperatorFault(
                f"provider.offer: expected at least one offer, with different names; found {names}"
            )


def _require_name(where: str, name: str, rule: re.Pattern[str]) -> None:
    if rule.fullmatch(name) is None:
        raise OperatorFault(f"{where}: expected {rule.pattern}; found {name!r}")


def read_providers(document: Mapping[str, Any]) -> tuple[ProviderConfig, ...]:
    """All providers of a parsed file. OperatorFault: a key, name or number is not allowed."""
    providers = tuple(map(_provider, _rows(document, "provider")))
    names = [provider.table.name for provider in providers]
    if len(set(names)) < len(names):
        raise OperatorFault(
            f"provider.name: expected a different name for each provider; found {names}"
        )
    if (
        len(providers) > PROVIDERS_MAX
        or sum(len(provider.offers) for provider in providers) > OFFERS_MAX
    ):
        raise OperatorFault(
            f"[[provider]]: expected at most {PROVIDERS_MAX} providers, "
            f"with {OFFERS_MAX} offers in all; "
            f"found {len(providers)} with {sum(len(each.offers) for each in providers)}"
        )
    return providers


def _provider(row: Mapping[str, Any]) -> ProviderConfig:
    keys = {name: value for name, value in row.items() if name != "offer"}
    return ProviderConfig(
        read_table(ProviderTable, keys),
        tuple(read_table(OfferTable, each) for each in _rows(row, "offer")),
    )


def _rows(document: Mapping[str, Any], name: str) -> "list[Mapping[str, Any]]":
    rows = document.get(name, [])
    if not isinstance(rows, list):
        raise OperatorFault(
            f"[[{name}]]: expected tables with double brackets; found {type(rows).__name__}"
        )
    return [table_of({name: row}, name) for row in rows]


def print_providers() -> str:
    """The keys of [[provider]] and [[provider.offer]], commented out.

    As live tables they would declare a provider.
    """
    lines = print_tables(ProviderTable, OfferTable).splitlines()
    return "".join(f"# {_doubled(line)}\n" if line else "\n" for line in lines)


def _doubled(line: str) -> str:
    return f"[{line}]" if line.startswith("[") else line

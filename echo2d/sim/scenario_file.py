"""Scenarios from TOML files.

    bytes = "100MiB"
    [[peers]]                  # the first one is the seed; then `count` alike at a time
    uplink = "320mbit"
    downlink = "1gbit"         # "100mbit" each if left out
    rtt = "20ms"               # to a peer alike
    [[peers]]
    count = 2
    uplink = "40mbit"
    loss = 0.001               # also reachable = false, joins_at = "2s"
    [[faults]]
    peer = 1
    at = "1s"                  # also back = "5s", silent = true

Besides: shape, chains, rng_seed, as in `Scenario`.
"""

import tomllib
from pathlib import Path
from typing import Any

from echo2d.errors import OperatorFault
from echo2d.quantities import parse_bytes, parse_rate, parse_seconds
from echo2d.sim.scenario import Fault, PeerSpec, Scenario

TRIPS = 4  # of a round trip: there and back, each through two access links


def load_scenario(path: Path) -> Scenario:
    """OperatorFault: it cannot be read, or says something that no scenario has."""
    try:
        document = tomllib.loads(path.read_text())
        return _scenario(document)
    except (OSError, tomllib.TOMLDecodeError, OperatorFault) as error:
        raise OperatorFault(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, AssertionError, ValueError) as error:
        raise OperatorFault(f"{path} is no scenario: {error!r}") from error


def scenario_of(
    *,
    peers: int,
    uplink: str,
    uplinks: str | None,
    downlink: str | None,
    rtt: str,
    loss: float,
    size: str,
    shape: Any,
    rng_seed: int,
) -> Scenario:
    """From flags. uplinks: of the seed and each peer, in Mbit/s, instead of `peers` and `uplink`.

    downlink: of everybody; the fastest uplink if None. OperatorFault: a flag that cannot be meant so.
    """
    if uplinks is None:
        rates = [parse_rate(uplink)] * (peers + 1)
    else:
        rates = [parse_rate(f"{one}mbit") for one in uplinks.split(",")]
    down = max(rates) if downlink is None else parse_rate(downlink)
    latency_s = parse_seconds(rtt) / TRIPS
    try:
        specs = tuple(PeerSpec(rate, down, latency_s, loss) for rate in rates)
        return Scenario(specs, parse_bytes(size), shape=shape, rng_seed=rng_seed)
    except AssertionError as error:
        raise OperatorFault("expected a seed and a peer at least, rates above 0, and a loss below 1") from error


def _scenario(document: dict[str, Any]) -> Scenario:
    peers = [spec for table in document.pop("peers") for spec in _peers(table)]
    faults = [_fault(table) for table in document.pop("faults", [])]
    return Scenario(tuple(peers), parse_bytes(document.pop("bytes")), faults=tuple(faults), **document)


def _peers(table: dict[str, Any]) -> list[PeerSpec]:
    count = table.pop("count", 1)
    values: dict[str, Any] = {key: parse_rate(table.pop(key)) for key in ("uplink", "downlink") if key in table}
    if "rtt" in table:
        values["latency_s"] = parse_seconds(table.pop("rtt")) / TRIPS
    if "joins_at" in table:
        values["joins_at_s"] = parse_seconds(table.pop("joins_at"))
    return [PeerSpec(**values, **table)] * count


def _fault(table: dict[str, Any]) -> Fault:
    back = table.pop("back", None)
    return Fault(
        peer=table.pop("peer"),
        at_s=parse_seconds(table.pop("at")),
        back_s=None if back is None else parse_seconds(back),
        **table,
    )

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
    [[peers]]
    count = 50
    uplink = ["20mbit", "500mbit"]  # drawn for each, log-uniform, by rng_seed; so is rtt
    downlink = "300mbit"       # where the uplink is drawn: at least, and twice the uplink
    [[faults]]
    peer = 1
    at = "1s"                  # also back = "5s", silent = true

Besides: shape, chains, rng_seed, churn, frame_bytes (else as a run would choose), limit, within_s, as in `Scenario`.
"""

import math
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echo2d.core.weights.form import frame_bytes_for
from echo2d.errors import OperatorFault
from echo2d.plan.kernel.scenario import PeerCrash, PeerSpec, Scenario
from echo2d.quantities import parse_bytes, parse_rate, parse_seconds
from echo2d.registry import SHAPES, one_of

TRIPS = 4  # of a round trip: there and back, each through two access links


def load_scenario(path: Path, *, peers: int | None = None, **instead: Any) -> Scenario:
    """OperatorFault: it cannot be read, or says something that no scenario has.

    instead: of what the file says, unless None. peers: all but those before the last table of them.
    """
    try:
        document = tomllib.loads(path.read_text())
        document.update({key: value for key, value in instead.items() if value is not None})
        if peers is not None:
            document["peers"][-1]["count"] = peers - sum(
                table.get("count", 1) for table in document["peers"][1:-1]
            )
        return _scenario(document)
    except (OSError, tomllib.TOMLDecodeError, OperatorFault) as error:
        raise OperatorFault(f"{path}: {error}") from error
    except KeyError as error:
        raise OperatorFault(
            f"{path} is no scenario: it has no {error.args[0]!r} (scenarios/ has examples)"
        ) from error
    except (TypeError, AttributeError, AssertionError, ValueError) as error:
        raise OperatorFault(f"{path} is no scenario: {error!r}") from error


def _scenario(document: dict[str, Any]) -> Scenario:
    chance = random.Random(document.get("rng_seed", 0))
    peers = [spec for table in document.pop("peers") for spec in _peers(table, chance)]
    faults = [_fault(table) for table in document.pop("faults", [])]
    wire_bytes = parse_bytes(document.pop("bytes"))
    frame_bytes = parse_bytes(document.pop("frame_bytes", frame_bytes_for(wire_bytes)))
    if document.get("shape", "auto") not in SHAPES:
        raise OperatorFault(f"shape: expected {one_of(SHAPES)}; found {document['shape']!r}")
    if "limit" in document:
        document["limit_s"] = parse_seconds(document.pop("limit"))
    return Scenario(tuple(peers), wire_bytes, frame_bytes, faults=tuple(faults), **document)


def _peers(table: dict[str, Any], chance: random.Random) -> list[PeerSpec]:
    count = table.pop("count", 1)
    return [_peer(dict(table), chance) for _ in range(count)]


def _peer(table: dict[str, Any], chance: random.Random) -> PeerSpec:
    drawn = isinstance(table.get("uplink"), list)
    values: dict[str, Any] = {
        key: _drawn(table.pop(key), parse_rate, chance)
        for key in ("uplink", "downlink")
        if key in table
    }
    if drawn:
        # A peer whose uplink is drawn has a downlink twice as wide.
        values["downlink"] = max(values.get("downlink", 0.0), 2.0 * values["uplink"])
    if "rtt" in table:
        values["latency_s"] = _drawn(table.pop("rtt"), parse_seconds, chance) / TRIPS
    if "joins_at" in table:
        values["joins_at_s"] = parse_seconds(table.pop("joins_at"))
    return PeerSpec(**values, **table)


def _drawn(given: object, parse: Callable[[object], float], chance: random.Random) -> float:
    """A quantity, or one drawn log-uniformly between two."""
    if not isinstance(given, list):
        return parse(given)
    low, high = map(parse, given)
    return math.exp(chance.uniform(math.log(low), math.log(high)))


def _fault(table: dict[str, Any]) -> PeerCrash:
    back = table.pop("back", None)
    return PeerCrash(
        peer=table.pop("peer"),
        at_s=parse_seconds(table.pop("at")),
        back_s=None if back is None else parse_seconds(back),
        **table,
    )

"""Scenarios from TOML files.

    bytes = "100MiB"
    [[peers]]                  # the first peer is the seed; each table makes `count` equal peers
    uplink = "320mbit"
    downlink = "1gbit"         # the default of both is "100mbit"
    rtt = "20ms"               # to a peer with the same link
    [[peers]]
    count = 2
    uplink = "40mbit"
    loss = 0.001               # further keys: reachable = false, joins_at = "2s"
    [[peers]]
    count = 50
    uplink = ["20mbit", "500mbit"]  # drawn for each peer, log-uniform, by rng_seed; rtt may be a range, too
    downlink = "300mbit"       # if the uplink is drawn: the larger of this and twice the uplink
    [[faults]]
    peer = 1
    at = "1s"                  # further keys: back = "5s", silent = true

More keys: shape, chains, rng_seed, churn, frame_bytes (default: as in a run), limit, within_s, as in `Scenario`.
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

TRIPS = 4  # access links in a round trip: two on the way there, two on the way back


def load_scenario(path: Path, *, peers: int | None = None, **instead: Any) -> Scenario:
    """Read a scenario. OperatorFault: the file cannot be read, or has a key or value that no scenario has.

    instead: keys that override those of the file; None leaves the file's value. peers: the number of peers besides the
    seed; the count of the last table of peers is changed to reach it.
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
        # A peer whose uplink is drawn has a downlink of at least twice that uplink.
        values["downlink"] = max(values.get("downlink", 0.0), 2.0 * values["uplink"])
    if "rtt" in table:
        values["latency_s"] = _drawn(table.pop("rtt"), parse_seconds, chance) / TRIPS
    if "joins_at" in table:
        values["joins_at_s"] = parse_seconds(table.pop("joins_at"))
    return PeerSpec(**values, **table)


def _drawn(given: object, parse: Callable[[object], float], chance: random.Random) -> float:
    """A quantity; a list of two means one drawn log-uniformly between them."""
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

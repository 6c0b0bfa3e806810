"""The scenario that the flags of `echo2d bench broadcast` describe."""

from typing import Any

from echo2d.errors import OperatorFault
from echo2d.plan.kernel.scenario import PeerSpec, Scenario
from echo2d.plan.kernel.scenario_file import TRIPS
from echo2d.quantities import parse_bytes, parse_rate, parse_seconds


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
    """The scenario of these flags. uplinks: of the seed and each peer, in Mbit/s, instead of `peers` and `uplink`.

    downlink: of every peer; None: the fastest uplink. OperatorFault: a flag has no valid value.
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
        raise OperatorFault(
            "expected a seed and a peer at least, rates above 0, and a loss below 1"
        ) from error

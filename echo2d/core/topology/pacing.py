"""Divide a sender's uplink among its links: as planned, but the part of idle links goes to those
that send.

A plan gives each link the part of the uplink that its share of the form needs. Near the end of a
version, after a repair, or with a closed window, some links have nothing to send, and their part
would be lost.
"""

from collections.abc import Collection, Mapping

from echo2d.core.base.ids import PeerId


def share_out(planned: Mapping[PeerId, float], sending: Collection[PeerId]) -> dict[PeerId, float]:
    """Return bytes/s for each link. sending: the planned links that have something to send now."""
    used = sum(planned[peer] for peer in sending)
    times = sum(planned.values()) / used if used else 1.0
    return {peer: pace * times if peer in sending else pace for peer, pace in planned.items()}

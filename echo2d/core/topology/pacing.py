"""How a sender's pace is divided among its links: as planned while all send, else among those that do.

A plan gives every link the part of the uplink that its share of the form needs. Near the end of a version, after a
repair, or below a window that is closed, some links have nothing to send, and what was theirs would be lost.
"""

from collections.abc import Collection, Mapping

from echo2d.core.base.ids import PeerId


def share_out(planned: Mapping[PeerId, float], sending: Collection[PeerId]) -> dict[PeerId, float]:
    """Bytes/s of each link. sending: those of the planned ones that have something to send just now."""
    used = sum(planned[peer] for peer in sending)
    times = sum(planned.values()) / used if used else 1.0
    return {peer: pace * times if peer in sending else pace for peer, pace in planned.items()}

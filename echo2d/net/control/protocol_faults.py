"""Counts the messages by which each peer broke the protocol, and refuses a peer that does it again
and again.

    PROTOCOL_FAULTS_MAX faults within WINDOW_S --> refused for REFUSED_S, then as if nothing had been

A fault is a message that cannot be decoded or is not allowed now, from a peer that has proved its
key. So nobody can have another peer refused. Peers count by key: many may share one address.
"""

from collections import deque
from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId

PROTOCOL_FAULTS_MAX = 3
WINDOW_S = 600.0
REFUSED_S = 600.0
_PEERS_MAX = 10_000  # as many as a run enrols


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """A peer that is refused now, and for how many seconds more."""

    peer: PeerId
    refused_s: float


class ProtocolFaults:
    """See the module docstring. `now` is monotonic seconds. total: faults of all peers so far."""

    def __init__(self) -> None:
        self.total = 0
        self._at: dict[PeerId, deque[float]] = {}  # the newest faults of each peer
        self._until: dict[PeerId, float] = {}

    def count(self, peer: PeerId, now: float) -> None:
        self.total += 1
        at = self._at.pop(peer, deque(maxlen=PROTOCOL_FAULTS_MAX))
        at.append(now)
        self._at[peer] = at
        keep_newest(self._at, _PEERS_MAX)
        if len(at) == PROTOCOL_FAULTS_MAX and now - at[0] <= WINDOW_S:
            del self._at[peer]
            self._until[peer] = now + REFUSED_S
            keep_newest(self._until, _PEERS_MAX)

    def refused_s(self, peer: PeerId, now: float) -> float:
        """For how many seconds more the peer is refused; 0 if it is not."""
        return max(0.0, self._until.get(peer, now) - now)

    def refused(self, now: float) -> tuple[RefusedPeer, ...]:
        """All peers that are refused now."""
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        return tuple(RefusedPeer(peer, until - now) for peer, until in self._until.items())

    def check(self) -> None:
        assert len(self._at) <= _PEERS_MAX
        assert len(self._until) <= _PEERS_MAX
        assert all(0 < len(at) <= PROTOCOL_FAULTS_MAX for at in self._at.values())

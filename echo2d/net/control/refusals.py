"""Peers that are refused at the control link, and when each may connect again.

Some peers break the protocol again and again (`ProtocolFaults`). Others have a build that this
coordinator does not understand (`OtherBuilds`):

    connects --> gets a time to connect again: RETRY_S_MIN later, and SPACING_S after the peer before it
      ^                                   |
      +-----------------------------------+-- not back HERE_S after that --> forgotten

So a fleet of another build makes one handshake every SPACING_S, however large it is, and when a peer or
its coordinator is upgraded, the peer returns by itself. A peer that connects too early gets the same time
again. While peers of several tokens wait, each token has an equal share of the handshakes. So a token with
hundreds of peers delays the peers of other tokens no more than a token with one peer would.
Times are monotonic seconds. Not here: which builds understand each other (`core/protocol/builds.py`).
"""

from collections import deque
from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.membership import PEER_NAME_CHARS_MAX
from echo2d.core.cluster.statistics import printable
from echo2d.core.protocol.builds import Build, HelloHead

# One box that was upgraded too early, or too late, is back within minutes.
RETRY_S_MIN = 120.0
# Seconds between two refused peers: half of the handshakes that a coordinator should spend on such peers.
SPACING_S = 2.0
# No peer has to wait longer than this. At SPACING_S, 900 peers can connect in this time.
RETRY_S_MAX = 1800.0
# The wait after a protocol fault of a peer whose build is understood, if no other peers wait.
FAULT_RETRY_S_MIN = 15.0
# A refused peer counts as present until this long after its time to connect: it adds up to a tenth to its wait,
# and its machine may be slow to start.
HERE_S = RETRY_S_MAX / 10 + 60.0
_PEERS_MAX = 10_000  # as many as a run enrols


class ComeAgain:
    """Gives peers the times at which to connect again. If only peers of one token wait, their times are SPACING_S
    apart. If peers of several tokens wait, the times of one token's peers are SPACING_S * (number of tokens) apart.
    """

    def __init__(self) -> None:
        self._at: dict[PeerId, tuple[float, str]] = {}

    def after_s(self, peer: PeerId, token: str, now: float, *, at_least_s: float) -> float:
        """In how many seconds the peer, which enrolled with this token, may connect again."""
        at, _ = self._at.pop(peer, (now, token))
        if at <= now:
            at = min(
                max(now + at_least_s, self._free_at(token, now, at_least_s)), now + RETRY_S_MAX
            )
        self._at[peer] = at, token
        keep_newest(self._at, _PEERS_MAX)
        return at - now

    def _free_at(self, token: str, now: float, at_least_s: float) -> float:
        """The end of the queue of all peers, or the token's next turn in it if that is earlier."""
        last: dict[str, float] = {}
        for at, owner in self._at.values():
            if at > now:
                last[owner] = max(at, last.get(owner, 0.0))
        end = max(last.values(), default=now) + SPACING_S
        others = len(last.keys() - {token})
        if token in last:
            return min(end, last[token] + SPACING_S * (others + 1))
        return min(end, now + at_least_s + SPACING_S * others)

    def check(self) -> None:
        assert len(self._at) <= _PEERS_MAX


@dataclass(frozen=True, slots=True)
class OtherBuild:
    """A peer that is refused because of its build."""

    peer: PeerId
    name: str  # from its hello
    build: Build
    expected_at: float


class OtherBuilds:
    """Peers whose build is not understood. come_again: shared with all other code that sends peers away."""

    def __init__(self, come_again: ComeAgain) -> None:
        self._come_again = come_again
        self._peers: dict[PeerId, OtherBuild] = {}

    def refuse(self, peer: PeerId, token: str, head: HelloHead, now: float) -> tuple[float, bool]:
        """In how many seconds the peer may connect again, and whether this refusal is worth a log line. Only a
        peer's first refusal is, because the peer could give another name and build each time.
        """
        retry_s = self._come_again.after_s(peer, token, now, at_least_s=RETRY_S_MIN)
        known = self._peers.pop(peer, None)
        build = Build(head.build.protocol, head.build.oldest, head.build.shown)
        self._peers[peer] = OtherBuild(
            peer, printable(head.name, PEER_NAME_CHARS_MAX), build, now + retry_s
        )
        keep_newest(self._peers, _PEERS_MAX)
        return retry_s, known is None

    def understood(self, peer: PeerId) -> None:
        """Record that the peer is back with a build that is understood."""
        self._peers.pop(peer, None)

    def here(self, now: float) -> tuple[OtherBuild, ...]:
        """The refused peers that still come back at their times."""
        gone = [peer for peer, each in self._peers.items() if now > each.expected_at + HERE_S]
        for peer in gone:
            del self._peers[peer]
        return tuple(self._peers.values())

    def check(self) -> None:
        assert len(self._peers) <= _PEERS_MAX
        self._come_again.check()


# --- protocol faults: a peer that breaks the protocol again and again is refused
#
#     PROTOCOL_FAULTS_MAX faults within WINDOW_S --> refused for REFUSED_S, then its count starts again
#
# A fault is a message that cannot be decoded or is not allowed now, from a peer that has proved its
# key. So a peer cannot cause another one to be refused. Faults are counted by key, because many peers
# may share one address.

PROTOCOL_FAULTS_MAX = 3
WINDOW_S = 600.0
REFUSED_S = 600.0


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """A peer that is refused now."""

    peer: PeerId
    refused_s: float  # from now


class ProtocolFaults:
    """See the comment above. `now` is monotonic seconds. total: faults of all peers so far."""

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

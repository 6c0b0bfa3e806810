"""Finds out whether other peers can dial a peer, by dialling it back.

    unknown --DialBack--> being dialled --the peer itself answered---> reachable ----+
       |                       ^        --no or another peer answered-> unreachable --+
       |                       +------- DIAL_BACK_EVERY_S, or another hello ---------+
       +-- it has no address of its own -----------------------------> unreachable

Plans contain the addresses of reachable peers only; all others dial their parents and children. No
version waits for an answer: a peer that is unknown when a plan is made counts as unreachable. The
seed is trusted and not dialled back. Only one dial to a peer runs at a time, however often it says
hello, and every result is sent to the peer.
Not here: which address a peer may announce.
"""

from echo2d.core.base.deadline_queue import DeadlineQueue
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import ClusterAction, DialBack, DialBackEnded, Note, Send
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import DialledBack
from echo2d.core.protocol.peer_handshake import SECRET_BYTES

# Seconds for a connection and two messages: a few round trips, with a packet lost.
DIAL_BACK_S = 5.0
# A port that was opened or closed is noticed within this time.
DIAL_BACK_EVERY_S = 120.0
# Peers that are dialled at once; leases wait for milliseconds meanwhile.
DIALS_MAX = 16
NO_ADDRESS = "the address it listens on is not its own as the coordinator sees it"


class Reachability:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._due = DeadlineQueue[PeerId](self._due_at)

    def joined(self, peer: Peer, *, now: float) -> list[ClusterAction]:
        """A peer said hello: dial it back, unless that cannot succeed."""
        if peer.kind == "seed":
            return []
        if peer.reach.listen is None or len(peer.reach.dial_back_secret) != SECRET_BYTES:
            peer.reach.dial_back_at = None
            return self._record_result(peer, NO_ADDRESS)
        begun_at = peer.reach.dialled_back_at
        self._dial_at(peer, now if begun_at is None else max(now, begun_at + DIAL_BACK_S))
        return self.deadlines(now=now)

    def ended(self, event: DialBackEnded, *, now: float) -> list[ClusterAction]:
        """A dial has ended. A result for an older session of the peer is ignored."""
        peer = self._members.of_session(event.session)
        if peer is None or peer.reach.listen is None:
            return []
        self._dial_at(peer, now + DIAL_BACK_EVERY_S)
        return self._record_result(peer, event.fault)

    def deadlines(self, *, now: float) -> list[ClusterAction]:
        """Dial the next DIALS_MAX peers that are due."""
        actions: list[ClusterAction] = []
        while (
            len(actions) < DIALS_MAX
            and (first := self._due.first()) is not None
            and first[0] <= now
        ):
            peer = self._members.get(first[1])
            assert peer is not None
            peer.reach.dial_back_at = None
            if peer.session is not None and peer.reach.listen is not None:
                peer.reach.dialled_back_at = now
                actions.append(
                    DialBack(
                        peer.session, peer.peer, peer.reach.listen, peer.reach.dial_back_secret
                    )
                )
        return actions

    def wake_at(self) -> float | None:
        return self._due.earliest()

    # --- inside

    def _due_at(self, key: PeerId) -> float | None:
        peer = self._members.get(key)
        return None if peer is None else peer.reach.dial_back_at

    def _dial_at(self, peer: Peer, at: float) -> None:
        peer.reach.dial_back_at = at
        self._due.set(peer.peer)

    def _record_result(self, peer: Peer, fault: str) -> list[ClusterAction]:
        assert peer.session is not None
        before, peer.reach.reachable = peer.reach.reachable, not fault
        answer: list[ClusterAction] = [Send(peer.session, DialledBack(fault))]
        if before is peer.reach.reachable:
            return answer
        return [
            Note(
                "dial_back",
                f"{peer.name} can be dialled" if peer.reach.reachable else f"{peer.name}: {fault}",
            ),
            *answer,
        ]

    def check(self) -> None:
        self._due.check(peer.peer for peer in self._members)

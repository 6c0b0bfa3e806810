"""The peers of a run: which are connected, through which session, and what each can do.

                    hello             3 heartbeats of silence
    (unknown, gone) -----> joined  ---------------------------> suspected
                             |  <--------------------------------- |
                             |       any message, or a hello       |
                             +--> gone <----- PEER_GONE_S of silence ---+
                         goodbye, revoked

A peer without a session is not alive; it becomes suspected only after 3 heartbeats of silence. A peer
that passed on bad frames is quarantined for a while (`quarantine`): it receives, and passes nothing
on. If a peer id has two live sessions, the newer one wins. At the FLIPS_MAX-th change of session within
FLIP_WINDOW_S both are refused, because two daemons are using one key.
Kept true: every live session belongs to exactly one peer.
Not here: leases, plans, versions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echo2d.core.base.deadline_queue import DeadlineQueue
from echo2d.core.base.ids import PeerId, SessionId
from echo2d.core.cluster.events import CloseSession, ClusterAction, PeerConnected, Send
from echo2d.core.cluster.peer import ACKNOWLEDGED_MAX, FLIP_WINDOW_S, FLIPS_MAX, Peer
from echo2d.core.cluster.quarantine import Misreports, Quarantine
from echo2d.core.cluster.statistics import printable
from echo2d.core.protocol.builds import OURS, not_understood
from echo2d.core.protocol.control_messages import (
    Hello,
    RefusalReason,
    Refused,
)
from echo2d.core.protocol.peer_handshake import SECRET_BYTES

# After this many missed heartbeats a peer is suspected: one may be lost by accident, three are not.
HEARTBEATS_MISSED_MAX = 3
# A peer that is silent for this long is gone. Other workers have taken over its leases long before.
PEER_GONE_S = 60.0
# Room for a fleet of 2,000 workers and the other peers. When there are more, peers that are gone are
# forgotten.
PEERS_MAX = 2048
# A host's name may have this length.
PEER_NAME_CHARS_MAX = 64
# The name of a quantization may have this length.
QUANTIZATION_CHARS_MAX = 32
# Slots of one worker; more is a mistake in its configuration.
SLOTS_MAX = 4096
# Forms that one hello may name; a peer keeps the frames of four.
FORMS_MAX = 64

# The reason that is sent to a convicted worker.
CONVICTED = "an audit found that this worker's answers are not the model's; ask the run's operator"


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer joined."""

    peer: Peer
    # Its daemon was restarted, or its address has changed.
    renewed: bool


class Membership:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        run_id: str,
        heartbeat_s: float,
        *,
        p2p: bool = True,
        quantized: bool = False,
        versions_held: int = 1,
    ) -> None:
        """p2p: whether peers pass versions on; if not, only the seed sends. quantized: whether
        workers may compute with quantized weights. versions_held: engines hold at most this many.
        """
        self._p2p, self._quantized, self._versions_held = p2p, quantized, versions_held
        self._run_id = run_id
        self._silence_s = HEARTBEATS_MISSED_MAX * heartbeat_s
        self._peers: dict[PeerId, Peer] = {}
        self._sessions: dict[SessionId, PeerId] = {}
        self._silences = DeadlineQueue[PeerId](self._silent_at)
        self._quarantine, self._misreports = Quarantine(), Misreports()
        # The peers that have changed since the scheduler last cleared this set.
        self.changed: set[PeerId] = set()

    # --- which peers there are

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def get(self, peer: PeerId) -> Peer | None:
        return self._peers.get(peer)

    def of_session(self, session: SessionId) -> Peer | None:
        peer = self._sessions.get(session)
        return None if peer is None else self._peers[peer]

    @property
    def seed(self) -> Peer | None:
        """The seed, if it is alive."""
        return next((peer for peer in self if peer.kind == "seed" and peer.alive), None)

    def workers(self) -> list[Peer]:
        """The alive peers with engines."""
        return [peer for peer in self if peer.kind == "worker" and peer.alive]

    def receivers(self) -> list[Peer]:
        """The alive peers that versions are sent to."""
        return [peer for peer in self if peer.kind in ("worker", "relay") and peer.alive]

    # --- what happens

    def connected(
        self, event: PeerConnected, *, now: float
    ) -> tuple[Joined | None, list[ClusterAction]]:
        """A hello arrived: the session joins, or the actions refuse it.

        The caller sends the Welcome.
        """
        hello, session = event.hello, event.session
        # The control link has exchanged both builds by now; without a control link no run mixes builds.
        if not hello.build.speaks_with(OURS):
            text = not_understood(hello.kind, hello.build, OURS)
            return None, _refuse(session, "build", text, permanent=False)
        if hello.run_id is not None and hello.run_id != self._run_id:
            return None, _refuse(
                session, "run", f"this is run {self._run_id}, not {hello.run_id}", permanent=True
            )
        if hello.quantization and not self._quantized:
            kind = printable(hello.quantization, QUANTIZATION_CHARS_MAX)
            text = (
                f"this run takes no workers with quantized weights, and this one computes in {kind}; "
                'set worker.quantization = "none" (servers: no --quantization and --kv-cache-dtype), or ask the run\'s '
                "operator for policy.quantized_workers = true"
            )
            return None, _refuse(session, "run", text, permanent=True)
        if hello.kind == "seed" and hello.listen is None:
            return None, _refuse(
                session, "protocol", "a seed must say where it listens", permanent=True
            )
        if hello.kind == "seed" and self.seed is not None and self.seed.peer != event.peer:
            return None, _refuse(session, "busy", "the run has a seed already", permanent=False)
        if event.peer not in self._peers and not self._make_room():
            return None, _refuse(session, "busy", f"the run has {PEERS_MAX} peers", permanent=False)
        return self._join(event, now)

    def heard(self, session: SessionId, *, now: float) -> tuple[Peer | None, bool]:
        """A message arrived.

        Returns its peer, and whether the peer was suspected; None: the session is not live.
        """
        peer = self.of_session(session)
        if peer is None:
            return None, False
        returned = peer.state == "suspected"
        peer.state, peer.heard_at = "joined", now
        if returned:
            self.changed.add(peer.peer)
            self._silences.set(peer.peer)
        return peer, returned

    def disconnected(self, session: SessionId) -> None:
        """The session ended.

        The peer may come back, and is suspected only after some silence.
        """
        peer = self._sessions.pop(session, None)
        if peer is not None:
            self._peers[peer].session = None
            self.changed.add(peer)

    def left(self, peer: Peer) -> list[ClusterAction]:
        """The peer said goodbye, or is given up."""
        peer.state, peer.engine.running = "gone", 0
        peer.engine.serves(None)
        # If it comes back, it says what it has served and holds.
        peer.engine.acknowledged.clear()
        peer.engine.forms = frozenset()
        self.changed.add(peer.peer)
        return self._close(peer)

    def revoked(
        self,
        peer: Peer,
        reason: RefusalReason = "revoked",
        detail: str = "its token was revoked or deleted; ask the run's operator for a new token file",
    ) -> list[ClusterAction]:
        """The peer has lost its access: its session is refused and closed."""
        refused = [] if peer.session is None else _refuse(peer.session, reason, detail)
        self.left(peer)
        return refused

    def accuse(self, accuser: Peer, accused: Peer, *, now: float) -> PeerId:
        """A bad frame came over the edge of these two peers; returns which one is at fault."""
        # The owner of two boxes must not quarantine a box of another owner by accusing it twice.
        owner = "" if accuser.token == accused.token else accuser.token
        is_seed = accuser.kind == "seed"
        at_fault = self._quarantine.accuse(
            accuser.peer, accused.peer, owner=owner, is_seed=is_seed, now=now
        )
        accused.reach.quarantined = accused.peer in self._quarantine
        return at_fault

    def misreported(self, peer: Peer, *, now: float) -> None:
        """The peer sent a report that no honest program sends; a stream of such reports ends in quarantine."""
        if not peer.service.misreports and peer.kind != "seed":
            peer.service.misreports = self._misreports.misreported(
                peer.peer, peer.engine.accepted, now=now
            )
            self.changed.add(peer.peer)

    def deadlines(self, *, now: float) -> tuple[list[Peer], list[ClusterAction]]:
        """Returns the newly suspected peers, and actions that close the sessions of peers that are gone now."""
        due_at = self.wake_at()
        if due_at is None or now < due_at:
            return [], []
        self._quarantine.release(now=now)
        self._misreports.release(now=now)
        suspected: list[Peer] = []
        actions: list[ClusterAction] = []
        for peer in self:
            peer.reach.quarantined = peer.peer in self._quarantine
            if peer.service.misreports and peer.peer not in self._misreports:
                peer.service.misreports = 0
                self.changed.add(peer.peer)
            if peer.state == "joined" and now >= peer.heard_at + self._silence_s:
                peer.state = "suspected"
                self.changed.add(peer.peer)
                suspected.append(peer)
            if peer.state == "suspected" and now >= peer.heard_at + PEER_GONE_S:
                actions += self.left(peer)
        return suspected, actions

    def wake_at(self) -> float | None:
        times = (self._silences.earliest(), self._quarantine.ends_at, self._misreports.ends_at)
        return min((at for at in times if at is not None), default=None)

    # --- inside

    def _silent_at(self, key: PeerId) -> float | None:
        """The time at which the peer's silence changes its state."""
        peer = self._peers.get(key)
        if peer is None or peer.state == "gone":
            return None
        return peer.heard_at + (self._silence_s if peer.state == "joined" else PEER_GONE_S)

    def _join(self, event: PeerConnected, now: float) -> tuple[Joined | None, list[ClusterAction]]:
        old = self._peers.get(event.peer)
        actions: list[ClusterAction] = []
        if old is not None and old.session is not None:
            old.flips.append(now)
            if len(old.flips) == FLIPS_MAX and now - old.flips[0] < FLIP_WINDOW_S:
                return None, self._refuse_both(old, event.session)
            actions = _refuse(
                old.session, "superseded", "a newer session of this peer id took over"
            )
            self._close(old)
        if event.hello.kind == "seed":
            for other in [peer for peer in self if peer.kind == "seed" and peer.peer != event.peer]:
                actions += self.left(other)
        renewed = old is None or (old.boot_id, old.reach.listen) != (
            event.hello.boot_id,
            event.hello.listen,
        )
        hello = event.hello
        peer = old or Peer(event.peer, hello.name, hello.kind, hello.boot_id, 0, event.session, now)
        peer.reach.quarantined = event.peer in self._quarantine
        # The peer may have been forgotten while it was quarantined.
        peer.service.misreports = peer.service.misreports or int(event.peer in self._misreports)
        _take_hello(peer, event.hello, p2p=self._p2p, versions_held=self._versions_held)
        peer.trusted, peer.service.cordoned, peer.token = event.trusted, event.cordoned, event.token
        peer.service.draining = peer.service.draining and peer.service.cordoned
        peer.session, peer.state, peer.heard_at = event.session, "joined", now
        self.changed.add(event.peer)
        self._peers[event.peer] = peer
        self._sessions[event.session] = event.peer
        self._silences.set(event.peer)
        return Joined(peer, renewed), actions

    def _refuse_both(self, peer: Peer, session: SessionId) -> list[ClusterAction]:
        text = "two daemons use this peer id in turn"
        assert peer.session is not None
        actions = [*_refuse(peer.session, "flapping", text), *_refuse(session, "flapping", text)]
        self._close(peer)
        return actions

    def _close(self, peer: Peer) -> list[ClusterAction]:
        if peer.session is None:
            return []
        session, peer.session = peer.session, None
        del self._sessions[session]
        self.changed.add(peer.peer)
        return [CloseSession(session)]

    def _make_room(self) -> bool:
        """Forget the peer that has been gone for longest. False: no room is left, and no peer is gone."""
        if len(self._peers) < PEERS_MAX:
            return True
        gone = [peer for peer in self if peer.state == "gone"]
        if gone:
            del self._peers[min(gone, key=lambda peer: peer.heard_at).peer]
        return bool(gone)

    def check(self) -> None:
        assert len(self._peers) <= PEERS_MAX
        assert all(self._peers[peer].session == session for session, peer in self._sessions.items())
        for key, peer in self._peers.items():
            assert key == peer.peer
            assert peer.session is None or self._sessions[peer.session] == key
            assert len(peer.engine.acknowledged) <= ACKNOWLEDGED_MAX
            assert 0 <= peer.slots <= SLOTS_MAX
            assert len(peer.name) <= PEER_NAME_CHARS_MAX
            assert len(peer.engine.forms) <= FORMS_MAX
            assert peer.state != "gone" or (peer.session, peer.engine.serving) == (None, None)
            assert len(peer.engine.held) <= self._versions_held
            assert peer.engine.held <= peer.engine.acknowledged.keys()
            assert peer.state != "gone" or not peer.engine.acknowledged
            assert not peer.reach.reachable or peer.reach.listen is not None
            assert peer.service.cordoned or not peer.service.draining
        assert sum(peer.kind == "seed" and peer.alive for peer in self) <= 1
        self._silences.check(self._peers)
        self._quarantine.check()
        self._misreports.check()


def _refuse(
    session: SessionId, reason: RefusalReason, detail: str, *, permanent: bool | None = None
) -> list[ClusterAction]:
    final = reason in ("revoked", "convicted") if permanent is None else permanent
    return [Send(session, Refused(reason, detail, final)), CloseSession(session)]


def _take_hello(peer: Peer, hello: Hello, *, p2p: bool, versions_held: int) -> None:
    if peer.boot_id != hello.boot_id:
        peer.engine.acknowledged.clear()
        (
            peer.service.failures,
            peer.service.rest_until,
            peer.service.leaving,
            peer.service.draining,
        ) = 0, 0.0, False, False
    if peer.reach.listen != hello.listen:
        peer.reach.reachable = None
    peer.name = printable(hello.name, PEER_NAME_CHARS_MAX)
    peer.kind, peer.boot_id, peer.reach.listen = hello.kind, hello.boot_id, hello.listen
    peer.reach.receive_only = hello.receive_only or not (p2p or hello.kind == "seed")
    peer.reach.uplink_limit = hello.uplink_limit or None
    peer.scores = hello.scores
    peer.build = replace(hello.build, name=hello.build.shown)
    # Without commas and spaces it is no other class of answers (`AuditRules.name_of`).
    quantization = printable(hello.quantization, QUANTIZATION_CHARS_MAX)
    peer.quantization = "".join(each for each in quantization if each.isalnum() or each in "_.+-")
    # A price above 1e6 USD per hour is a mistake.
    peer.usd_per_h = (
        None if hello.usd_per_h is None or not 0 <= hello.usd_per_h <= 1e6 else hello.usd_per_h
    )
    peer.reach.dial_back_secret = hello.dial_back_secret[:SECRET_BYTES]
    peer.slots = min(hello.slots, SLOTS_MAX) if hello.kind == "worker" else 0
    peer.engine.forms = frozenset(hello.forms[:FORMS_MAX])
    peer.engine.stands = hello.holding[-1] if hello.holding else None
    named = [key for key in hello.held[:versions_held] if key != hello.serving]
    served = hello.served[:ACKNOWLEDGED_MAX]
    peer.engine.serves(hello.serving, named[: versions_held - 1], served)

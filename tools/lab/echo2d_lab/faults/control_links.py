"""Simulates control links in virtual time: sessions between each peer and the coordinator.

A peer has one session after another. As with TCP, a session keeps its order in each direction and
loses nothing until it ends. It ends when it is cut, when either end closes it or dies, or when one
end has received nothing for too long. Each end notices that after a time of its own, or only when it
gives up. Messages under way are then lost, or still arrive after the peer's next session has begun: so
messages are reordered and repeated. While a peer is blocked, everything to and from it waits.

Not here: what the two ends do with a message.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from echo2d.core.base.ids import PeerId, SessionId
from echo2d.core.cluster.events import PeerConnected, PeerDisconnected, PeerSaid
from echo2d.core.coordinator.events import CoordinatorEvent
from echo2d.core.protocol.control_messages import (
    Heartbeat,
    Hello,
    Refused,
    ToCoordinator,
    ToPeer,
    Welcome,
)
from echo2d.plan.kernel.virtual_clock import Clock
from echo2d_lab.faults.process import Process

# A peer without a Welcome after this time dials again.
HELLO_S = 10.0
# The coordinator gives up a session in which it has received nothing for this long.
SILENCE_S = 60.0
# A peer gives up a session in which it has received nothing for this long.
PING_S = 45.0
BACKOFF_S = (0.25, 15.0)  # first and longest wait between two dials
# An end notices within this time that a connection was reset.
NOTICE_S = 3.0


class _Ended:
    """Marks the end of a session, as the last item of a direction."""


ENDED = _Ended()
Word = ToCoordinator | ToPeer | _Ended


@dataclass(slots=True)
class SessionPipe:
    """One direction of a session.

    in_order: when the last message arrives. closed: it takes no more messages. dead: messages under
    way are lost.
    """

    in_order: float = 0.0
    closed: bool = False
    dead: bool = False


@dataclass(slots=True, eq=False)
class SimSession:
    number: SessionId
    peer: "SimPeer"
    peer_boot: int
    coordinator_boot: int
    up: SessionPipe = field(default_factory=SessionPipe)
    down: SessionPipe = field(default_factory=SessionPipe)


class SimPeer(Process, ABC):
    """The peer's end: it dials, sends Hello, listens, and dials again. A subclass is the daemon.

    latency_s: one way to the coordinator. blocked_until: no message passes before this time. barred: its
    credential is revoked. trusted: by the operator. closed: other peers cannot dial it.
    """

    def __init__(
        self, clock: Clock, chance: random.Random, control: "Control", number: int, latency_s: float
    ) -> None:
        super().__init__(clock)
        self.number = number
        self.peer = PeerId(f"{number:032x}")
        self.latency_s = latency_s
        self.blocked_until = 0.0
        self.barred = False
        self.trusted = False
        self.closed = False
        self.session: SimSession | None = None
        self.welcome: Welcome | None = None
        self.chance = chance
        self._control = control
        self._tries = 0

    # --- the daemon

    @abstractmethod
    def hello(self) -> Hello: ...

    def running(self) -> int:
        return 0

    def connected(self, welcome: Welcome) -> None: ...

    def heard(self, message: ToPeer) -> None: ...

    def disconnected(self) -> None: ...

    # --- the link

    @property
    def blocked(self) -> bool:
        return self.clock.now < self.blocked_until

    def dial(self) -> None:
        if self.session is not None or self.barred:
            return
        self.session = self._control.open(self)
        if self.session is None:
            self._dial_again()
        else:
            self.later(HELLO_S, self._not_welcome, self.session)

    def say(self, message: ToCoordinator) -> None:
        if self.session is not None and self.welcome is not None:
            self._control.up(self.session, message)

    def hear(self, session: SimSession, word: ToPeer | _Ended) -> None:
        if self.session is not session:
            return
        if isinstance(word, _Ended | Refused):
            self.lose(session)
        elif isinstance(word, Welcome):
            self.welcome, self._tries = word, 0
            self.connected(word)
            self._beat(session)
        else:
            self.heard(word)

    def lose(self, session: SimSession) -> None:
        """End the session at this end, and dial again later."""
        if self.session is not session:
            return
        self._control.up(session, ENDED)
        was_welcome = self.welcome is not None
        self.session = self.welcome = None
        if was_welcome:
            self.disconnected()
        self._dial_again()

    def end(self) -> None:
        super().end()
        self.session = self.welcome = None
        self._tries = 0

    def _dial_again(self) -> None:
        delay_s = min(BACKOFF_S[1], BACKOFF_S[0] * 2.0 ** min(self._tries, 16))
        self._tries += 1
        self.later(delay_s * self.chance.uniform(0.5, 1.0), self.dial)

    def _not_welcome(self, session: SimSession) -> None:
        if self.welcome is None:
            self.lose(session)

    def _beat(self, session: SimSession) -> None:
        if self.session is session and self.welcome is not None:
            self._control.heartbeat(session, self.running())
            self.later(self.welcome.heartbeat_s, self._beat, session)


class Control:
    """All sessions. coordinator: their other end. emit: receives the coordinator's events."""

    def __init__(self, clock: Clock, chance: random.Random, coordinator: Process) -> None:
        self._clock = clock
        self._random = chance
        self._coordinator = coordinator
        self._sessions: dict[SessionId, SimSession] = {}
        self._made = 0
        self.emit: Callable[[CoordinatorEvent], None]

    # --- both ends

    def open(self, peer: SimPeer) -> SimSession | None:
        """Open a session and send the peer's Hello; None: the coordinator cannot be reached."""
        if not self._coordinator.up or peer.blocked:
            return None
        self._made += 1
        session = SimSession(SessionId(self._made), peer, peer.boots, self._coordinator.boots)
        self._sessions[session.number] = session
        self.up(session, peer.hello())
        return session

    def up(self, session: SimSession, word: ToCoordinator | _Ended) -> None:
        self._transmit(session, session.up, word)

    def down(self, number: SessionId, message: ToPeer) -> None:
        """Send to the peer of this session, if the session is still open."""
        if number in self._sessions:
            self._transmit(self._sessions[number], self._sessions[number].down, message)

    def heartbeat(self, session: SimSession, running: int) -> None:
        self.up(session, Heartbeat(running))

    def close(self, number: SessionId) -> None:
        """Close a session at the coordinator's end, after the messages sent before."""
        if number in self._sessions:
            self._transmit(self._sessions[number], self._sessions[number].down, ENDED)

    def peer_of(self, number: SessionId) -> SimPeer | None:
        session = self._sessions.get(number)
        return None if session is None else session.peer

    def bar(self, peer: PeerId) -> None:
        """Revoke the credential of a peer that is or was connected."""
        for session in self._sessions.values():
            if session.peer.peer == peer:
                session.peer.barred = True

    # --- faults

    def cut(self, peer: SimPeer) -> None:
        """Reset the peer's connection. The peer may be dead already."""
        for session in self._of(peer):
            session.down.dead = True
            self._notice_at_peer(session)
            self._lose_up(session)

    def vanish(self, peer: SimPeer) -> None:
        """Lose the peer's machine: the coordinator notices only its silence."""
        for session in self._of(peer):
            session.down.dead = session.up.dead = True
            self._clock.after(self._random.uniform(5.0, SILENCE_S), self._ended_above, session)

    def block(self, peer: SimPeer, seconds: float) -> None:
        """Let no message pass for this long. Either end may give up earlier."""
        peer.blocked_until = max(peer.blocked_until, self._clock.now + seconds)
        for session in self._of(peer):
            self._clock.after(self._random.uniform(0.0, PING_S), self._impatient_peer, session)
            self._clock.after(
                self._random.uniform(0.0, SILENCE_S), self._impatient_coordinator, session
            )

    def coordinator_died(self) -> None:
        for session in self._sessions.values():
            session.up.dead = session.down.dead = True
            self._notice_at_peer(session)
        self._sessions.clear()

    # --- inside

    def _of(self, peer: SimPeer) -> list[SimSession]:
        return [session for session in self._sessions.values() if session.peer is peer]

    def _transmit(self, session: SimSession, way: SessionPipe, word: Word) -> None:
        if way.closed:
            return
        way.closed = isinstance(word, _Ended)
        delay_s = session.peer.latency_s * self._random.uniform(0.5, 1.5)
        way.in_order = max(self._clock.now + delay_s, way.in_order)
        self._clock.at(way.in_order, self._arrive, session, way, word)

    def _arrive(self, session: SimSession, way: SessionPipe, word: Word) -> None:
        if way.dead:
            return
        if session.peer.blocked:
            self._clock.at(session.peer.blocked_until, self._arrive, session, way, word)
        elif way is session.down:
            session.peer.call(session.peer_boot, session.peer.hear, session, word)
        elif isinstance(word, _Ended):
            self._ended_above(session)
        elif isinstance(word, Hello):
            if not session.peer.barred:
                peer = session.peer
                self.emit(PeerConnected(session.number, peer.peer, word, peer.trusted))
        else:
            # No other type is sent to the coordinator.
            self.emit(PeerSaid(session.number, word))  # type: ignore[arg-type]

    def _ended_above(self, session: SimSession) -> None:
        """End the session at the coordinator's end."""
        if self._sessions.pop(session.number, None) is not None:
            session.up.dead = session.up.closed = True
            self._transmit(session, session.down, ENDED)
            self.emit(PeerDisconnected(session.number, "closed"))

    def _lose_up(self, session: SimSession) -> None:
        """Lose the messages under way to the coordinator, or let them arrive: one in two."""
        if self._random.random() < 0.5:
            session.up.dead = True
            self._clock.after(self._random.uniform(0.0, NOTICE_S), self._ended_above, session)
        else:
            session.up.in_order = max(
                session.up.in_order, self._clock.now + self._random.uniform(0.0, NOTICE_S)
            )
            self._transmit(session, session.up, ENDED)

    def _notice_at_peer(self, session: SimSession) -> None:
        peer = session.peer
        self._clock.after(
            self._random.uniform(0.0, NOTICE_S), peer.call, session.peer_boot, peer.lose, session
        )  # fmt: skip

    def _impatient_peer(self, session: SimSession) -> None:
        if session.peer.blocked:
            session.peer.call(session.peer_boot, session.peer.lose, session)

    def _impatient_coordinator(self, session: SimSession) -> None:
        if session.peer.blocked:
            self._ended_above(session)

"""A relay under test, with the peers, frames and plans that its tests share."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from echo2d.core.base.ids import (
    FormId,
    FrameId,
    Generation,
    PeerId,
    PlanId,
    SegmentId,
    StripeId,
    frame_id,
)
from echo2d.core.protocol.control_messages import EdgePeer, PlanEdges, StripeEdge
from echo2d.core.protocol.peer_messages import FramesHeld, FramesWanted, StreamOpened, runs_of
from echo2d.core.relay.events import (
    FormComplete,
    FramesFound,
    FrameVerified,
    Heard,
    PeerReady,
    PlanReceived,
    RelayAction,
    RelayEvent,
    SendFrame,
    TableHeld,
    Tell,
)
from echo2d.core.relay.relay import Relay

FORM = FormId("f" * 32)
ME, UP, LEFT, RIGHT = (
    PeerId(name) for name in ("m", "a", "x", "y")
)  # our id is above UP's, below LEFT's and RIGHT's
TABLE = frame_id(SegmentId(0), 0)
FRAMES = tuple(frame_id(SegmentId(0), index) for index in range(1, 9))
SIZES = (100,) * len(FRAMES)
MANY = tuple(frame_id(SegmentId(0), index) for index in range(1, 61))
MANY_SIZES = (100,) * len(MANY)
Message = TypeVar("Message")
Edge = tuple[PeerId | None, tuple[PeerId, ...]]


class Peer:
    """A relay under test, with a clock that stands still unless told otherwise."""

    def __init__(self) -> None:
        self.relay = Relay(ME)
        self.now = 100.0

    def __call__(self, event: RelayEvent, *, after: float = 0.0) -> list[RelayAction]:
        self.now += after
        actions = self.relay.handle(event, now=self.now)
        self.relay.check()
        return actions

    def plan(
        self,
        *edges: Edge,
        plan: int = 1,
        generation: int = 0,
        form: FormId = FORM,
        spares: tuple[float, ...] = (),
        sources: tuple[PeerId, ...] = (),
    ) -> list[RelayAction]:
        """Receive a plan. edges: parent and children in each stripe. spares: the stripes' shares, 0 if ordinary."""
        shares = spares or (0.0,) * len(edges)
        stripes = [
            StripeEdge(StripeId(n), parent, kids, shares[n])
            for n, (parent, kids) in enumerate(edges)
        ]
        others = dict.fromkeys(
            peer for parent, kids in edges for peer in (parent, *kids) if peer is not None
        )
        others.update(dict.fromkeys(sources))
        peers = tuple(EdgePeer(peer, None, dial=False, secret=bytes(32)) for peer in others)
        return self(
            PlanReceived(
                PlanEdges(
                    form, PlanId(plan), Generation(generation), tuple(stripes), peers, sources
                )
            )
        )

    def asked(
        self, peer: PeerId, stream: int, stripe: int = 0, first: int = 0, plan: int = 1
    ) -> list[RelayAction]:
        return self(
            Heard(
                peer,
                StreamOpened(stream, FORM, PlanId(plan), Generation(0), StripeId(stripe), first),
            )
        )

    def wanted(self, peer: PeerId, stream: int, frames: tuple[FrameId, ...]) -> list[RelayAction]:
        """The actions when the peer asks for these frames, and when its link then has room."""
        actions = self(Heard(peer, FramesWanted(stream, FORM, frames)))
        return [*actions, *(action for action in self(PeerReady(peer)) if action not in actions)]

    def comes(
        self, peer: PeerId, stream: int, sequence: int, frame: FrameId, *, after: float = 0.0
    ) -> list[RelayAction]:
        if frame == TABLE:
            self(TableHeld(FORM, SegmentId(0), SIZES))
        return self(
            FrameVerified(peer, stream, FORM, frame, sequence, header_only=False), after=after
        )


def fill(peer: Peer, frames: tuple[FrameId, ...] = FRAMES) -> None:
    peer(TableHeld(FORM, SegmentId(0), SIZES))
    peer(FramesFound(FORM, frames))
    peer(FormComplete(FORM, 1))


def frames_to(peer: PeerId, actions: list[RelayAction]) -> list[FrameId]:
    return [
        action.frame for action in actions if isinstance(action, SendFrame) and action.peer == peer
    ]


def drain(peer: Peer, *links: PeerId) -> list[SendFrame]:
    """All frames that are sent while these links, and no others, always have room."""
    sent: list[SendFrame] = []
    while more := [action for link in links for action in sends(peer(PeerReady(link)))]:
        sent += more
    return sent


def sends(actions: Iterable[RelayAction]) -> list[SendFrame]:
    return [action for action in actions if isinstance(action, SendFrame)]


def opened(peer: PeerId, stream: int, stripe: int = 0, first: int = 0, generation: int = 0) -> Tell:
    return Tell(
        peer, StreamOpened(stream, FORM, PlanId(1), Generation(generation), StripeId(stripe), first)
    )


def held(frames: Sequence[FrameId]) -> FramesHeld:
    """The message that these frames are held."""
    return FramesHeld(FORM, runs_of(frames))


def told(kind: type[Message], actions: Iterable[object]) -> list[tuple[PeerId, Message]]:
    """The messages of this kind among the actions, with the peers that they go to."""
    return [
        (action.peer, action.message)
        for action in actions
        if isinstance(action, Tell) and isinstance(action.message, kind)
    ]

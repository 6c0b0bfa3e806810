"""The events that go into `relay.Relay` and the actions that come out, at the level of frames.

No payload, socket or disk is here: the runtime owns the links (`net/peer`), the disk
(`store/frames`) and hashing. It reports a frame after verifying it. From then on the frame is
*held*: it is on disk, or in memory on its way to disk, where the runtime can read it. If held
frames are lost, the runtime reports them (FramesLost), or gives their form up. The runtime performs
the actions of one turn in order.

Streams. A stream is named by (peer, stream number). The end that opens it chooses the number: the
end with the smaller peer id takes 1, 3, 5 ..., the other 2, 4, 6 ..., and both start over on each
link. Frames travel to the end that opened the stream. A *stripe stream* (StreamOpened) carries one stripe in
sequence; a *repair stream* (FramesWanted, one per form and direction) carries single frames. A
stream ends with StreamEnded from either end, or silently with its link: LinkDown comes after the
last event of the link's streams.

Flow control. Relay gives a link at most LINK_FRAMES_MAX unsent frames, then waits for PeerReady.
The runtime reports PeerReady when the link was given frames and its send buffer has room again (at
once, if the buffer never filled). PeerReady resets the count: frames that the link was given before it
no longer count as unsent.
"""

from dataclasses import dataclass

from echo2d.core.base.ids import FormId, FrameId, Generation, PeerId, PlanId, SegmentId
from echo2d.core.protocol.control_messages import EdgePeer, PlanEdges
from echo2d.core.protocol.peer_messages import RelayMessage

# The reason with which a parent ends a stripe stream after its last frame.
DONE = "done"

# --- events ----------------------------------------


@dataclass(frozen=True, slots=True)
class PlanReceived:
    """A plan, or a newer generation of one. It replaces this peer's edges; unchanged streams go on.

    Plans arrive in the order in which they were made. Their numbers do not show that order, because
    each coordinator process begins at a number of its own.
    """

    edges: PlanEdges


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link to this peer is open in both directions (after both hellos)."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link is gone, and so is every stream on it."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class TableHeld:
    """The table of this segment is verified and held: payload frame i + 1 has sizes[i] bytes.

    Comes before the FrameVerified (or RepairVerified) of the table frame itself; on the seed,
    before its FramesFound.
    """

    form: FormId
    segment: SegmentId
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FormComplete:
    """The signed totals are known: the form has exactly this many segments."""

    form: FormId
    segments: int


@dataclass(frozen=True, slots=True)
class FramesFound:
    """These frames are verified and held, and no open link brought them.

    They were on disk at the start, were just encoded or made from a base, or came over a link that
    has ended since.
    """

    form: FormId
    frames: tuple[FrameId, ...]


@dataclass(frozen=True, slots=True)
class FormSearched:
    """Everything of the form that was here is reported: the relay may now ask for the rest."""

    form: FormId


@dataclass(frozen=True, slots=True)
class FramesLost:
    """These frames were held, but are damaged on disk: they must come again."""

    form: FormId
    frames: tuple[FrameId, ...]


@dataclass(frozen=True, slots=True)
class FrameVerified:
    """A frame of a stripe stream is verified and held.

    Events of one stream come in the order in which its frames came.
    """

    peer: PeerId
    stream: int
    form: FormId
    frame: FrameId
    sequence: int
    header_only: bool  # whether it came without payload, because it was held already


@dataclass(frozen=True, slots=True)
class FrameRejected:
    """A frame of this stream, of either kind, does not match its digest."""

    peer: PeerId
    stream: int
    form: FormId
    frame: FrameId


@dataclass(frozen=True, slots=True)
class RepairVerified:
    """A frame of a repair stream is verified and held."""

    peer: PeerId
    form: FormId
    frame: FrameId


@dataclass(frozen=True, slots=True)
class RepairRefused:
    """A frame of a repair stream came without payload: the peer does not hold it."""

    peer: PeerId
    form: FormId
    frame: FrameId


@dataclass(frozen=True, slots=True)
class Heard:
    """The peer sent this message.

    The runtime also makes a Heard with StreamEnded when this end had to end a stream because it
    lost a frame of the stream.
    """

    peer: PeerId
    message: RelayMessage


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The send buffer of this link has room again (see flow control above)."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class FormForgotten:
    """The form's frames may be deleted: from now on it has no streams and no plan."""

    form: FormId


@dataclass(frozen=True, slots=True)
class RelayDeadlinePassed:
    """The time that `wake_at()` returned has come."""


RelayEvent = (
    FrameVerified | PeerReady | RepairVerified | RepairRefused | RelayDeadlinePassed
    | TableHeld | FramesFound | FramesLost | FormSearched | FormComplete
    | PlanReceived | LinkUp | LinkDown | Heard | FrameRejected | FormForgotten
)  # fmt: skip


# --- actions ----------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectPeer:
    """Keep a link to this peer: dial it, or let it in.

    Replaces an earlier ExpectPeer; an open link stays.
    """

    edge: EdgePeer


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """No plan has an edge to this peer any more: close its link, and do not accept it again."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this message to the peer, after everything that was sent before on its stream."""

    peer: PeerId
    message: RelayMessage


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a frame on a stripe stream, or with sequence 0 on a repair stream."""

    peer: PeerId
    stream: int
    form: FormId
    frame: FrameId
    sequence: int
    # Whether to send no payload: on a stripe because the peer holds the frame, on a repair stream
    # because this peer does not.
    header_only: bool


@dataclass(frozen=True, slots=True)
class ReportEdgeBroken:
    """Tell the coordinator that this edge does not work (EdgeBroken)."""

    plan: PlanId
    generation: Generation
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Accuse:
    """Tell the coordinator that this peer sent a bad frame (FrameAccused)."""

    form: FormId
    frame: FrameId
    accused: PeerId


@dataclass(frozen=True, slots=True)
class FormArrived:
    """Every frame of every segment of this form is held here. It comes once per form."""

    form: FormId


@dataclass(frozen=True, slots=True)
class FrameGone:
    """The root of the form's plan lost this frame and cannot get it back: the form is given up."""

    form: FormId
    frame: FrameId


LinkAction = SendFrame | Tell | ExpectPeer | ForgetPeer
RelayAction = LinkAction | ReportEdgeBroken | Accuse | FormArrived | FrameGone

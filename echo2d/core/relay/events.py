"""What goes into `relay.Relay` and what comes out, at the level of frames: no payload bytes, no sockets, no disk.

The runtime owns the links (net.peers), the disk (store.frames) and hashing. It turns what happens on a link into an
event only after the frame was verified and stored, and performs the actions of one turn in order.

Streams. A stream is named by (peer, stream number); whoever opens it chooses the number, in turn and anew on each link,
as `link` does: the end with the smaller peer id 1, 3, 5 ..., the other 2, 4, 6 ... Frames travel from the end that was
asked to the end that opened. Two kinds: a *stripe stream* (StreamOpened) carries one stripe in sequence; a *repair
stream* (FramesWanted, one per form and direction) carries single frames. A stream ends with StreamEnded from either
end, or silently with its link: LinkDown comes after the last event of a stream of that link.

Flow control. Relay gives a link at most LANE_FRAMES_MAX frames for each stripe that it carries; then it waits for
PeerReady, which the runtime reports whenever it was given frames and its send buffer has room again (at once, if the
buffer never filled). PeerReady means: none of the frames given so far counts any more.
"""

from dataclasses import dataclass

from echo2d.core.base.ids import FormId, FrameId, Generation, PeerId, PlanId, SegmentId
from echo2d.core.protocol.control_messages import EdgePeer, PlanEdges
from echo2d.core.protocol.peer_messages import RelayMessage

DONE = "done"  # the reason with which a parent closes a stripe stream after its last frame

# --- events ----------------------------------------


@dataclass(frozen=True, slots=True)
class PlanReceived:
    """A plan, or a newer generation of one: it replaces this peer's edges, unchanged streams go on.

    Plans come in the order in which they were made; their numbers say nothing about it, for another coordinator process
    begins anywhere.
    """

    edges: PlanEdges


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link to this peer is open in both directions (after both hellos)."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link is gone, and with it every stream on it."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class TableHeld:
    """The table of this segment is verified and on disk: payload frame i + 1 has sizes[i] bytes.

    Comes before the FrameVerified (or RepairVerified) of the table frame itself; on the seed, before its FramesFound.
    """

    form: FormId
    segment: SegmentId
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FormComplete:
    """The signed totals are known: the form has exactly so many segments."""

    form: FormId
    segments: int


@dataclass(frozen=True, slots=True)
class FramesFound:
    """These frames are on disk and verified without having come over a link: after a restart, or just encoded."""

    form: FormId
    frames: tuple[FrameId, ...]


@dataclass(frozen=True, slots=True)
class FormSearched:
    """What this peer had of the form before has been told (TableHeld, FramesFound): now it may ask for the rest."""

    form: FormId


@dataclass(frozen=True, slots=True)
class FramesLost:
    """These frames, held before, turned out damaged on disk: they have to come again."""

    form: FormId
    frames: tuple[FrameId, ...]


@dataclass(frozen=True, slots=True)
class FrameVerified:
    """A frame of a stripe stream is verified and on disk. header_only: it came without payload, as held already.

    Events of one stream come in the order in which its frames came.
    """

    peer: PeerId
    stream: int
    form: FormId
    frame: FrameId
    sequence: int
    header_only: bool


@dataclass(frozen=True, slots=True)
class FrameRejected:
    """A frame of this stream, of either kind, is not what its digest says."""

    peer: PeerId
    stream: int
    form: FormId
    frame: FrameId


@dataclass(frozen=True, slots=True)
class RepairVerified:
    """A frame of a repair stream is verified and on disk."""

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
    """The peer says this. A frame of a stream that is lost at this end comes as StreamEnded, too."""

    peer: PeerId
    message: RelayMessage


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The send buffer of this link has room again, see flow control."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class FormForgotten:
    """The form's frames may be deleted: it has no streams and no plan from now on."""

    form: FormId


@dataclass(frozen=True, slots=True)
class RelayDeadlinePassed:
    """`wake_at()` has come."""


RelayEvent = (
    FrameVerified | PeerReady | RepairVerified | RepairRefused | RelayDeadlinePassed
    | TableHeld | FramesFound | FramesLost | FormSearched | FormComplete
    | PlanReceived | LinkUp | LinkDown | Heard | FrameRejected | FormForgotten
)  # fmt: skip


# --- actions ----------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectPeer:
    """Have a link to this peer: dial it, or let it in. Replaces what was expected of it; an open link stays."""

    edge: EdgePeer


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """No plan has an edge to this peer any more: its link may be closed, and it is not let in again."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Tell:
    """Say this to the peer, after everything that was sent before on its stream."""

    peer: PeerId
    message: RelayMessage


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a frame on a stripe stream, or with sequence 0 on a repair stream.

    header_only: without payload; on a stripe because the peer holds it, on a repair stream because we do not.
    """

    peer: PeerId
    stream: int
    form: FormId
    frame: FrameId
    sequence: int
    header_only: bool


@dataclass(frozen=True, slots=True)
class ReportEdgeBroken:
    """Tell the coordinator (messages.EdgeBroken)."""

    plan: PlanId
    generation: Generation
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Accuse:
    """Tell the coordinator (messages.FrameAccused)."""

    form: FormId
    frame: FrameId
    accused: PeerId


@dataclass(frozen=True, slots=True)
class FormArrived:
    """Every frame of every segment of this form is held here. Once per form."""

    form: FormId


@dataclass(frozen=True, slots=True)
class FrameGone:
    """At the root of the form's plan: this frame was lost, nobody sends it and nobody made it again: the form stops."""

    form: FormId
    frame: FrameId


LinkAction = SendFrame | Tell | ExpectPeer | ForgetPeer
RelayAction = LinkAction | ReportEdgeBroken | Accuse | FormArrived | FrameGone

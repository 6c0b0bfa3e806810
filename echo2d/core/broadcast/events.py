"""The actions and records of spreading a version."""

from dataclasses import dataclass

from echo2d.core.base.ids import Digest, PublishSeq, SessionId
from echo2d.core.cluster.events import DeleteVersion, Note, Persist, Send, StopRun, SyncVersion
from echo2d.core.topology.uplink_rates import PeerRate

# --- records


@dataclass(frozen=True, slots=True)
class FormChosen:
    """The version of this publish spreads in frames of this size, as a delta from `base` or in
    full.

    A later record of the same publish replaces this one.
    """

    publish_seq: PublishSeq
    base: Digest | None
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class RatesMeasured:
    """The rates of these peers, measured while a version spread; they replace older ones."""

    rates: tuple[PeerRate, ...]


BroadcastRecord = FormChosen | RatesMeasured


# --- actions


@dataclass(frozen=True, slots=True)
class SendRoot:
    """Sign these root bytes and send them as SignedRoot to these sessions."""

    sessions: tuple[SessionId, ...]
    root: bytes


BroadcastAction = (
    Persist[BroadcastRecord] | Send | SendRoot | DeleteVersion | SyncVersion | StopRun | Note
)

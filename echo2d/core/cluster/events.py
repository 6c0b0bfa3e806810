"""What happens to the peers and versions of a run: events (it happened), actions (do it), records (keep it).

A *session* is one WebSocket connection of a peer; a *request* is one waiting HTTP call.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from echo2d.core.base.ids import (
    Digest,
    Epoch,
    GroupId,
    PeerId,
    PublishSeq,
    RequestId,
    SessionId,
    Version,
)
from echo2d.core.protocol.control_messages import Address, Hello, ToCoordinator, ToPeer

RecordT_co = TypeVar("RecordT_co", covariant=True)

# --- events


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A peer with a valid credential opened a session and said hello."""

    session: SessionId
    peer: PeerId
    hello: Hello


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A message after the hello."""

    session: SessionId
    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The session is gone: closed, reset, timed out or broke the protocol."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRevoked:
    """The peer's credential was revoked."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class RemovalPlanned:
    """The peer will be taken away by whoever rented it: it gets no more leases, and finishes what it holds."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class DialBackEnded:
    """Answers DialBack. fault: why nobody, or somebody else, answered; empty: that very peer did."""

    session: SessionId
    fault: str


@dataclass(frozen=True, slots=True)
class PublishAsked:
    """POST /v1/versions, after the snapshot was copied into the run directory (`path`, relative) and hashed."""

    request: RequestId
    epoch: Epoch
    version: Version
    digest: Digest
    path: str
    full_bytes: int


# --- records


@dataclass(frozen=True, slots=True)
class VersionPublished:
    publish_seq: PublishSeq
    epoch: Epoch
    version: Version
    digest: Digest
    path: str
    full_bytes: int


@dataclass(frozen=True, slots=True)
class VersionRevoked:
    epoch: Epoch
    version: Version
    digest: Digest


# --- actions


@dataclass(frozen=True, slots=True)
class Persist(Generic[RecordT_co]):
    """Make this durable before any later action of the same turn is performed."""

    record: RecordT_co


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the peer of this session (dropped silently if the session has gone)."""

    session: SessionId
    message: ToPeer


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Close after what was sent before has gone out."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class DialBack:
    """Dial the peer of this session: whoever answers has to prove that it knows the secret."""

    session: SessionId
    peer: PeerId
    address: Address
    secret: bytes


@dataclass(frozen=True, slots=True)
class DeleteVersion:
    """The snapshot copy in the run directory is of no further use."""

    path: str


@dataclass(frozen=True, slots=True)
class StopRun:
    """The run cannot go on; the process ends with exit code 1 and this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A fact for logs and `status`: kind is a short word, text one line. group: the one it is about, if any."""

    kind: str
    text: str
    group: GroupId | None = None


ClusterAction = Send | CloseSession | DialBack | Note

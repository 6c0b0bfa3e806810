"""The events, actions and records of a run's peers and versions.

A *session* is one WebSocket connection of a peer; a *request* is one waiting HTTP call.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
    # Its token is one that the operator trusts.
    trusted: bool = False
    # An operator has taken it out of service.
    cordoned: bool = False
    # The name of its access token; empty: it is one of the run's own processes.
    token: str = ""


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A peer sent a message after its hello."""

    session: SessionId
    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The session has ended: it was closed or reset, timed out, or broke the protocol."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRevoked:
    """The peer's credential was revoked."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerPardoned:
    """A person pardoned a convicted worker, which may join again."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class RemovalPlanned:
    """The renter will take the peer away: it finishes its leases, and gets no more."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class DialBackEnded:
    """Answers DialBack. fault: what went wrong; empty: the peer itself answered."""

    session: SessionId
    fault: str


@dataclass(frozen=True, slots=True)
class CopyLost:
    """A snapshot copy was found damaged and is deleted, or is gone. path: as in PublishAsked."""

    path: str


@dataclass(frozen=True, slots=True)
class PublishAsked:
    """POST /v1/versions was called, and the snapshot was copied into the run directory and hashed.

    path: the path of the copy, relative to the run directory.
    """

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
class Reply:
    """Answer a waiting request."""

    request: RequestId
    status: int  # an HTTP status
    # A JSON object, or the bytes of a batch, whose digest is `digest` and whose groups are at most
    # `staleness_max` train steps old.
    body: dict[str, Any] | bytes
    digest: Digest | None = None
    staleness_max: int | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the peer of this session (dropped silently if the session has gone)."""

    session: SessionId
    message: ToPeer


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Close the session after everything sent before has gone out."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class DialBack:
    """Dial this peer at its address. The answer must prove that it knows the secret."""

    session: SessionId
    peer: PeerId
    address: Address
    secret: bytes


@dataclass(frozen=True, slots=True)
class SyncVersion:
    """Sync a snapshot copy to disk, at some time, so that it survives a power failure. path: as in PublishAsked."""

    path: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class DeleteVersion:
    """Delete this snapshot copy in the run directory."""

    path: str


@dataclass(frozen=True, slots=True)
class StopRun:
    """End the process with exit code 1 and this reason: the run cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A fact for logs and `status`."""

    kind: str  # a short word
    text: str  # one line
    # The group that the fact is about.
    group: GroupId | None = None


ClusterAction = Send | CloseSession | DialBack | Note

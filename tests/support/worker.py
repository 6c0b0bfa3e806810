"""What tests of a worker need: roots, versions, leases, and the answers that its shell would give."""

from collections.abc import Sequence

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import (
    Digest,
    Epoch,
    GroupId,
    LeaseId,
    PublishSeq,
    RunId,
    SegmentId,
    Version,
    version_label,
)
from echo2d.core.protocol.control_messages import HeldVersions, LeaseGranted, VersionKey
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.weights.form import FRAME_BYTES_MIN, FormFacts
from echo2d.core.weights.signed_index import FormTotals, Root, running_digest
from echo2d.core.worker.events import (
    ApplyForm,
    ApplyRejected,
    EngineRefitFailed,
    EngineRefitted,
    RefitEngines,
    SnapshotReady,
)

RUN = RunId("run")


def a_key(version: int) -> VersionKey:
    return VersionKey(Version(version), digest_of(f"snapshot {version}".encode()))


def a_lease(
    number: int = 1,
    *,
    attempt: int = 1,
    samples: Sequence[int] = (0, 1),
    oldest: int = 0,
    tokens: int = 10,
    stops: Sequence[int] = (),
) -> LeaseGranted:
    return LeaseGranted(
        LeaseId(number), attempt, GroupId(number), pack_tokens([5, 6, 7]), tuple(samples), tokens, WHOLE,
        tuple(stops),
        Version(oldest), 15.0,
    )  # fmt: skip


def a_root(
    version: int, *, seq: int | None = None, epoch: int = 1, whole: bool = True, run: RunId = RUN
) -> Root:
    """The first and (if whole) last root of a full form of one segment."""
    publish = PublishSeq(version + 1 if seq is None else seq)
    facts = FormFacts(run, Epoch(epoch), Version(version), publish, "full", None, FRAME_BYTES_MIN)
    segments = (Digest(digest_of(b"segment")),)
    totals = FormTotals(1000, 2000, a_key(version).digest) if whole else None
    return Root(facts, SegmentId(0), segments, running_digest(segments), totals)


def a_snapshot(root: Root, path: str = "slot") -> SnapshotReady:
    """The form of this root is in a slot."""
    key = a_key(root.facts.version)
    return SnapshotReady(root.form, key.version, key.digest, path)


def a_rejection(order: ApplyForm) -> ApplyRejected:
    return ApplyRejected(order.form, "disk full")


def labels_of(versions: Sequence[int]) -> tuple[str, ...]:
    return tuple(version_label(*a_key(version)) for version in versions)


def a_refit(
    version: int, *, memory_ok: bool | None = True, held: Sequence[int] = ()
) -> EngineRefitted:
    """held: the versions that the engines say that they hold."""
    key = a_key(version)
    return EngineRefitted(*key, 0.25, memory_ok, 300, 1.5, labels_of(held))


def a_refit_failure(
    version: int, label: str | None = None, held: Sequence[int] = ()
) -> EngineRefitFailed:
    return EngineRefitFailed(*a_key(version), "engine died", label, held=labels_of(held))


def an_order(
    version: int, path: str = "slot", *, kept: Sequence[int] = (), most: int = 1
) -> RefitEngines:
    return RefitEngines(*a_key(version), path, kept=labels_of(kept), most=most)


def hold(most: int, *versions: int) -> HeldVersions:
    return HeldVersions(most, tuple(map(a_key, versions)))

"""Trajectories, groups and batches as values, and the byte format in which they are hashed and served.

A batch body is `pack_batch(BatchBody)`: a byte that names its format, then msgpack. Its digest is
blake3-256 of all these bytes. The learner fetches them with `GET /v1/batches/{n}` and commits to
their digest.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.codec import pack, unpacker
from echo2d.core.base.described import described
from echo2d.core.base.ids import Digest, GroupId, PeerId, Version
from echo2d.core.protocol.columns import Columns, blank_columns, cut_columns, join_columns
from echo2d.core.protocol.control_messages import Finish, VersionKey, VersionSpan
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.errors import PeerFault

# The first byte of a batch. Format 1, without that byte, had neither the ends of answers nor their
# authors; 2 had no groups with left-out samples; 3 had no sampling; 4 had no branches; 5 had neither
# columns nor attachments.
BATCH_FORMAT = 6
_BATCH_HEAD = bytes([BATCH_FORMAT])
GROUP_BYTES_MAX = 256 << 20  # a quarter of a batch: more than any reasonable group

Tokens = NDArray[np.int32]
Logprobs = NDArray[np.float32]


class AuthoredSpan(NamedTuple):
    """Worker `author` wrote output tokens [start, end) with this version."""

    start: int
    end: int
    version: Version
    digest: Digest
    author: PeerId

    @property
    def key(self) -> VersionKey:
        return VersionKey(self.version, self.digest)

    def continues(self, span: "AuthoredSpan") -> bool:
        """Whether the same worker wrote both with the same version."""
        return self[2:] == span[2:]


def authored(spans: Iterable[VersionSpan], author: PeerId) -> tuple[AuthoredSpan, ...]:
    """The spans of a worker's message, with that worker as their author."""
    return tuple([AuthoredSpan(*span, author) for span in spans])


def version_spans(spans: Iterable[AuthoredSpan]) -> tuple[VersionSpan, ...]:
    """Which version wrote which tokens, without the authors: adjacent spans of one version merge."""
    joined: list[VersionSpan] = []
    for span in spans:
        start = span.start
        if joined and joined[-1].key == span.key:
            start = joined.pop().start
        joined.append(VersionSpan(start, span.end, span.version, span.digest))
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Output tokens [start, end) that no version wrote: an environment gave them."""

    start: int
    end: int


def _tokens_in(given: tuple[GivenTokens, ...]) -> int:
    return sum([each.end - each.start for each in given])


@dataclass(frozen=True, slots=True)
class RewardPart:
    """A named number that a reward was computed from."""

    name: str
    value: float


class Attachment(NamedTuple):
    """Bytes that belong to a prompt, such as a picture. They are identified by their digest, and kept
    only once for all records that name them.
    """

    name: str  # the name of its place in the prompt
    digest: Digest
    size: int


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a prompt: the name of its task, the key of its row there, and the attachments."""

    task: str = ""
    row: str = ""
    attachments: tuple[Attachment, ...] = ()


NO_SOURCE = Source()


@dataclass(frozen=True, slots=True)
class PromptTag:
    """A fact about a prompt by which rewards are compared, such as its level."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """One whole sample."""

    sample: int
    tokens: bytes  # the output, int32
    logprobs: bytes  # float32
    # Which version and worker wrote which tokens; the spans cover all tokens except the given ones.
    spans: tuple[AuthoredSpan, ...]
    finish: Finish
    reward: float = math.nan  # NaN until it is scored
    reward_parts: tuple[RewardPart, ...] = ()
    given: tuple[GivenTokens, ...] = ()
    turns: int = 1  # how many times a policy wrote
    source: Source = NO_SOURCE
    branches: tuple[int, ...] = ()  # as in Partial
    columns: Columns = ()  # of all tokens; see the module `columns`

    @property
    def length(self) -> int:
        return len(self.tokens) // 4

    @property
    def written(self) -> int:
        """How many of its tokens were written by a version."""
        length = len(self.tokens) // 4
        return length - _tokens_in(self.given) if self.given else length

    def written_before(self, place: int) -> int:
        """How many of its first `place` tokens a version wrote; `place` is not inside given tokens."""
        return place - _tokens_in(tuple([each for each in self.given if each.end <= place]))

    def branch_start(self, place: int) -> int:
        """Where the branch that contains this token begins."""
        return max([start for start in self.branches if start <= place], default=0)

    @property
    def worker(self) -> PeerId:
        """The worker that finished it."""
        return self.spans[-1].author

    @property
    def version_min(self) -> Version:
        """The oldest version that wrote a token; versions never decrease along a trajectory."""
        return self.spans[0].version

    @property
    def version_max(self) -> Version:
        """The newest version that wrote one of its tokens."""
        return self.spans[-1].version

    def scored(self, reward: float, parts: tuple[RewardPart, ...] = ()) -> "TrajectoryRecord":
        # `replace` would take ten times as long, and this runs for every sample.
        return TrajectoryRecord(
            self.sample,
            self.tokens,
            self.logprobs,
            self.spans,
            self.finish,
            reward,
            parts,
            self.given,
            self.turns,
            self.source,
            self.branches,
            self.columns,
        )


@dataclass(frozen=True, slots=True)
class TrajectoryScore:
    """What the learner's forward pass shows about one trajectory that it trained on.

    p: a token's probability by the learner, at the run's temperature. q: the logprob that the worker
    reported.
    """

    group: int
    sample: int  # its number in the group
    # The mean of |log p - q| over the tokens in the loss, in nats, at least 0.
    k: float
    # The sum of (surprise - entropy), divided by the square root of the sum of the surprises'
    # variances. A token's surprise is -log p, and the entropy is its mean. About N(0, 1) for tokens
    # that were drawn from p.
    z: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What the learner measured in a train step; None: not measured.

    entropy and kl_... are means over the trained tokens.
    """

    entropy: float | None = described(
        "Entropy of the distributions that the last step's tokens were drawn from, in nats",
        "echo2d_learner_entropy",
        default=None,
    )
    kl_rollout: float | None = described(
        "KL(rollout, learner) of the last step, in nats", "echo2d_learner_kl_rollout", default=None
    )
    kl_base: float | None = described(
        "KL(learner, base) of the last step, in nats", "echo2d_learner_kl_base", default=None
    )
    grad_norm: float | None = described(
        "Gradient norm of the last step, before the clip", "echo2d_learner_grad_norm", default=None
    )
    truncated: float | None = described(
        "Share of the last step's answers whose last tokens the learner left out, because its rows have no room",
        "echo2d_learner_truncated",
        default=None,
    )
    loss: float | None = described("Loss of the last step", "echo2d_learner_loss", default=None)
    mfu: float | None = described(
        "Share of the devices' peak operations that the last step used; no value: the peak is not known",
        "echo2d_learner_mfu",
        default=None,
    )
    kl_teacher: float | None = described(
        "KL(learner, teacher) of the last step, in nats", "echo2d_learner_kl_teacher", default=None
    )


@dataclass(frozen=True, slots=True)
class Partial:
    """The first output tokens of an unfinished sample, packed as in TrajectoryRecord."""

    tokens: bytes = b""
    logprobs: bytes = b""
    spans: tuple[AuthoredSpan, ...] = ()
    given: tuple[GivenTokens, ...] = ()
    # Where an agent began a new context: the tokens from there on follow the prompt directly. Each
    # branch begins with given tokens.
    branches: tuple[int, ...] = ()
    # The columns of all tokens. A later attempt may lose them, so comparisons ignore them.
    columns: Columns = field(default=(), compare=False)

    @property
    def length(self) -> int:
        return len(self.tokens) // 4

    @property
    def written(self) -> int:
        """How many of its tokens were written by a version."""
        length = len(self.tokens) // 4
        return length - _tokens_in(self.given) if self.given else length

    @property
    def turn_start(self) -> int:
        """Where the current turn begins: after the last given token."""
        return self.given[-1].end if self.given else 0

    @property
    def branch_start(self) -> int:
        """Where the newest branch begins."""
        return self.branches[-1] if self.branches else 0

    @property
    def branch(self) -> bytes:
        """The tokens that an engine reads after the prompt: those of the newest branch."""
        return self.tokens[4 * self.branch_start :] if self.branches else self.tokens

    @property
    def version_min(self) -> Version | None:
        """The oldest version that wrote a token; None: there are no tokens."""
        return self.spans[0].version if self.spans else None

    @property
    def version_last(self) -> Version:
        """The newest version so far; later tokens must come from it or a newer one."""
        return self.spans[-1].version if self.spans else Version(0)

    def shares(self) -> dict[PeerId, float]:
        """For each author, the share of the written tokens that it wrote."""
        shares: dict[PeerId, float] = {}
        for span in self.spans:
            own = (span.end - span.start) / self.written
            shares[span.author] = shares.get(span.author, 0.0) + own
        return shares

    def plus(
        self,
        tokens: bytes,
        logprobs: bytes,
        spans: Iterable[AuthoredSpan],
        *,
        shift: int = 0,
        columns: Columns = (),
    ) -> "Partial":
        """This partial followed by more tokens.

        shift: is added to the positions of `spans`. Adjacent spans of one version and author merge.
        """
        joined = list(self.spans)
        for span in spans:
            start = span.start + shift
            if joined and joined[-1].end == start and joined[-1].continues(span):
                start = joined.pop().start
            joined.append(AuthoredSpan(start, span.end + shift, *span[2:]))
        if columns or self.columns:
            # A column is dropped only if an engine's tokens lack it. Tokens that were given, not generated, and precede
            # the engine's first ones get zeros.
            before = self.columns if self.spans else blank_columns(columns, self.length)
            columns = join_columns([(self.length, before), (len(tokens) // 4, columns)])
        tokens, logprobs = self.tokens + tokens, self.logprobs + logprobs
        return Partial(tokens, logprobs, tuple(joined), self.given, self.branches, columns)

    def with_given(self, tokens: bytes, *, anew: bool = False) -> "Partial":
        """This partial followed by tokens that an environment gave. anew: whether they begin a branch."""
        if not tokens:
            return self
        count = len(tokens) // 4
        given = GivenTokens(self.length, self.length + count)
        logprobs = self.logprobs + bytes(len(tokens))  # 0.0 each
        branches = (*self.branches, self.length) if anew and self.tokens else self.branches
        blank = blank_columns(self.columns, count)
        columns = join_columns([(self.length, self.columns), (count, blank)])
        return Partial(
            self.tokens + tokens, logprobs, self.spans, (*self.given, given), branches, columns
        )

    def first(self, length: int) -> "Partial":
        """The first `length` tokens, or all if there are fewer."""
        if self.length <= length:
            return self
        spans = [s._replace(end=min(s.end, length)) for s in self.spans if s.start < length]
        given = [GivenTokens(g.start, min(g.end, length)) for g in self.given if g.start < length]
        tokens, logprobs = self.tokens[: 4 * length], self.logprobs[: 4 * length]
        branches = tuple([start for start in self.branches if start < length])
        columns = cut_columns(self.columns, 0, length)
        return Partial(tokens, logprobs, tuple(spans), tuple(given), branches, columns)


NOTHING = Partial()


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The trajectories of one prompt. A group reaches the learner whole, or without the samples that it declares as
    left out (I5).
    """

    group: GroupId
    prompt: bytes
    trajectories: tuple[TrajectoryRecord, ...]
    # Samples without a trajectory, because their reward could not be computed, or because more were
    # drawn than are trained on.
    left_out: tuple[int, ...] = ()
    sampling: Sampling = WHOLE  # how all its tokens were drawn
    tags: tuple[PromptTag, ...] = ()  # of the prompt

    @property
    def version_min(self) -> Version:
        return min(trajectory.version_min for trajectory in self.trajectories)

    @property
    def version_max(self) -> Version:
        """The newest version that wrote one of its tokens."""
        return max(trajectory.version_max for trajectory in self.trajectories)

    def uses(self, keys: Collection[VersionKey]) -> bool:
        """Whether one of these versions wrote a token of the group."""
        return any(
            span.key in keys for trajectory in self.trajectories for span in trajectory.spans
        )


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as the ledger returns it, neither dropped nor deleted. Unscored rewards are NaN."""

    record: GroupRecord
    cursor: int
    source: Source = NO_SOURCE


@dataclass(frozen=True, slots=True)
class BatchBody:
    """The groups of one train step, in the order in which they were admitted."""

    step: int
    trajectories: int  # how many all groups have together
    groups: tuple[GroupRecord, ...]

    @staticmethod
    def of(step: int, groups: Sequence[GroupRecord]) -> "BatchBody":
        return BatchBody(step, sum(len(group.trajectories) for group in groups), tuple(groups))


# The limit has room for 16k trajectories of 1,300 tokens at 400 B a token, those of a large mixture's experts.
_unpack_batch = unpacker(BatchBody, bytes_max=8 << 30)


def unpack_batch(body: bytes) -> BatchBody:
    """The inverse of `pack_batch`. PeerFault: the body is no batch, or has another format."""
    if body[:1] != _BATCH_HEAD:
        raise PeerFault(
            f"this is no batch of format {BATCH_FORMAT}; it begins with {body[:1]!r}: "
            "run the same echo2d as the coordinator"
        )
    batch: BatchBody = _unpack_batch(memoryview(body)[1:])
    if (count := sum(len(group.trajectories) for group in batch.groups)) != batch.trajectories:
        raise PeerFault(f"batch {batch.step} has {count} trajectories, not {batch.trajectories}")
    return batch


def batch_digest(body: bytes) -> Digest:
    return digest_of(body)


def pack_batch(batch: BatchBody) -> bytes:
    return _BATCH_HEAD + pack(batch)


def pack_group(group: GroupRecord) -> bytes:
    """The bytes of a group in a batch body."""
    return pack(group)


def join_batch(step: int, trajectories: int, groups: Sequence[bytes]) -> bytes:
    """`pack_batch` for groups that are packed already and have this many trajectories together."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(len(fields(BatchBody)))
    packer.pack(step)
    packer.pack(trajectories)
    packer.pack_array_header(len(groups))
    return b"".join([_BATCH_HEAD, packer.bytes(), *groups])


def pack_tokens(tokens: Iterable[int]) -> bytes:
    return np.fromiter(tokens, dtype="<i4").tobytes()


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    return np.fromiter(logprobs, dtype="<f4").tobytes()


def unpack_tokens(data: bytes) -> Tokens:
    """int32 [n], read-only. PeerFault: the length is not a multiple of 4."""
    if len(data) % 4:
        raise PeerFault(f"tokens: expected a multiple of 4 bytes; found {len(data)}")
    return np.frombuffer(data, dtype="<i4")


def unpack_logprobs(data: bytes) -> Logprobs:
    """float32 [n], read-only. PeerFault: the length is not a multiple of 4."""
    if len(data) % 4:
        raise PeerFault(f"logprobs: expected a multiple of 4 bytes; found {len(data)}")
    return np.frombuffer(data, dtype="<f4")

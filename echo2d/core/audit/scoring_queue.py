"""The answers that wait for an auditor, by the version that wrote them.

    put --> waiting, version by version --take--> one order: answers of one version
                |                                     |
                +--lose: its version has no copy      +--put again, if the auditor went away

An auditor has one resident copy of the model, so loading a version is what costs. An order takes
answers of one version: what is urgent first, and what is loaded before anything else. The newest
version is loaded for answers that are not urgent once one has waited for SCORING_PATIENCE_S; an older one at
once, because its copy will go. Every FAIR_TURN-th order is for what is not urgent, so that workers on
trial cannot keep all others from being audited.
Kept true: at most SCORED_VERSIONS_MAX versions and BYTES_MAX bytes wait.
Not here: whose answers are audited (`audits`), and where a version's copy is (`cluster/versions`).
"""

from collections import Counter
from collections.abc import Collection, Container
from dataclasses import dataclass, field

from echo2d.core.audit.waiting_samples import WaitingSample
from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.protocol.control_messages import AnswerToScore, VersionKey
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.rules.audit import AnswerClass

# Their copies stay on the learner host's disk while something waits for them.
SCORED_VERSIONS_MAX = 6
BYTES_MAX = 128 << 20
# One order: a second or a few of an auditor's work, and well below the limit of a message.
ANSWERS_MAX = 64
ORDER_BYTES_MAX = 512 << 10
SCORING_PATIENCE_S = 10.0
FAIR_TURN = 4
# Orders that an answer may be part of; after that something is wrong with it.
TRIES_MAX = 3


@dataclass(slots=True)
class AuditItem:
    """What one worker wrote of one sample.

    left: parts that are not scored yet. found: of the others, together. waiting: the sample, if its
    group waits for the verdict. drawn: by its share, not because its worker is on trial. teaches:
    limits are learnt from it. kind: whose limits it is judged by.
    over: it is scored or given up.
    """

    worker: PeerId
    group: GroupId
    sample: int
    versions: tuple[int, ...]
    waiting: WaitingSample | None
    left: int
    found: Evidence | None = None
    drawn: bool = False
    teaches: bool = False
    kind: AnswerClass = field(default_factory=AnswerClass)
    over: bool = False

    @property
    def urgent(self) -> bool:
        return self.waiting is not None or self.teaches


@dataclass(slots=True)
class AnswerPart:
    """The tokens of an item that one version wrote. since: when it began to wait."""

    item: AuditItem
    key: VersionKey
    answer: AnswerToScore
    since: float
    tries: int = 0

    @property
    def bytes(self) -> int:
        return len(self.answer.prompt) + 2 * len(self.answer.tokens)

    @property
    def tokens(self) -> int:
        """That one forward pass takes."""
        return (len(self.answer.prompt) + len(self.answer.tokens)) // 4


class ScoringQueue:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._parts: dict[VersionKey, list[AnswerPart]] = {}
        self._urgent: Counter[VersionKey] = Counter()
        self._bytes = 0
        self._turns = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def versions(self) -> Collection[VersionKey]:
        return self._parts.keys()

    def put(self, part: AnswerPart) -> list[AnswerPart]:
        """Let it wait. Returns the parts that there is no room for any more."""
        if self._bytes + part.bytes > BYTES_MAX or part.tries >= TRIES_MAX:
            return [part]
        self._parts.setdefault(part.key, []).append(part)
        self._urgent[part.key] += part.item.urgent
        self._bytes += part.bytes
        if len(self._parts) <= SCORED_VERSIONS_MAX:
            return []
        return self.lose(min(self._parts, key=lambda key: (self._urgent[key] > 0, key)))

    def lose(self, key: VersionKey) -> list[AnswerPart]:
        """Nobody can score this version's answers any more; returns them."""
        lost = self._parts.get(key, [])
        self._keep(key, [])
        return lost

    def forget(self, worker: PeerId) -> list[AnswerPart]:
        """Nothing that this worker wrote needs to be scored any more; returns it."""
        theirs = [
            part for parts in self._parts.values() for part in parts if part.item.worker == worker
        ]
        for key in {part.key for part in theirs}:
            self._keep(key, [part for part in self._parts[key] if part.item.worker != worker])
        return theirs

    def take(
        self,
        scorable: Container[VersionKey | None],
        *,
        loaded: VersionKey | None,
        newest: VersionKey | None,
        tokens_max: int,
        now: float,
    ) -> list[AnswerPart]:
        """The parts of the next order, all of one version; none: nothing is due.

        scorable: the versions that the auditor can load. loaded: the one that it has loaded.
        tokens_max: of the order, but for its first part.
        """
        fair = self._turns % FAIR_TURN == FAIR_TURN - 1
        due = [
            ((not self._urgent[key]) ^ fair, key != loaded, key)
            for key, parts in self._parts.items()
            if key in scorable
            and (self._urgent[key] or key == loaded or now >= self._due_at(key, parts, newest))
        ]
        if not due:
            return []
        self._turns += 1
        return self._cut(min(due)[2], tokens_max, fair=fair)

    def due_at(self, newest: VersionKey | None) -> float | None:
        """When the first answer that is not urgent has waited for long enough."""
        times = (self._due_at(key, parts, newest) for key, parts in self._parts.items())
        return min(times, default=None)

    # --- inside

    @staticmethod
    def _due_at(key: VersionKey, parts: list[AnswerPart], newest: VersionKey | None) -> float:
        # The first one of a version has waited longest, but for those that were put again.
        return parts[0].since + (SCORING_PATIENCE_S if key == newest else 0.0)

    def _keep(self, key: VersionKey, kept: list[AnswerPart]) -> None:
        """These are left of a version's parts."""
        before = self._parts.pop(key, [])
        self._bytes += sum(part.bytes for part in kept) - sum(part.bytes for part in before)
        del self._urgent[key]
        if kept:
            self._parts[key] = kept
            self._urgent[key] = sum(part.item.urgent for part in kept)

    def _cut(self, key: VersionKey, tokens_max: int, *, fair: bool) -> list[AnswerPart]:
        """Take out as many parts as an order holds, the urgent ones first; at least one.

        A part that was in an order which failed is tried alone: another part may have failed it.
        """
        waiting = sorted(
            self._parts[key], key=lambda part: ((not part.item.urgent) ^ fair, part.tries)
        )
        order, size, tokens = list[AnswerPart](), 0, 0
        for part in waiting[:ANSWERS_MAX]:
            size, tokens = size + part.bytes, tokens + part.tokens
            if order and (part.tries or size > ORDER_BYTES_MAX or tokens > tokens_max):
                break
            order.append(part)
            if part.tries:
                break
        self._keep(key, waiting[len(order) :])
        return order

    def check(self) -> None:
        assert len(self._parts) <= SCORED_VERSIONS_MAX
        assert all(self._parts.values())
        assert self._urgent == {
            key: sum(part.item.urgent for part in parts) for key, parts in self._parts.items()
        }
        waiting = sum(part.bytes for parts in self._parts.values() for part in parts)
        assert waiting == self._bytes <= BYTES_MAX

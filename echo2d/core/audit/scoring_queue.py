"""The answers that wait for an auditor, by the version that wrote them.

    put --> waiting, version by version --take--> one order: answers of one version
                |                                     |
                +--lose: its version has no copy      +--put again, if the auditor went away

An auditor holds one version at a time, and loading another one is expensive. So all answers of an
order are of one version. Versions with urgent answers come first; among equals, the loaded version
does. If a version has no urgent answers, it is loaded at once if it is an older one, because its copy
will be deleted, and otherwise once an answer has waited for SCORING_PATIENCE_S. Every FAIR_TURN-th
order prefers answers that are not urgent, so that workers on trial cannot keep all others from being
audited.
Kept true: at most SCORED_VERSIONS_MAX versions and BYTES_MAX bytes wait.
Not here: whose answers are audited (`audits`), and where a version's copy is (`cluster/versions`).
"""

from collections import Counter
from collections.abc import Collection, Container
from dataclasses import dataclass, field, replace

from echo2d.core.audit.waiting_samples import WaitingSample
from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.protocol.columns import columns_bytes
from echo2d.core.protocol.control_messages import AnswerToScore, VersionKey
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.rules.audit import AnswerClass

# Answers of at most this many versions wait; meanwhile the versions' copies stay on the learner host.
SCORED_VERSIONS_MAX = 6
BYTES_MAX = 128 << 20
# Limits of one order: some seconds of an auditor's work, and well below the limit of a message.
ANSWERS_MAX = 64
ORDER_BYTES_MAX = 512 << 10
SCORING_PATIENCE_S = 10.0
FAIR_TURN = 4
# An answer may be part of this many orders; if none of them scores it, it is given up.
TRIES_MAX = 3


@dataclass(slots=True)
class AuditItem:
    """What one worker wrote of one sample."""

    worker: PeerId
    group: GroupId
    sample: int
    versions: tuple[int, ...]
    # The sample, if its group waits for the verdict.
    waiting: WaitingSample | None
    # Parts that are not scored yet.
    left: int
    # What the scored parts gave together.
    found: Evidence | None = None
    # Whether the draw chose the item for an audit; the audit of a worker on trial needs no draw.
    drawn: bool = False
    # Limits are learnt from the item.
    teaches: bool = False
    # The item is judged by the limits of this class.
    kind: AnswerClass = field(default_factory=AnswerClass)
    # The item is scored or given up.
    over: bool = False

    @property
    def urgent(self) -> bool:
        return self.waiting is not None or self.teaches


@dataclass(slots=True)
class AnswerPart:
    """The tokens of an item that one version wrote."""

    item: AuditItem
    key: VersionKey
    answer: AnswerToScore
    # When the part began to wait.
    since: float
    tries: int = 0

    @property
    def bytes(self) -> int:
        answer = self.answer
        return len(answer.prompt) + 2 * len(answer.tokens) + columns_bytes(answer.columns)

    @property
    def tokens(self) -> int:
        """The tokens of one forward pass."""
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
        """Let this part wait. Returns the parts for which there is no room any more."""
        if self._bytes + part.bytes > BYTES_MAX:
            # Tokens matter more than their experts.
            part = replace(part, answer=replace(part.answer, columns=()))
        if self._bytes + part.bytes > BYTES_MAX or part.tries >= TRIES_MAX:
            return [part]
        self._parts.setdefault(part.key, []).append(part)
        self._urgent[part.key] += part.item.urgent
        self._bytes += part.bytes
        if len(self._parts) <= SCORED_VERSIONS_MAX:
            return []
        return self.lose(min(self._parts, key=lambda key: (self._urgent[key] > 0, key)))

    def lose(self, key: VersionKey) -> list[AnswerPart]:
        """No auditor can score this version's answers any more: remove and return them."""
        lost = self._parts.get(key, [])
        self._keep(key, [])
        return lost

    def forget(self, worker: PeerId) -> list[AnswerPart]:
        """This worker's answers need not be scored any more: remove and return them."""
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
        tokens_max: the limit of an order; only its first part may exceed it.
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
        # The first part of a version has waited longest, except for parts that were put again.
        return parts[0].since + (SCORING_PATIENCE_S if key == newest else 0.0)

    def _keep(self, key: VersionKey, kept: list[AnswerPart]) -> None:
        """Keep only these of the parts that wait for this version."""
        before = self._parts.pop(key, [])
        self._bytes += sum(part.bytes for part in kept) - sum(part.bytes for part in before)
        del self._urgent[key]
        if kept:
            self._parts[key] = kept
            self._urgent[key] = sum(part.item.urgent for part in kept)

    def _cut(self, key: VersionKey, tokens_max: int, *, fair: bool) -> list[AnswerPart]:
        """Take out as many parts as an order holds, but at least one; the urgent ones come first.

        A part whose last order failed is tried alone, because another part may have caused the failure.
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

"""One version's answers to the questions of one [[eval]], while they are written and scored.

    waiting --lease--> leased --result--> kept --reward--> scored
       ^                  |                  |
       +--- lease ended --+    given up <----+-- failed too often, or its reward did

Kept true: every answer is in one of these places, and this version alone wrote all its tokens.
Not here: which worker writes an answer, and which results are believed (`evaluations`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.cluster.rules import EvalRules
from echo2d.core.evaluation.questions import ROWS_MAX, EvalQuestion
from echo2d.core.evaluation.summary import ScoredSample
from echo2d.core.protocol.control_messages import HeldLease, VersionKey
from echo2d.core.rollouts.leases import Lease

# Groups above belong to evaluations, those of the gateway's calls lie higher still.
GROUP_FIRST = 1 << 61
# Leases of one answer that may end without it.
FAILURES_MAX = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer that is wanted: sample number `sample` to the question `cursor`."""

    cursor: int
    sample: int


class OpenEvaluation:
    """See the module docstring. serial: no other one of this process has it."""

    def __init__(
        self,
        rules: EvalRules,
        key: VersionKey,
        questions: Sequence[EvalQuestion],
        *,
        serial: int,
        now: float,
    ) -> None:
        self.rules, self.key, self.began_at = rules, key, now
        self._questions = {question.cursor: question for question in questions}
        self._first = GROUP_FIRST + serial * ROWS_MAX
        # In the order of the questions.
        self._waiting = {question.cursor: set(range(rules.samples)) for question in questions}
        self.leased: dict[HeldLease, Lease] = {}
        self._kept: dict[Asked, ScoredSample] = {}
        self._scored: dict[Asked, ScoredSample] = {}
        self._given_up: set[Asked] = set()
        self._failures: Counter[Asked] = Counter()
        # Workers that failed a lease of this evaluation, and until when they get none.
        self._avoided: dict[PeerId, float] = {}

    @property
    def of(self) -> int:
        return len(self._questions)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not (self._waiting or self.leased or self._kept)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self.leased or self._kept)

    @property
    def answered(self) -> int:
        """Answers that are written."""
        return len(self._kept) + len(self._scored)

    def avoid(self, worker: PeerId, until: float) -> None:
        """Lease nothing of this evaluation to this worker for a while."""
        self._avoided[worker] = until

    def avoids(self, worker: PeerId, now: float) -> bool:
        return now < self._avoided.get(worker, now)

    def avoids_until(self, now: float) -> float | None:
        """When a worker may be tried again; None: all may be, or nothing waits."""
        times = [until for until in self._avoided.values() if until > now]
        return min(times, default=None) if self._waiting else None

    def group(self, cursor: int) -> GroupId:
        return GroupId(self._first + cursor)

    def question(self, group: GroupId) -> EvalQuestion | None:
        """The question that this group is of; None: it is another evaluation's."""
        return self._questions.get(group - self._first)

    def waiting(self) -> Iterator[tuple[EvalQuestion, list[int]]]:
        """The questions with waiting answers. Answers may be leased between two of them."""
        for cursor in list(self._waiting):
            if cursor in self._waiting:
                yield self._questions[cursor], sorted(self._waiting[cursor])

    def waiting_of(self, question: EvalQuestion) -> list[int]:
        """The samples of this question that wait."""
        return sorted(self._waiting.get(question.cursor, ()))

    def lease(self, question: EvalQuestion, lease: Lease) -> None:
        """These answers are being written."""
        left = self._waiting[question.cursor]
        left -= lease.samples
        if not left:
            del self._waiting[question.cursor]
        self.leased[lease.key] = lease

    def ended(self, lease: Lease) -> None:
        """The lease is over: what it has not written waits again, unless that failed too often."""
        del self.leased[lease.key]
        cursor = lease.given.group - self._first
        for sample in lease.samples:
            asked = Asked(cursor, sample)
            self._failures[asked] += 1
            if self._failures[asked] > FAILURES_MAX:
                self._given_up.add(asked)
            else:
                self._waiting.setdefault(cursor, set()).add(sample)

    def keep(self, lease: Lease, sample: int, written: ScoredSample) -> None:
        """An answer is written, not scored yet. Its lease may have ended with it."""
        self._kept[Asked(lease.given.group - self._first, sample)] = written
        if not lease.samples:
            del self.leased[lease.key]

    def kept(self, group: GroupId, sample: int) -> ScoredSample | None:
        """An answer that waits for its reward."""
        return self._kept.get(Asked(group - self._first, sample))

    def score(self, group: GroupId, sample: int, scored: ScoredSample | None) -> None:
        """A reward has come; None: it cannot be had."""
        asked = Asked(group - self._first, sample)
        del self._kept[asked]
        if scored is None:
            self._given_up.add(asked)
        else:
            self._scored[asked] = scored

    def whole_rows(self) -> list[list[ScoredSample]]:
        """The scored answers of the questions that have all of them."""
        rows = []
        for cursor in self._questions:
            each = [Asked(cursor, sample) for sample in range(self.rules.samples)]
            if all(asked in self._scored for asked in each):
                rows.append([self._scored[asked] for asked in each])
        return rows

    def check(self) -> None:
        places = Counter(
            [
                *(
                    Asked(cursor, sample)
                    for cursor, left in self._waiting.items()
                    for sample in left
                ),
                *(
                    Asked(lease.given.group - self._first, sample)
                    for lease in self.leased.values()
                    for sample in lease.samples
                ),
                *self._kept,
                *self._scored,
                *self._given_up,
            ]
        )
        assert all(self._waiting.values())
        assert all(count == 1 for count in places.values()), "an answer in two places"
        assert len(places) == len(self._questions) * self.rules.samples, "an answer is lost"

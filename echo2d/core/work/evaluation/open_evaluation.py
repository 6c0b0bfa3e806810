"""One version's answers to the questions of one [[eval]], while they are written and scored.

    waiting --lease--> leased --result--> kept --reward--> scored
       ^                  |                  |
       +--- lease ended --+    given up <----+-- failed too often, or its reward did

    of an environment: leased --a turn ends--> parked --the environment answers--> waiting, or kept

Invariant: every answer is in one of these places, and only this version wrote its tokens.
Not here: which worker writes an answer, and which results are believed (`evaluations`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.protocol.control_messages import HeldLease, VersionKey
from echo2d.core.rules.tasks import EvalRules
from echo2d.core.work.episodes import Episode, Parked, ParkedEpisode
from echo2d.core.work.evaluation.questions import ROWS_MAX, EvalQuestion
from echo2d.core.work.evaluation.summary import ScoredSample
from echo2d.core.work.events import TurnKept
from echo2d.core.work.leases import Lease, group_of

# The number of this kind of work. The seeds of answers are derived from its groups: another number would change them.
EVALUATION = 2
# This many leases of one answer may end without it; then it is given up.
ANSWER_FAILURES_MAX = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """One wanted answer: sample number `sample` to the question `cursor`."""

    cursor: int
    sample: int


class OpenEvaluation:
    """See the module docstring. serial: a number that no other evaluation of this process has."""

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
        self._first = group_of(EVALUATION, serial * ROWS_MAX)
        # Waiting samples without tokens, in the order of the questions.
        self._waiting = {question.cursor: set(range(rules.samples)) for question in questions}
        # Waiting answers that have earlier turns, in the order in which they began to wait.
        self._going_on: dict[Asked, None] = {}
        self._parked: dict[Asked, Parked] = {}
        # What unfinished answers have from earlier turns.
        self._episodes: dict[Asked, Episode] = {}
        # Accepted turns whose workers have not been told so.
        self._held_back: dict[Asked, TurnKept] = {}
        self._held_back_of: Counter[PeerId] = Counter()
        # Answers given up in the middle of an episode, which the environment does not know yet.
        self._dropped: list[Asked] = []
        self.leased: dict[HeldLease, Lease] = {}
        self._kept: dict[Asked, ScoredSample] = {}
        self._scored: dict[Asked, ScoredSample] = {}
        self._given_up: set[Asked] = set()
        self._failures: Counter[Asked] = Counter()
        # The workers that failed a lease of this evaluation, and until when each gets none.
        self._avoided: dict[PeerId, float] = {}

    @property
    def of(self) -> int:
        return len(self._questions)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.idle and not self._any_wait

    @property
    def idle(self) -> bool:
        """Whether no answer is leased, parked or waiting for its reward."""
        return not (self.leased or self._parked or self._kept)

    @property
    def answered(self) -> int:
        """How many answers are written."""
        return len(self._kept) + len(self._scored)

    def avoid(self, worker: PeerId, until: float) -> None:
        """Lease nothing of this evaluation to this worker for a while."""
        self._avoided[worker] = until

    def avoids(self, worker: PeerId, now: float) -> bool:
        return now < self._avoided.get(worker, now)

    def avoids_until(self, now: float) -> float | None:
        """When an avoided worker may be tried again; None: no worker is avoided, or nothing waits."""
        times = [until for until in self._avoided.values() if until > now]
        return min(times, default=None) if self._any_wait else None

    def group(self, cursor: int) -> GroupId:
        return GroupId(self._first + cursor)

    def question(self, group: GroupId) -> EvalQuestion | None:
        """The question of this group; None: the group belongs to another evaluation."""
        return self._questions.get(group - self._first)

    def waiting(self) -> Iterator[tuple[EvalQuestion, int]]:
        """The waiting answers, continued ones first. Answers may be leased between two of them."""
        for asked in list(self._going_on):
            yield self._questions[asked.cursor], asked.sample
        for cursor in list(self._waiting):
            for sample in sorted(self._waiting.get(cursor, ())):
                if sample in self._waiting.get(cursor, ()):
                    yield self._questions[cursor], sample

    def waits(self, question: EvalQuestion, sample: int) -> bool:
        """Whether this answer still waits for a lease."""
        fresh = self._waiting.get(question.cursor, ())
        return sample in fresh or Asked(question.cursor, sample) in self._going_on

    def waiting_of(self, question: EvalQuestion) -> list[int]:
        """The samples of this question that wait and have no tokens yet."""
        return sorted(self._waiting.get(question.cursor, ()))

    def episode(self, group: GroupId, sample: int) -> Episode | None:
        """What an unfinished answer has from earlier turns; None: its first turn has not ended."""
        return self._episodes.get(self._asked(group, sample))

    def lease(self, question: EvalQuestion, lease: Lease) -> None:
        """Record that these answers are being written. A continued answer is alone in its lease."""
        self.leased[lease.key] = lease
        if lease.given.base.length:
            (sample,) = lease.samples
            del self._going_on[Asked(question.cursor, sample)]
            return
        left = self._waiting[question.cursor]
        left -= lease.samples
        if not left:
            del self._waiting[question.cursor]

    def ended(self, lease: Lease) -> None:
        """The lease has ended: its unwritten answers wait again, or are given up after too many failures."""
        del self.leased[lease.key]
        cursor = lease.given.group - self._first
        for sample in lease.samples:
            asked = Asked(cursor, sample)
            self._failures[asked] += 1
            if self._failures[asked] > ANSWER_FAILURES_MAX:
                self._given_up.add(asked)
                if self._episodes.pop(asked, None) is not None:
                    self._dropped.append(asked)
            elif asked in self._episodes:
                self._going_on[asked] = None
            else:
                self._waiting.setdefault(cursor, set()).add(sample)

    def keep(self, lease: Lease, sample: int, written: ScoredSample) -> None:
        """Keep a written answer, which is not scored yet. Its lease may have ended with it."""
        self._kept[self._asked(lease.given.group, sample)] = written
        if not lease.samples:
            del self.leased[lease.key]

    def park(self, lease: Lease, parked: Parked, *, held_back_max: int) -> bool:
        """Park an answer whose turn has ended, perhaps together with its lease, until the environment answers.

        Returns whether the turn is held back: then its worker learns that it was accepted only after `take_held_back`.
        held_back_max: at most this many turns of one worker are held back.
        """
        turn = parked.turn
        asked = self._asked(turn.group, turn.sample)
        self._parked[asked] = parked
        if not lease.samples:
            del self.leased[lease.key]
        if self._held_back_of[parked.worker] >= held_back_max:
            return False
        self._held_back[asked] = turn
        self._held_back_of[parked.worker] += 1
        return True

    def parked_episode(self, group: GroupId, sample: int) -> ParkedEpisode | None:
        """The parked answer that waits for the environment; None: it is not parked."""
        asked, question = self._asked(group, sample), self.question(group)
        parked = self._parked.get(asked)
        if parked is None or question is None:
            return None
        # All versions get the same seeds of episodes, so that chance makes their scores differ less.
        seed_group = group_of(EVALUATION, question.cursor)
        return ParkedEpisode(
            parked,
            self._episodes.get(asked),
            self.rules.task,
            self.rules.name,
            question.cursor,
            question.tokens,
            seed_group,
        )

    def go_on(self, group: GroupId, sample: int, episode: Episode) -> None:
        """The environment has answered: the next turn waits."""
        asked = self._asked(group, sample)
        del self._parked[asked]
        self._episodes[asked] = episode
        self._going_on[asked] = None

    def end_episode(self, group: GroupId, sample: int, written: ScoredSample) -> None:
        """Keep a finished episode, which is not scored yet."""
        asked = self._asked(group, sample)
        del self._parked[asked]
        self._episodes.pop(asked, None)
        self._kept[asked] = written

    def take_held_back(self, group: GroupId, sample: int) -> TurnKept | None:
        """Take the last turn of this answer, if its worker must still learn that it was accepted."""
        turn = self._held_back.pop(self._asked(group, sample), None)
        if turn is not None:
            self._held_back_of[turn.worker] -= 1
        return turn

    def take_dropped(self) -> list[tuple[GroupId, int]]:
        """Take the episodes that were given up since the last call."""
        dropped, self._dropped = self._dropped, []
        return [(self.group(asked.cursor), asked.sample) for asked in dropped]

    def close(self) -> list[TurnKept]:
        """Give up all that is unfinished. Returns the turns whose workers must now learn that they were accepted."""
        self._dropped += dict.fromkeys([*self._parked, *self._episodes])
        return list(self._held_back.values())

    def kept(self, group: GroupId, sample: int) -> ScoredSample | None:
        """An answer that waits for its reward."""
        return self._kept.get(self._asked(group, sample))

    def score(self, group: GroupId, sample: int, scored: ScoredSample | None) -> None:
        """Record a scored answer; None: its reward cannot be computed."""
        asked = self._asked(group, sample)
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

    # --- inside

    @property
    def _any_wait(self) -> bool:
        return bool(self._waiting or self._going_on)

    def _asked(self, group: GroupId, sample: int) -> Asked:
        return Asked(group - self._first, sample)

    def check(self) -> None:
        places = Counter(
            [
                *(
                    Asked(cursor, sample)
                    for cursor, left in self._waiting.items()
                    for sample in left
                ),
                *(
                    self._asked(lease.given.group, sample)
                    for lease in self.leased.values()
                    for sample in lease.samples
                ),
                *self._going_on,
                *self._parked,
                *self._kept,
                *self._scored,
                *self._given_up,
            ]
        )
        assert all(self._waiting.values())
        assert all(count == 1 for count in places.values()), "an answer in two places"
        assert len(places) == len(self._questions) * self.rules.samples, "an answer is lost"
        assert self._going_on.keys() <= self._episodes.keys()
        finished = {*self._kept, *self._scored, *self._given_up}
        assert finished.isdisjoint(self._episodes)
        assert self._held_back.keys() <= {*self._parked, *self._going_on}
        authors = [span for each in self._episodes.values() for span in each.partial.spans]
        assert all(span.key == self.key for span in authors), "another version wrote a turn"
        assert +self._held_back_of == Counter(each.worker for each in self._held_back.values())

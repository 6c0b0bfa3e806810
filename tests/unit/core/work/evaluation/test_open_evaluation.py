"""Answers move from waiting to scored, and none is lost or in two places."""

from dataclasses import replace

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.protocol.trajectory import NOTHING, AuthoredSpan, GivenTokens, pack_tokens
from echo2d.core.rules.tasks import EvalRules, TaskRules
from echo2d.core.work.episodes import Parked
from echo2d.core.work.evaluation.open_evaluation import (
    ANSWER_FAILURES_MAX,
    EVALUATION,
    OpenEvaluation,
)
from echo2d.core.work.evaluation.questions import ROWS_MAX, EvalQuestion
from echo2d.core.work.evaluation.summary import ScoredSample
from echo2d.core.work.events import EnvironmentStepped, EpisodeEnded, TurnKept
from echo2d.core.work.leases import Lease, LeaseTable, group_of
from tests.support.coordinator_world import version_key

RULES = EvalRules(
    TaskRules(
        "held",
        max_new_tokens=1024,
    ),
    samples=2,
    every=1,
    rows=0,
    hold_s=60.0,
    solved_at=1.0,
)
WRITTEN = ScoredSample(float("nan"), (), 3, truncated=False)


class Desk:
    """An evaluation of three questions with two answers each, and its leases."""

    def __init__(self, serial: int = 0) -> None:
        questions = [EvalQuestion(cursor, b"1234") for cursor in (4, 0, 7)]
        self.leases = LeaseTable(1, 15.0)
        self.open = OpenEvaluation(
            RULES, version_key(Version(3)), questions, serial=serial, now=0.0
        )
        self.open.check()

    def lease(self, cursor: int, *samples: int) -> Lease:
        group = self.open.group(cursor)
        lease = self.leases.start(
            None, group, PeerId("w"), self.open.key, samples, room=64, now=0.0
        )
        question = self.open.question(group)
        assert question is not None
        self.open.lease(question, lease)
        self.open.check()
        return lease

    def write(self, lease: Lease, sample: int) -> None:
        self.leases.answer(lease, sample)
        self.open.keep(lease, sample, WRITTEN)
        self.open.check()

    def score(self, lease: Lease, sample: int, reward: float | None) -> None:
        scored = None if reward is None else replace(WRITTEN, reward=reward)
        self.open.score(lease.given.group, sample, scored)
        self.open.check()

    def waiting(self) -> list[tuple[int, list[int]]]:
        """The questions with answers that wait, in their order."""
        samples: dict[int, list[int]] = {}
        for question, sample in self.open.waiting():
            samples.setdefault(question.cursor, []).append(sample)
        return list(samples.items())


def test_an_answer_moves_from_waiting_to_scored() -> None:
    desk = Desk()
    assert desk.waiting() == [(4, [0, 1]), (0, [0, 1]), (7, [0, 1])]
    lease = desk.lease(0, 0, 1)
    assert desk.waiting() == [(4, [0, 1]), (7, [0, 1])]
    desk.write(lease, 1)
    assert desk.open.kept(lease.given.group, 1) == WRITTEN
    assert desk.open.kept(lease.given.group, 0) is None
    desk.write(lease, 0)
    assert not desk.open.leased
    desk.score(lease, 0, 1.0)
    assert desk.open.whole_rows() == []
    before = desk.open.idle
    desk.score(lease, 1, 0.0)
    assert [[each.reward for each in row] for row in desk.open.whole_rows()] == [[1.0, 0.0]]
    assert [before, desk.open.idle, desk.open.over] == [False, True, False]
    assert desk.open.answered == 2


def test_samples_that_a_lease_did_not_write_wait_again_a_few_times() -> None:
    desk = Desk()
    for _ in range(ANSWER_FAILURES_MAX):
        lease = desk.lease(4, 0, 1)
        desk.open.ended(lease)
        desk.open.check()
    assert (4, [0, 1]) in desk.waiting()
    lease = desk.lease(4, 0, 1)
    desk.write(lease, 1)
    desk.open.ended(lease)
    desk.open.check()
    assert 4 not in dict(desk.waiting())


def test_an_answer_whose_reward_always_fails_is_given_up() -> None:
    desk = Desk()
    for cursor in (4, 0, 7):
        lease = desk.lease(cursor, 0, 1)
        for sample in (0, 1):
            desk.write(lease, sample)
            desk.score(lease, sample, None if cursor == 0 else 1.0)
    assert desk.open.over
    assert len(desk.open.whole_rows()) == 2


def test_the_group_ids_of_two_evaluations_differ() -> None:
    first, second = Desk(0), Desk(1)
    assert first.open.group(7) == group_of(EVALUATION, 7)
    assert second.open.group(7) == group_of(EVALUATION, ROWS_MAX + 7)
    assert first.open.question(second.open.group(7)) is None
    assert second.open.question(GroupId(3)) is None


class Table(Desk):
    """The same of an environment: its answers have turns."""

    def end_turn(self, lease: Lease, sample: int, *, held_back_max: int = 9) -> bool:
        key, given = self.open.key, lease.given
        base = given.base
        span = AuthoredSpan(0, 2, key.version, key.digest, lease.worker)
        partial = base.plus(pack_tokens([3, 1]), bytes(8), [span], shift=base.length)
        turn = 1 + len(base.given)
        kept = TurnKept(given.group, sample, turn, given.lease, given.attempt, partial, "stop")
        parked = Parked(kept, 0.0, lease.worker, key, 0.0)
        self.leases.answer(lease, sample)
        held_back = self.open.park(lease, parked, held_back_max=held_back_max)
        self.open.check()
        return held_back

    def answer(self, group: GroupId, sample: int, turn: int) -> bool:
        event = EnvironmentStepped(group, sample, 0, turn, pack_tokens([7]), b"state")
        asked = self.open.parked_episode(group, sample)
        if asked is None or not asked.is_answered_by(event):
            return False
        self.open.go_on(group, sample, asked.answered(event))
        self.open.check()
        return True

    def lease_next(self, group: GroupId, sample: int) -> Lease:
        question = self.open.question(group)
        assert question is not None
        episode = self.open.episode(group, sample)
        base = NOTHING if episode is None else episode.partial
        key = self.open.key
        lease = self.leases.start(None, group, PeerId("w"), key, [sample], base, room=64, now=0.0)
        self.open.lease(question, lease)
        self.open.take_held_back(group, sample)
        self.open.check()
        return lease


def test_an_episode_waits_for_its_environment_and_continues_before_new_answers() -> None:
    table = Table()
    lease = table.lease(7, 1)
    group = lease.given.group
    table.end_turn(lease, 1)
    before = table.open.idle
    assert (7, [0]) in table.waiting()
    assert table.open.episode(group, 1) is None
    assert not table.answer(group, 1, turn=2), "there is no such turn"
    assert table.answer(group, 1, turn=1)
    assert not table.answer(group, 1, turn=1), "nobody waits for it any more"
    assert table.waiting()[0] == (7, [1, 0])
    episode = table.open.episode(group, 1)
    assert episode is not None
    assert (episode.turns, episode.state, episode.partial.given) == (
        1,
        b"state",
        (GivenTokens(2, 3),),
    )
    table.open.ended(table.lease_next(group, 1))
    table.open.check()
    second = table.lease_next(group, 1)
    table.end_turn(second, 1)
    asked = table.open.parked_episode(group, 1)
    assert asked is not None
    assert asked.is_answered_by(EpisodeEnded(group, 1, 0, 2, 1.0))
    assert asked.parked.turn.partial.written == 4
    assert table.open.take_held_back(group, 1) == asked.parked.turn
    table.open.end_episode(group, 1, WRITTEN)
    table.score(lease, 1, 1.0)
    assert table.open.answered == 1
    assert [before, table.open.idle] == [False, True]
    assert not table.open.close()
    assert not table.open.take_dropped()


def test_the_number_of_turns_held_back_for_a_worker_is_limited() -> None:
    table = Table()
    leases = [table.lease(cursor, 0) for cursor in (4, 0, 7)]
    assert [table.end_turn(each, 0, held_back_max=2) for each in leases] == [True, True, False]
    groups = [each.given.group for each in leases]
    taken = [table.open.take_held_back(group, 0) for group in groups[::2]]
    assert [each is not None for each in taken] == [True, False]
    assert [each.group for each in table.open.close()] == [groups[1]]
    assert table.open.take_dropped() == [(group, 0) for group in groups]
    assert not table.open.take_dropped()


def test_an_episode_that_failed_too_often_is_dropped() -> None:
    table = Table()
    lease = table.lease(4, 0)
    group = lease.given.group
    table.end_turn(lease, 0)
    table.answer(group, 0, turn=1)
    for _ in range(ANSWER_FAILURES_MAX + 1):
        assert not table.open.take_dropped()
        table.open.ended(table.lease_next(group, 0))
        table.open.check()
    assert table.open.take_dropped() == [(group, 0)]
    assert dict(table.waiting())[4] == [1]

"""Answers move from waiting to scored, and none is lost or in two places."""

from dataclasses import replace

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.rules import EvalRules, TaskRules
from echo2d.core.evaluation.open_evaluation import FAILURES_MAX, GROUP_FIRST, OpenEvaluation
from echo2d.core.evaluation.questions import ROWS_MAX, EvalQuestion
from echo2d.core.evaluation.summary import ScoredSample
from echo2d.core.rollouts.leases import Lease, LeaseTable
from tests.support.coordinator_world import version_key

RULES = EvalRules(TaskRules("held"), samples=2)
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
        lease = self.leases.start(None, group, PeerId("w"), self.open.key, samples, now=0.0)
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
        return [(question.cursor, samples) for question, samples in self.open.waiting()]


def test_an_answer_goes_its_way() -> None:
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


def test_what_a_lease_did_not_write_waits_again_a_few_times() -> None:
    desk = Desk()
    for _ in range(FAILURES_MAX):
        lease = desk.lease(4, 0, 1)
        desk.open.ended(lease)
        desk.open.check()
    assert (4, [0, 1]) in desk.waiting()
    lease = desk.lease(4, 0, 1)
    desk.write(lease, 1)
    desk.open.ended(lease)
    desk.open.check()
    assert 4 not in dict(desk.waiting())


def test_an_answer_whose_reward_cannot_be_had_is_given_up() -> None:
    desk = Desk()
    for cursor in (4, 0, 7):
        lease = desk.lease(cursor, 0, 1)
        for sample in (0, 1):
            desk.write(lease, sample)
            desk.score(lease, sample, None if cursor == 0 else 1.0)
    assert desk.open.over
    assert len(desk.open.whole_rows()) == 2


def test_groups_of_two_evaluations_differ() -> None:
    first, second = Desk(0), Desk(1)
    assert first.open.group(7) == GROUP_FIRST + 7
    assert second.open.group(7) == GROUP_FIRST + ROWS_MAX + 7
    assert first.open.question(second.open.group(7)) is None
    assert second.open.question(GroupId(3)) is None

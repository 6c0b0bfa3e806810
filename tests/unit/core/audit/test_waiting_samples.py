"""Samples that wait for a verdict, and the decisions about them."""

from echo2d.core.audit.waiting_samples import SampleVerdict, WaitingSamples
from echo2d.core.base.ids import GroupId, PeerId

A, B = PeerId("a"), PeerId("b")
GROUP, OTHER = GroupId(1), GroupId(2)
WAIT_S = 60.0


def test_a_sample_is_good_once_each_of_its_authors_is_judged_good() -> None:
    waiting = WaitingSamples(WAIT_S)
    sample = waiting.begin(A, GROUP, 0, 0.0)
    assert waiting.begin(B, GROUP, 0, 1.0) is sample
    waiting.settle(sample, A, good=True)
    waiting.settle(sample, A, good=True)
    assert waiting.take_decided() == []
    waiting.settle(sample, B, good=True)
    waiting.check()
    assert GROUP in waiting, "until the verdict is taken, its group does not go on"
    assert waiting.take_decided() == [SampleVerdict(GROUP, 0, good=True)]
    assert GROUP not in waiting
    assert (len(waiting), waiting.groups) == (0, 0)


def test_one_bad_author_makes_a_sample_bad_for_good() -> None:
    waiting = WaitingSamples(WAIT_S)
    sample = waiting.begin(A, GROUP, 0, 0.0)
    waiting.begin(B, GROUP, 0, 0.0)
    waiting.settle(sample, B, good=False)
    waiting.settle(sample, A, good=True)
    blamed = frozenset([B])
    assert waiting.take_decided() == [SampleVerdict(GROUP, 0, good=False, blamed=blamed)]


def test_a_sample_that_waited_too_long_is_taken_from_its_unjudged_authors() -> None:
    waiting = WaitingSamples(WAIT_S)
    sample = waiting.begin(A, GROUP, 0, 0.0)
    waiting.begin(B, GROUP, 0, 0.0)
    waiting.settle(sample, A, good=True)
    waiting.refuse(sample, sample.authors)
    assert [each.blamed for each in waiting.take_decided()] == [frozenset([B])]


def test_a_sample_that_goes_back_is_decided_first() -> None:
    waiting = WaitingSamples(WAIT_S)
    good, bad = waiting.begin(A, GROUP, 0, 0.0), waiting.begin(B, GROUP, 1, 0.0)
    waiting.settle(good, A, good=True)
    waiting.settle(bad, B, good=False)
    assert [each.good for each in waiting.take_decided()] == [False, True]


def test_a_sample_that_another_worker_wrote_again_waits_again() -> None:
    waiting = WaitingSamples(WAIT_S)
    first = waiting.begin(A, GROUP, 0, 0.0)
    waiting.withdraw(GROUP, 0)
    second = waiting.begin(B, GROUP, 0, 5.0)
    waiting.settle(first, A, good=False)
    assert waiting.take_decided() == []
    assert list(waiting.overdue(WAIT_S)) == []
    assert list(waiting.overdue(WAIT_S + 5.0)) == [second]


def test_samples_of_a_removed_group_do_not_wait() -> None:
    waiting = WaitingSamples(WAIT_S)
    sample = waiting.begin(A, GROUP, 0, 0.0)
    waiting.begin(A, OTHER, 0, 0.0)
    waiting.forget(GROUP)
    waiting.settle(sample, A, good=True)
    assert (waiting.take_decided(), waiting.groups) == ([], 1)


def test_each_sample_is_examined_once_after_its_waiting_time() -> None:
    waiting = WaitingSamples(WAIT_S)
    sample = waiting.begin(A, GROUP, 0, 1.0)
    assert waiting.wake_at == WAIT_S + 1.0
    assert list(waiting.overdue(WAIT_S)) == []
    assert list(waiting.overdue(WAIT_S + 1.0)) == [sample]
    assert list(waiting.overdue(9 * WAIT_S)) == []
    waiting.look_later(sample, WAIT_S + 1.0)
    assert waiting.wake_at == 2 * WAIT_S + 1.0


def test_the_reported_delay_is_that_of_verdicts() -> None:
    waiting = WaitingSamples(WAIT_S)
    waiting.measure(None, 1.0)
    sample = waiting.begin(A, GROUP, 0, 0.0)
    waiting.measure(sample, 2.0)
    assert waiting.delay_s == 2.0
    waiting.settle(sample, A, good=True)
    waiting.measure(sample, 50.0)
    assert waiting.delay_s == 2.0

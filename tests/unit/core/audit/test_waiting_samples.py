"""Samples that wait for a verdict, and the decisions about them."""

from echo2d.core.audit.waiting_samples import SampleVerdict, WaitingSamples
from echo2d.core.base.ids import GroupId, PeerId

A, B = PeerId("a"), PeerId("b")
GROUP, OTHER = GroupId(1), GroupId(2)
WAIT_S = 60.0


def test_a_sample_is_good_once_each_of_its_authors_is() -> None:
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


def test_one_bad_author_is_enough_and_nothing_changes_it() -> None:
    waiting = WaitingSamples(WAIT_S)
    sample = waiting.begin(A, GROUP, 0, 0.0)
    waiting.begin(B, GROUP, 0, 0.0)
    waiting.settle(sample, B, good=False)
    waiting.settle(sample, A, good=True)
    blamed = frozenset([B])
    assert waiting.take_decided() == [SampleVerdict(GROUP, 0, good=False, blamed=blamed)]


def test_a_sample_that_waited_too_long_goes_back_from_those_who_are_not_judged() -> None:
    waiting = WaitingSamples(WAIT_S)
    sample = waiting.begin(A, GROUP, 0, 0.0)
    waiting.begin(B, GROUP, 0, 0.0)
    waiting.settle(sample, A, good=True)
    waiting.refuse(sample, sample.authors)
    assert [each.blamed for each in waiting.take_decided()] == [frozenset([B])]


def test_a_sample_that_goes_back_comes_first() -> None:
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


def test_a_group_that_is_gone_does_not_wait() -> None:
    waiting = WaitingSamples(WAIT_S)
    sample = waiting.begin(A, GROUP, 0, 0.0)
    waiting.begin(A, OTHER, 0, 0.0)
    waiting.forget(GROUP)
    waiting.settle(sample, A, good=True)
    assert (waiting.take_decided(), waiting.groups) == ([], 1)


def test_each_sample_is_looked_at_once_when_it_has_waited_long_enough() -> None:
    waiting = WaitingSamples(WAIT_S)
    sample = waiting.begin(A, GROUP, 0, 1.0)
    assert waiting.wake_at == WAIT_S + 1.0
    assert list(waiting.overdue(WAIT_S)) == []
    assert list(waiting.overdue(WAIT_S + 1.0)) == [sample]
    assert list(waiting.overdue(9 * WAIT_S)) == []
    waiting.look_later(sample, WAIT_S + 1.0)
    assert waiting.wake_at == 2 * WAIT_S + 1.0


def test_the_delay_is_that_of_verdicts() -> None:
    waiting = WaitingSamples(WAIT_S)
    waiting.measure(None, 1.0)
    sample = waiting.begin(A, GROUP, 0, 0.0)
    waiting.measure(sample, 2.0)
    assert waiting.delay_s == 2.0
    waiting.settle(sample, A, good=True)
    waiting.measure(sample, 50.0)
    assert waiting.delay_s == 2.0

"""The held, missing and requested frames of one form."""

from echo2d.core.base.ids import FrameId, PeerId, SegmentId, frame_id
from echo2d.core.relay.frame_set import FrameSet

A, B = PeerId("a"), PeerId("b")
FIRST, SECOND = SegmentId(0), SegmentId(1)


def two_segments() -> FrameSet:
    transfer = FrameSet()
    transfer.learn(FIRST, (100, 100, 50))
    transfer.learn(SECOND, (70,))
    return transfer


def test_nothing_is_complete_before_the_end_is_known() -> None:
    transfer = two_segments()
    for frame in list(transfer.unasked()):
        assert transfer.hold(frame)
    assert (transfer.complete, transfer.missing_count) == (False, 0)
    transfer.finish(2)
    assert (transfer.complete, transfer.missing_count) == (True, 0)
    assert transfer.held_bytes == transfer.known_bytes == 320
    transfer.check()


def test_a_missing_table_is_noticed_once_the_end_is_known() -> None:
    transfer = FrameSet()
    transfer.learn(SECOND, ())
    assert transfer.missing_count == 0
    transfer.finish(3)
    assert transfer.missing_count == 2
    assert list(transfer.unasked()) == [frame_id(FIRST, 0), frame_id(SegmentId(2), 0)]
    transfer.check()


def test_a_form_without_segments_is_complete() -> None:
    transfer = FrameSet()
    transfer.finish(0)
    assert transfer.complete


def test_a_frame_that_comes_twice_counts_once() -> None:
    transfer = two_segments()
    assert transfer.hold(frame_id(FIRST, 2))
    assert not transfer.hold(frame_id(FIRST, 2))
    assert transfer.duplicates == 1
    assert transfer.held_bytes == 100
    assert transfer.arrivals == [frame_id(FIRST, 0), frame_id(SECOND, 0), frame_id(FIRST, 2)]
    transfer.check()


def test_a_table_held_from_the_start_does_not_count_as_a_duplicate() -> None:
    transfer = two_segments()
    assert not transfer.learn(FIRST, (100, 100, 50))
    assert not transfer.hold(frame_id(FIRST, 0))
    assert transfer.duplicates == 0


def test_unknown_frames_are_not_held() -> None:
    transfer = two_segments()
    assert not transfer.holds(frame_id(FIRST, 4))
    assert not transfer.holds(frame_id(SegmentId(9), 1))
    assert not transfer.knows(frame_id(SegmentId(9), 0))
    assert transfer.size(frame_id(FIRST, 3)) == 50


def test_a_requested_frame_arrives_or_can_be_requested_again() -> None:
    transfer = two_segments()
    transfer.ask(frame_id(FIRST, 1), A, until=5.0)
    transfer.ask(frame_id(FIRST, 2), A, until=6.0)
    assert list(transfer.unasked()) == [frame_id(FIRST, 3), frame_id(SECOND, 1)]
    assert transfer.overdue(5.0) == [(frame_id(FIRST, 1), A)]
    assert not transfer.give_back(frame_id(FIRST, 1), B)
    assert transfer.give_back(frame_id(FIRST, 1), A)
    transfer.hold(frame_id(FIRST, 2))
    assert transfer.asked_of(A) == ()
    assert transfer.asked_count == 0
    assert transfer.asked_from(FrameId(1)) is None
    transfer.check()


def test_a_lost_frame_is_missing_until_it_arrives_again() -> None:
    transfer = two_segments()
    frame = frame_id(FIRST, 2)
    transfer.hold(frame)
    arrivals = list(transfer.arrivals)
    for lost in (frame, frame, frame_id(FIRST, 1), frame_id(SegmentId(9), 1)):
        transfer.lose(lost)
        transfer.check()
    assert (transfer.holds(frame), transfer.held_bytes, transfer.lost) == (False, 0, {frame})
    assert list(transfer.unasked_lost()) == [frame]
    transfer.ask(frame, A, until=5.0)
    assert list(transfer.unasked_lost()) == []
    assert transfer.hold(frame)
    assert (transfer.arrivals, transfer.lost, transfer.asked_count) == (arrivals, set(), 0)
    transfer.check()

import math
from dataclasses import replace

import pytest

from echo2d.core.renting.boxes import BLIND_S, COMMANDS_MAX, KILL_S, RentedBoxes
from echo2d.core.renting.budget import Budget, Label, RentOffer, Terms
from echo2d.core.renting.events import (
    Instance,
    Keep,
    RentAction,
    RentNote,
    RentRules,
    Retire,
    Start,
    Stop,
)

OFFER = RentOffer("cloud", "box", 0.5, 360.0, 32)
TERMS = Terms(
    "cloud", command_s=60.0, settle_s=90.0, list_every_s=30.0, billed_by_s=60.0, grace_s=600.0
)
RULES = RentRules("x-", Budget(9.0, 100.0), 3600.0, 60.0, 60.0, 0.0)
ONE = Label("x-cloud-box-1")


def started() -> RentedBoxes:
    rented = RentedBoxes(RULES, [TERMS], [OFFER], [], now=0.0)
    keep, start = rented.start(OFFER, 3600.0, 0.0)
    assert isinstance(keep, Keep)
    assert isinstance(start, Start)
    assert start.rental.label == ONE
    return rented


def pass_time(rented: RentedBoxes, start: float, end: float) -> None:
    """Events come all the time."""
    for now in range(int(start), int(end), 100):
        rented.advance(float(now))
    rented.advance(end)


def show(
    rented: RentedBoxes, now: float, *lines: Instance, began_at: float | None = None
) -> list[RentAction]:
    actions = rented.listed("cloud", now if began_at is None else began_at, lines, now)
    rented.check()
    return actions


def test_a_box_has_gone_when_two_lists_say_so_settle_s_apart() -> None:
    rented = started()
    show(rented, 5.0)  # its start is under way
    rented.ended(ONE, 50.0)
    show(rented, 60.0, began_at=49.0)
    for at in (60.0, 100.0, 149.0):
        assert show(rented, at) == []
    assert Retire(ONE) in show(rented, 151.0)
    assert rented.gone[ONE].gone_at == 151.0
    assert rented.committed_usd(1e6) == pytest.approx(0.5 * 180 / 3600)


def test_a_box_that_is_shown_in_between_or_serves_has_not_gone() -> None:
    rented = started()
    rented.ended(ONE, 50.0)
    show(rented, 60.0)
    show(rented, 100.0, Instance(ONE, "i-1"))
    show(rented, 151.0)
    rented.boxes[ONE].serves = True
    show(rented, 1000.0)
    assert ONE in rented.boxes


def test_a_box_that_reappears_is_stopped_and_paid_for_the_whole_time() -> None:
    rented = started()
    rented.ended(ONE, 0.0)
    show(rented, 1.0)
    show(rented, 200.0)
    assert rented.usd_per_h == 0.0
    show(rented, 7200.0, Instance(ONE, "i-1"))
    assert rented.spent_usd(7200.0) == pytest.approx(1.0)
    (stop,) = rented.stops(7200.0)
    assert isinstance(stop, Stop)
    assert stop.ids == ("i-1",)


def test_an_unknown_box_is_stopped_and_its_number_is_not_used_again() -> None:
    rented = started()
    show(
        rented,
        1.0,
        Instance(Label("x-cloud-box-41"), "i-9"),
        Instance(Label("y-cloud-box-99"), "i-8"),
    )
    assert rented.boxes[Label("x-cloud-box-41")].stop_reason == "this run has not started it"
    assert rented.next_number == 42
    assert len(rented.boxes) == 2  # another run's is none of ours


def test_two_ids_count_as_two_boxes_and_a_repeated_id_as_one() -> None:
    rented = started()
    show(rented, 1.0, Instance(ONE, "i-1"), Instance(ONE, "i-1"))
    assert rented.usd_per_h == 0.5
    actions = show(rented, 2.0, Instance(ONE, "i-1"), Instance(ONE, "i-2"))
    assert [action.rental.copies for action in actions if isinstance(action, Keep)] == [2]
    assert rented.usd_per_h == 1.0
    assert rented.boxes[ONE].stop_reason


def test_a_stop_is_repeated_while_lists_show_the_box_and_blindly_after_a_while() -> None:
    rented = started()
    rented.ended(ONE, 1.0)
    rented.boxes[ONE].stop_reason = "x"
    assert len(rented.stops(1.0)) == 1
    assert rented.stops(2.0) == []
    rented.stop_ended(ONE, ok=False, now=10.0)
    assert rented.stops(500.0) == []  # no list has shown it since
    show(rented, 510.0, Instance(ONE, "i-1"))
    assert len(rented.stops(510.0)) == 1
    rented.stop_ended(ONE, ok=True, now=520.0)
    assert len(rented.stops(520.0 + BLIND_S)) == 1


def test_a_box_whose_process_was_killed_may_still_be_starting() -> None:
    kept = [box.rental for box in started().boxes.values()]
    rented = RentedBoxes(RULES, [TERMS], [OFFER], kept, now=10.0)
    show(rented, 20.0)
    assert rented.boxes[ONE].absent_from is None
    assert rented.boxes[ONE].busy_until == TERMS.command_s + KILL_S
    assert rented.next_number == 2


def test_the_number_of_simultaneous_commands_is_limited() -> None:
    rented = RentedBoxes(RULES, [TERMS], [OFFER], [], now=0.0)
    starts = [rented.start(OFFER, 3600.0, 0.0) for _ in range(COMMANDS_MAX + 1)]
    assert starts[-1] == []
    assert all(box.busy_until == math.inf for box in rented.boxes.values())
    rented.check()


def test_a_list_that_never_shows_anything_is_not_believed() -> None:
    """Else a box that starts slowly would be taken for gone, and the next one started, without end."""
    rented = started()
    rented.ended(ONE, 50.0)
    rented.boxes[ONE].made = True
    show(rented, 60.0)
    notes = show(rented, 200.0)
    assert [note.kind for note in notes if isinstance(note, RentNote)] == ["list_doubted"]
    assert rented.doubts("cloud")
    assert show(rented, 300.0) == []
    assert rented.committed_usd(300.0) == pytest.approx(0.5 * 4200 / 3600)
    show(rented, 400.0, Instance(ONE, "i-1"))
    assert not rented.doubts("cloud")


def test_a_renter_that_gives_all_boxes_back_believes_an_empty_list() -> None:
    rented = RentedBoxes(
        replace(RULES, closing=True), [TERMS], [OFFER], [started().boxes[ONE].rental], now=100.0
    )
    show(rented, 101.0)
    show(rented, 200.0)
    assert rented.gone.keys() == {ONE}


def test_a_box_that_lists_should_have_shown_has_gone_when_its_time_is_over() -> None:
    rented = started()
    rented.ended(ONE, 50.0)
    rented.boxes[ONE].made = True
    show(rented, 60.0)
    pass_time(rented, 0.0, 4199.0)
    show(rented, 4199.0)
    assert ONE in rented.boxes
    pass_time(rented, 4199.0, 4201.0)
    show(rented, 4201.0)
    assert rented.gone[ONE].gone_at == 4200.0


@pytest.mark.parametrize("restarted", [False, True])
def test_a_box_that_lists_never_showed_outlives_a_clock_that_jumps(restarted: bool) -> None:
    """The jump may be an error of the clock: the box would run beside another one, beyond the budget."""
    rented = started()
    rented.ended(ONE, 50.0)
    rented.boxes[ONE].made = True
    if restarted:
        rented = RentedBoxes(RULES, [TERMS], [OFFER], [rented.boxes[ONE].rental], now=10_000.0)
    rented.advance(10_000.0)
    show(rented, 10_000.0)
    show(rented, 10_100.0)
    assert rented.usd_per_h == 0.5
    assert rented.committed_usd(10_100.0) == pytest.approx(0.5 * 4200 / 3600)
    pass_time(rented, 10_000.0, 14_200.0)
    show(rented, 14_200.0)
    assert rented.usd_per_h == 0.0


def test_a_list_that_has_shown_boxes_is_believed_even_after_a_restart() -> None:
    rented = started()
    rented.ended(ONE, 50.0)
    (kept,) = (
        action.rental
        for action in show(rented, 60.0, Instance(ONE, "i-1"))
        if isinstance(action, Keep)
    )
    assert kept.seen
    again = RentedBoxes(RULES, [TERMS], [OFFER], [kept], now=1000.0)
    show(again, 1001.0)
    show(again, 1100.0)
    assert again.gone.keys() == {ONE}


def test_a_box_that_ended_unobserved_is_billed_to_its_end() -> None:
    """A coordinator that was away over the weekend: else the budget would be used up by nothing."""
    kept = started().boxes[ONE].rental
    rented = RentedBoxes(RULES, [TERMS], [OFFER], [kept], now=200_000.0)
    assert (
        rented.spent_usd(200_000.0)
        == rented.committed_usd(200_000.0)
        == pytest.approx(0.5 * 4200 / 3600)
    )
    show(rented, 200_001.0, Instance(ONE, "i-1"))  # it has not ended
    assert rented.spent_usd(200_001.0) == pytest.approx(0.5 * 200_040 / 3600)


def test_a_worker_has_time_to_finish() -> None:
    rented = started()
    rented.ended(ONE, 1.0)
    box = rented.boxes[ONE]
    box.stop_reason, box.holds, box.stop_by = "x", True, 100.0
    assert rented.stops(99.0) == []
    assert [stop.why for stop in rented.stops(100.0) if isinstance(stop, Stop)] == ["x"]


def test_a_provider_with_another_name_finds_its_boxes_again() -> None:
    kept = replace(started().boxes[ONE].rental, provider="before")
    rented = RentedBoxes(RULES, [TERMS], [OFFER], [kept], now=10.0)
    rented.boxes[ONE].stop_reason = "x"
    assert rented.stops(100.0) == []
    show(rented, 100.0, Instance(ONE, "i-1"))
    assert rented.boxes[ONE].rental.provider == "cloud"
    assert len(rented.stops(100.0)) == 1

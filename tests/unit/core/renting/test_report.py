import pytest

from echo2d.core.renting.boxes import RentedBoxes
from echo2d.core.renting.budget import Budget, Label, RentOffer, Terms
from echo2d.core.renting.events import Instance, RentRules
from echo2d.core.renting.report import STATES, renting_status
from echo2d.core.status.schema import Alert

OFFER = RentOffer("cloud", "box", 0.5, 360.0, 8)
TERMS = Terms(
    "cloud", command_s=60.0, settle_s=0.0, list_every_s=30.0, billed_by_s=60.0, grace_s=600.0
)
BUDGET = Budget(2.0, 10.0)
ONE = Label("x-cloud-box-1")


def started() -> RentedBoxes:
    rented = RentedBoxes(
        RentRules("x-", BUDGET, 3600.0, 60.0, 60.0, 0.0), [TERMS], [OFFER], [], now=0.0
    )
    rented.start(OFFER, 3000.0, 0.0)
    rented.ended(ONE, 1.0)
    return rented


def test_spent_reserved_and_remaining_money_add_up_to_the_budget() -> None:
    status = renting_status(started(), BUDGET, why="", now=600.0)
    assert status.spent_usd == pytest.approx(0.5 / 6)
    assert status.set_aside_usd == pytest.approx(0.5 * 3000 / 3600)
    assert status.spent_usd + status.set_aside_usd + status.left_usd == pytest.approx(10.0)
    assert status.alerts == ()


def test_every_state_of_a_box_is_reported() -> None:
    rented = started()
    box, states = rented.boxes[ONE], []
    for change in (
        {},
        {"ids": ("i-1",)},
        {"serves": True},
        {"stop_reason": "x", "holds": True, "stop_by": 9.0},
        {"stop_by": 1.0},
    ):
        for name, value in change.items():
            setattr(box, name, value)
        (row,) = renting_status(rented, BUDGET, why="", now=5.0).boxes
        states.append(row.state)
    assert tuple(states) == STATES


def test_alerts_about_renting_are_sentences_for_people() -> None:
    rented = started()
    assert renting_status(rented, BUDGET, why="no money", now=2.0).alerts == (
        Alert("renting_short", "renting: more is needed, but no money"),
    )
    rented.listed("cloud", 2.0, None, 2.0)
    (alert,) = renting_status(rented, BUDGET, why="", now=2.0).alerts
    assert alert.kind == "renting_blind"
    assert "cannot be listed" in alert.sentence
    rented.listed("cloud", 3.0, [Instance(ONE, "i-1")], 3.0)
    del rented.sides["cloud"]
    (alert,) = renting_status(rented, BUDGET, why="", now=3.0).alerts
    assert alert.kind == "renting_stranger"
    assert "nothing stops them" in alert.sentence

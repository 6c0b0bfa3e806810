from typing import Any

import pytest

from echo2d.core.renting.autoscaler import Autoscaler
from echo2d.core.renting.budget import Budget, Label, RentOffer, Terms
from echo2d.core.renting.events import (
    Instance,
    Keep,
    List,
    Listed,
    NeedMeasured,
    RentAction,
    RentRules,
    Start,
    StartEnded,
    Stop,
)

SMALL = RentOffer("cloud", "small", 0.5, 360.0, 8)  # 0.1/s
LARGE = RentOffer("cloud", "large", 1.2, 1080.0, 8)  # 0.3/s
TERMS = Terms(
    "cloud", command_s=60.0, settle_s=0.0, list_every_s=1e9, billed_by_s=60.0, grace_s=600.0
)
SHORT = NeedMeasured(0.1, wanted=True, workers=1)


def make(**changes: Any) -> Autoscaler:
    """Its provider's list has been read."""
    rules = {
        "life_s": 7200.0,
        "idle_s": 300.0,
        "join_s": 900.0,
        "patience_s": 0.0,
        "budget": Budget(2.0, 20.0),
    }
    renting = Autoscaler(
        RentRules("x-", **{**rules, **changes}), [TERMS], [SMALL, LARGE], [], now=0.0
    )
    assert renting.handle(SHORT, now=0.0) == [List("cloud")]  # nothing before that
    renting.handle(Listed("cloud", 0.0, ()), now=0.0)
    return renting


def starts(actions: list[RentAction]) -> list[str]:
    return [action.rental.offer for action in actions if isinstance(action, Start)]


def stops(actions: list[RentAction]) -> list[str]:
    return [action.rental.label for action in actions if isinstance(action, Stop)]


def need(
    mu: float | None, *, wanted: bool = True, workers: int = 1, **serving: float
) -> NeedMeasured:
    named = {Label(name.replace("_", "-")): idle_s for name, idle_s in serving.items()}
    return NeedMeasured(mu, wanted=wanted, workers=workers, serving=named)


def test_a_box_is_recorded_before_its_start() -> None:
    renting = Autoscaler(
        RentRules("x-", Budget(2.0, 20.0), 7200.0, 300.0, 900.0, 0.0), [TERMS], [SMALL], [], now=0.0
    )
    renting.handle(SHORT, now=0.0)
    kept, start = renting.handle(Listed("cloud", 0.0, ()), now=1.0)
    assert isinstance(kept, Keep)
    assert isinstance(start, Start)
    assert kept.rental == start.rental


def test_boxes_that_are_starting_count() -> None:
    renting = make()
    assert starts(renting.handle(SHORT, now=1.0)) == []
    assert starts(renting.handle(need(0.4), now=2.0)) == ["large"]
    assert starts(renting.handle(need(0.4), now=3.0)) == []
    renting.check()


def test_a_short_shortfall_rents_no_box() -> None:
    renting = make(patience_s=60.0)
    assert starts(renting.handle(SHORT, now=59.0)) == []
    renting.handle(need(-0.1), now=59.5)
    assert starts(renting.handle(SHORT, now=61.0)) == []
    assert starts(renting.handle(SHORT, now=121.0)) == ["small"]


@pytest.mark.parametrize(("workers", "started"), [(0, ["small"]), (1, [])])
def test_one_box_is_needed_to_measure_anything(workers: int, started: list[str]) -> None:
    renting = make(patience_s=10.0)
    renting.handle(need(0.0), now=1.0)
    renting.handle(need(None, workers=workers), now=2.0)
    assert starts(renting.handle(need(None, workers=workers), now=13.0)) == started


def test_no_box_is_rented_while_no_learner_takes_batches() -> None:
    renting = make(patience_s=1.0)
    assert starts(renting.handle(need(5.0, wanted=False), now=100.0)) == []


def test_the_cost_per_hour_is_limited() -> None:
    renting = make()
    assert sorted(starts(renting.handle(need(9.0), now=1.0))) == [
        "large"
    ]  # beside the small one: 1.7 of 2 usd/h
    status = renting.status(now=1.0)
    assert (status.usd_per_h, status.why) == (
        1.7,
        "the usd/h left, or the offered boxes, are not enough",
    )


def test_an_idle_box_is_given_back_and_a_needed_one_stays() -> None:
    renting = make()
    renting.handle(StartEnded(Label("x-cloud-small-1"), ok=True), now=5.0)
    renting.handle(need(0.1, x_cloud_small_1=400.0), now=6.0)
    assert renting.live.keys() == {"x-cloud-small-1", "x-cloud-small-2"}
    actions = renting.handle(need(-0.1, x_cloud_small_1=300.0), now=7.0)
    assert [action.rental.label for action in actions if isinstance(action, Stop)] == [
        "x-cloud-small-1"
    ]


def test_the_reserve_for_noise_neither_rents_nor_keeps_an_idle_box() -> None:
    """Else a box that stands by is given back, and the next one rented in its stead."""
    renting, label = make(patience_s=10.0), Label("x-cloud-small-1")
    assert (
        starts(renting.handle(NeedMeasured(0.04, wanted=True, workers=1, margin_mu=0.05), now=60.0))
        == []
    )
    renting.handle(NeedMeasured(0.06, wanted=True, workers=1, margin_mu=0.05), now=61.0)
    assert starts(
        renting.handle(NeedMeasured(0.06, wanted=True, workers=1, margin_mu=0.05), now=72.0)
    ) == ["small"]
    renting.handle(StartEnded(label, ok=True), now=75.0)
    idle: dict[str, Any] = {
        "wanted": True,
        "workers": 2,
        "serving": {label: 300.0},
        "margin_mu": 0.05,
    }
    assert stops(renting.handle(NeedMeasured(-0.06, mu={label: 0.12}, **idle), now=80.0)) == []
    assert stops(renting.handle(NeedMeasured(-0.06, mu={label: 0.10}, **idle), now=81.0)) == [label]


def test_only_as_many_idle_boxes_are_given_back_as_are_spare() -> None:
    renting = make()
    renting.handle(need(0.4), now=1.0)
    labels = sorted(renting.live)
    for label in labels:
        renting.handle(StartEnded(label, ok=True), now=2.0)
    both = NeedMeasured(-0.1, wanted=True, workers=2, serving=dict.fromkeys(labels, 300.0))
    assert len(labels) == 2
    assert len(stops(renting.handle(both, now=3.0))) == 1
    assert (
        stops(renting.handle(both, now=4.0)) == []
    )  # the coordinator may not know yet that one of them goes


def test_a_start_that_failed_is_stopped_and_its_kind_left_alone() -> None:
    renting = make()
    actions = renting.handle(StartEnded(Label("x-cloud-small-1"), ok=False), now=5.0)
    assert [action.rental.label for action in actions if isinstance(action, Stop)] == [
        "x-cloud-small-1"
    ]
    assert starts(actions) == ["large"]  # dearer, but it can be had


def test_the_alert_has_the_providers_own_words() -> None:
    renting = make()
    words = "it ended with 1: Max spot instance count exceeded"
    for size in ("small", "large"):
        label = Label(f"x-cloud-{size}-{1 if size == 'small' else 2}")
        renting.handle(StartEnded(label, ok=False, reason=words), now=5.0)
    renting.handle(need(0.1), now=6.0)
    (alert,) = renting.status(now=6.0).alerts
    assert alert.sentence.endswith(
        f"; cloud/small failed 1 times, at last: {words}; cloud/large failed 1 times, at last: {words}"
    )
    renting.handle(Listed("cloud", 6.0, None, "it took longer than 60 s"), now=7.0)
    assert any("60 s" in each.sentence for each in renting.status(now=7.0).alerts)


def test_a_box_that_never_serves_is_given_back() -> None:
    renting = make()
    renting.handle(StartEnded(Label("x-cloud-small-1"), ok=True), now=5.0)
    for at in range(50, 900, 50):
        renting.handle(need(0.1), now=float(at))
    actions = renting.handle(need(0.1), now=900.0)
    assert [action.rental.label for action in actions if isinstance(action, Stop)] == [
        "x-cloud-small-1"
    ]


def test_a_renter_that_stood_still_stops_no_box_as_idle() -> None:
    renting = make()
    renting.handle(StartEnded(Label("x-cloud-small-1"), ok=True), now=5.0)
    renting.handle(need(0.1, x_cloud_small_1=0.0), now=10.0)
    actions = renting.handle(
        need(0.1), now=5000.0
    )  # as after a suspend: its worker has not come back yet
    assert not any(isinstance(action, Stop) for action in actions)


def test_a_box_whose_time_is_over_is_stopped() -> None:
    renting = make()
    label = Label("x-cloud-small-1")
    renting.handle(StartEnded(label, ok=True), now=5.0)
    life_s = renting.live[label].life_s
    renting.handle(need(0.0, x_cloud_small_1=0.0), now=life_s - 30)
    actions = renting.handle(need(0.0, x_cloud_small_1=0.0), now=life_s)
    assert any(isinstance(action, Stop) for action in actions)


def test_a_lowered_budget_is_kept_at_once() -> None:
    renting = make()
    renting.handle(need(9.0), now=1.0)
    kept = list(renting.live.values())
    again = Autoscaler(
        RentRules("x-", Budget(1.3, 20.0), 7200.0, 300.0, 900.0, 0.0),
        [TERMS],
        [SMALL, LARGE],
        kept,
        now=9.0,
    )
    again.handle(Listed("cloud", 9.0, tuple(Instance(each.label, "i") for each in kept)), now=9.0)
    actions = again.handle(SHORT, now=80.0)
    assert [action.rental.offer for action in actions if isinstance(action, Stop)] == ["small"]
    assert again.leaving.keys() == {"x-cloud-small-1"}  # the dearest trajectories


def test_closing_gives_every_box_back() -> None:
    kept = list(make().live.values())
    rules = RentRules("x-", Budget(2.0, 20.0), 7200.0, 300.0, 900.0, 0.0, closing=True)
    renting = Autoscaler(rules, [TERMS], [SMALL, LARGE], kept, now=100.0)
    actions = renting.handle(SHORT, now=100.0)
    assert any(isinstance(action, Stop) for action in actions)
    assert starts(actions) == []
    assert not renting.over


def test_a_box_that_is_given_back_finishes_its_work_and_gets_no_more() -> None:
    renting, label = make(drain_s=60.0), Label("x-cloud-small-1")
    renting.handle(StartEnded(label, ok=True), now=5.0)
    busy = NeedMeasured(
        -0.1, wanted=True, workers=1, serving={label: 300.0}, holding=frozenset([label])
    )
    assert stops(renting.handle(busy, now=10.0)) == []
    assert renting.leaving == {label: "it had no work for 300 s"}
    assert renting.status(now=10.0).states["leaving"] == 1
    assert stops(renting.handle(busy, now=69.0)) == []
    assert stops(renting.handle(need(-0.1, x_cloud_small_1=301.0), now=69.5)) == [label]


def test_a_worker_has_drain_s_to_finish() -> None:
    renting, label = make(drain_s=60.0), Label("x-cloud-small-1")
    renting.handle(StartEnded(label, ok=True), now=5.0)
    busy = NeedMeasured(
        -0.1, wanted=True, workers=1, serving={label: 300.0}, holding=frozenset([label])
    )
    renting.handle(busy, now=10.0)
    assert stops(renting.handle(busy, now=70.0)) == [label]


def test_a_box_whose_worker_finishes_before_its_time_ends_is_stopped_in_time() -> None:
    renting, label = make(drain_s=60.0), Label("x-cloud-small-1")
    renting.handle(StartEnded(label, ok=True), now=5.0)
    life_s = renting.live[label].life_s
    busy = NeedMeasured(
        0.0, wanted=True, workers=1, serving={label: 0.0}, holding=frozenset([label])
    )
    renting.handle(busy, now=life_s - 61)
    assert renting.leaving == {}
    assert stops(renting.handle(busy, now=life_s - 60)) == []
    assert renting.leaving.keys() == {label}
    assert stops(renting.handle(busy, now=life_s)) == [label]


def test_no_box_is_started_where_lists_do_not_show_the_started_ones() -> None:
    renting = make()
    renting.handle(StartEnded(Label("x-cloud-small-1"), ok=True), now=5.0)
    for at in (10.0, 20.0):
        renting.handle(Listed("cloud", at, ()), now=at)
    assert starts(renting.handle(need(0.4), now=30.0)) == []
    assert any(each.kind == "renting_doubts" for each in renting.status(now=30.0).alerts)
    shown = (Instance(Label("x-cloud-small-1"), "i-1"),)
    assert starts(renting.handle(Listed("cloud", 40.0, shown), now=40.0)) == ["large"]

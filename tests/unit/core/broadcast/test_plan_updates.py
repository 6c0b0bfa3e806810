"""Plans by measured rates, and new plans for guessed ones; through the whole machine."""

import math

import pytest

from echo2d.core.broadcast import plan_updates
from echo2d.core.broadcast.transmission import LEARN_S
from echo2d.core.protocol.control_messages import (
    LinkSample,
    PlanEdges,
    TransferReport,
)
from echo2d.core.topology.few_copies import seed_copies
from tests.support.coordinator_world import World, form_of, messages
from tests.support.publishing import deliver_seed, publish_again, published


@pytest.mark.parametrize("bytes_min", [0, 1 << 20])
def test_the_rate_of_an_uplink_is_what_its_children_measured_while_it_was_busy(
    bytes_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known to the next plan, unless the version was too small to tell; what is said of others than a parent is not."""
    monkeypatch.setattr(plan_updates, "MEASURED_BYTES_MIN", bytes_min)
    world = published("a", "b", kind="star")
    deliver_seed(world)
    seed, stranger = world.peers["seed"].peer, world.peers["b"].peer
    for name, rate in (("a", 300), ("b", 100)):
        samples = (
            LinkSample(seed, rate, 1.0),
            LinkSample(stranger, 10**9, 1.0),
            LinkSample(seed, 1, math.inf),
        )
        world.say(world.peers[name], TransferReport(form_of(world), 450, samples, 0))
    for busy_s in (1.0, 1.0, math.inf, -1.0):
        world.say(world.peers["seed"], TransferReport(form_of(world), 900, (), 900, busy_s))
    world.drain()
    publish_again(world)
    world.drain()
    found = None if bytes_min else 200
    assert seed_uplink(world) == found
    world.crash()
    assert seed_uplink(world) == found
    assert {worker.uplink for worker in world.state.status().workers} == {None}


# Bytes/s. In LEARN_S no more than the whole form comes.
FAST, SLOW = 300.0, 3.0


def seed_uplink(world: World) -> float | None:
    (seed,) = (peer for peer in world.state._members if peer.kind == "seed")
    return seed.reach.uplink


def report_all(world: World, rates: dict[str, float]) -> None:
    """Every peer says that it got so many bytes/s of each parent, and each that it was busy all the time."""
    transmission = world.state._publishing.spreading
    assert transmission is not None
    assert transmission.plan is not None
    for parent, child in transmission.plan.shares:
        links = (LinkSample(parent, round(rates[parent] * LEARN_S), LEARN_S),)
        world.say(world.peers[child], TransferReport(transmission.form, 450, links, 0))
    for name in rates:
        world.say(world.peers[name], TransferReport(transmission.form, 450, (), 450, LEARN_S))


@pytest.mark.parametrize("slow", [True, False])
def test_a_guessed_plan_is_replaced_when_the_first_bytes_show_that_it_is_bad(
    monkeypatch: pytest.MonkeyPatch, *, slow: bool
) -> None:
    monkeypatch.setattr(plan_updates, "MEASURED_BYTES_MIN", 0)
    world = published("a", "b", "c")
    deliver_seed(world)
    first = {name: messages(peer, PlanEdges)[-1] for name, peer in world.peers.items()}
    culprit = next(name for name in "abc" if first[name].stripes[0].parent == "seed")
    report_all(world, {name: SLOW if slow and name == culprit else FAST for name in world.peers})
    world.drain()
    world.pass_time(LEARN_S)
    told = {name: messages(peer, PlanEdges) for name, peer in world.peers.items()}
    assert {len(parts) for parts in told.values()} == {2 if slow else 1}
    assert (told[culprit][-1].stripes[0].children == ()) == slow
    assert {parts[-1].plan == first["seed"].plan for parts in told.values()} == {not slow}
    report_all(world, dict.fromkeys(world.peers, SLOW))
    world.pass_time(LEARN_S)
    assert {len(messages(peer, PlanEdges)) for peer in world.peers.values()} == {2 if slow else 1}


def test_a_plan_from_known_rates_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_updates, "MEASURED_BYTES_MIN", 0)
    world = published("a", "b", "c")
    deliver_seed(world)
    report_all(world, dict.fromkeys(world.peers, FAST))
    world.drain()
    world.pass_time(LEARN_S)
    publish_again(world)
    deliver_seed(world)
    report_all(world, dict.fromkeys(world.peers, SLOW))
    told = sum(len(messages(peer, PlanEdges)) for peer in world.peers.values())
    world.pass_time(LEARN_S)
    assert sum(len(messages(peer, PlanEdges)) for peer in world.peers.values()) == told


def measure(world: World, t_bcast_s: float = 1.0) -> None:
    """The run has measured what the slack depends on: 100 s a step, 10 s a trajectory."""
    measurements = world.state._statistics.measurements
    measurements.t_train.add(100.0)
    measurements.t_bcast.add(t_bcast_s)
    measurements.t_gen.add(10.0)


def sent(world: World) -> tuple[str, float]:
    """The shape of the plan, and the copies of the seed."""
    transmission = world.state._publishing.spreading
    assert transmission is not None
    assert transmission.plan is not None
    return transmission.plan.shape, seed_copies(transmission.plan)


def straight(world: World) -> float:
    """The most that the seed may send to every peer itself, as a share of the version."""
    transmission = world.state._publishing.spreading
    assert transmission is not None
    assert transmission.plan is not None
    return sum(stripe.spare for stripe in transmission.plan.stripes)


def publish_next(world: World) -> None:
    world.drain()
    publish_again(world)
    deliver_seed(world)


def test_one_copy_is_sent_once_the_slack_is_known_and_bytes_cost_money() -> None:
    world = published("a", "b", "c", kind="auto", seed_usd_per_gb_up=0.09)
    deliver_seed(world)
    assert straight(world) == 1, "nothing is measured yet: as fast as possible"
    measure(world)
    publish_next(world)
    assert straight(world) == 0
    assert sent(world)[0] == "relay"
    assert sent(world)[1] == pytest.approx(1)
    world.connect("d")
    assert sent(world)[1] == pytest.approx(1), "a newcomer goes below another worker"
    publish_next(world)
    assert straight(world) == 0
    world.state._statistics.measurements.late_s.append(100.0)
    publish_next(world)
    assert straight(world) == 1, "a version came so late that there is no time to spare"


def test_the_fastest_plan_is_chosen_without_a_price() -> None:
    world = published("a", "b", "c", kind="auto")
    measure(world)
    deliver_seed(world)
    assert straight(world) == 1


def test_a_shape_that_the_operator_chose_is_kept_whatever_it_costs() -> None:
    world = published("a", "b", kind="star", seed_usd_per_gb_up=0.09)
    measure(world)
    publish_next(world)
    assert sent(world) == ("star", 2)


@pytest.mark.parametrize(("rate", "spare"), [(200.0, 0.0), (0.5, 1.0)])
def test_a_guessed_plan_is_replaced_only_if_it_is_too_slow(
    rate: float, spare: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another plan would be faster in both cases, with more than one copy of the seed."""
    monkeypatch.setattr(plan_updates, "MEASURED_BYTES_MIN", 0)
    world = published("a", "b", "c", "d", kind="auto", seed_usd_per_gb_up=0.09)
    measure(world)
    deliver_seed(world)
    assert straight(world) == 0
    report_all(world, {name: FAST if name == "seed" else rate for name in world.peers})
    world.pass_time(LEARN_S)
    assert straight(world) == spare


def test_a_guessed_plan_with_a_stripe_for_each_peer_is_never_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its trees are the same at any rate."""
    monkeypatch.setattr(plan_updates, "MEASURED_BYTES_MIN", 0)
    world = published("a", "b", "c", kind="auto")
    deliver_seed(world)
    report_all(world, {name: FAST if name == "seed" else SLOW for name in world.peers})
    world.drain()
    world.pass_time(LEARN_S)
    assert {len(messages(peer, PlanEdges)) for peer in world.peers.values()} == {1}


def test_a_version_is_expected_at_the_time_that_a_plan_from_known_rates_predicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version whose plan is a guess is not expected at any time, so it cannot be late."""
    monkeypatch.setattr(plan_updates, "MEASURED_BYTES_MIN", 0)
    world = published("a", "b", "c")
    deliver_seed(world)
    report_all(world, dict.fromkeys(world.peers, FAST))
    publish_next(world)
    publishing = world.state._publishing
    transmission = publishing.spreading
    assert transmission is not None
    assert transmission.plan is not None
    (_, guessed), (_, known) = publishing._timings._bcast.values()
    assert guessed.expected_s is None
    assert known.expected_s == pytest.approx(transmission.plan.predicted_s)

"""What is wrong with a run, said to a person."""

from dataclasses import replace

from echo2d.core.base.ids import Version
from echo2d.core.cluster.membership import GONE_S
from echo2d.core.coordinator.alerts import BROADCASTS_MIN, alerts
from echo2d.core.protocol.control_messages import Heartbeat, Leaving, RefitDone
from echo2d.core.status.schema import SENTENCES_MAX, Alert
from tests.support.coordinator_world import World, rules, version_digest


def running(world: World | None = None, names: str = "ab") -> World:
    """A learner, the seed, and workers that serve version 0 and hold leases."""
    world = world or World()
    world.connect("seed", kind="seed")
    for name in names:
        world.connect(name)
    world.open_session()
    world.publish(0)
    world.drain()
    for name in names:
        world.refit(world.peers[name])
    world.drain()
    return world


def kinds(world: World) -> list[tuple[str, str]]:
    return [(each.kind, each.subject) for each in world.state.status(now=world.now).alerts]


def said(world: World) -> list[str]:
    return list(world.state.status(now=world.now).attention)


def beat(world: World, *names: str) -> None:
    for name in names:
        world.say(world.peers[name], Heartbeat(0))


def test_nothing_when_all_is_well() -> None:
    assert said(running()) == []


def test_an_empty_run() -> None:
    assert said(World()) == [
        "no learner has opened a session",
        "the seed is away: versions spread only from worker to worker until it is back",
        "no worker is here: nothing is generated",
    ]
    assert kinds(World()) == [("no_learner", ""), ("seed_away", ""), ("no_workers", "")]


def test_a_silent_worker_and_when_its_leases_go_to_others() -> None:
    world = running()
    assert len(world.peers["a"].leases) == 2
    world.now += 9.0
    beat(world, "b", "seed")
    assert said(world) == ["a silent for 9 s: its 2 leases go to others in 6 s"]
    assert kinds(world) == [("worker_silent", "a")]
    world.pass_time(5.9)
    beat(world, "b", "seed")
    assert said(world) == ["a silent for 15 s: its 2 leases go to others in 0 s"]
    world.pass_time(1.0)
    beat(world, "b", "seed")
    assert said(world) == [
        f"a silent for 16 s: it has no leases, and is given up at {GONE_S:.0f} s"
    ]
    for _ in range(int(GONE_S) // 4):
        world.pass_time(4.0)
        beat(world, "b", "seed")
    assert said(world) == [], "it is gone"


def test_who_said_that_it_goes_is_not_missed_when_it_has_finished() -> None:
    world = running()
    world.say(world.peers["a"], Leaving("spot notice"))
    world.pass_time(9.0)
    beat(world, "b", "seed")
    assert said(world) == ["a silent for 9 s: its 2 leases go to others in 6 s"]
    world.pass_time(8.0)
    beat(world, "b", "seed")
    assert said(world) == []


def test_versions_that_workers_do_not_serve() -> None:
    world = running(World(rules(staleness_max=0)))
    late = world.connect("late")
    assert said(world) == ["late serves no version yet"]
    world.say(late, RefitDone(Version(0), version_digest(0), 0.1, memory_ok=False))
    assert said(world) == [
        "late has weights in its engine's memory that are not those of its version"
    ]


def test_a_dissemination_bound_run_is_told_when_it_is_known() -> None:
    status = running().state.status()
    bound = replace(status, dissemination_bound=True, t_bcast_s=(1.0,) * BROADCASTS_MIN)
    assert list(alerts(bound)) == []
    assert list(alerts(replace(bound, t_bcast_s=(*bound.t_bcast_s, 1.0)))) == [
        Alert(
            "slow_broadcasts",
            "a broadcast takes longer than S + 1 = 3 train steps: the learner waits for data",
        )
    ]


def test_a_hundred_workers_do_not_fill_a_book() -> None:
    status = running().state.status()
    silent = replace(
        status.workers[0], name="x", alive=False, silent_s=7.0, leases=1, leases_end_s=8.0
    )
    many = replace(status, seed_alive=True, workers=(silent,) * 100)
    found = tuple(alerts(many))
    assert [(each.kind, each.subject) for each in found[1:]] == [("worker_silent", "x")] * 100
    sentences = replace(many, alerts=found).attention
    assert len(sentences) == SENTENCES_MAX + 1
    assert sentences[1] == "x silent for 7 s: its lease goes to others in 8 s"
    assert sentences[-1] == "and 77 more like these"

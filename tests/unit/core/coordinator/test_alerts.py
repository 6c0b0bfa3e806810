"""The alerts about a run, as sentences for people."""

from dataclasses import replace
from typing import Any

from echo2d.core.base.ids import Version
from echo2d.core.cluster.membership import PEER_GONE_S
from echo2d.core.coordinator.alerts import (
    BROADCASTS_MIN,
    FLAT_STEPS,
    alerts,
)
from echo2d.core.coordinator.events import AliveTold
from echo2d.core.protocol.control_messages import Heartbeat, Leaving, RefitDone
from echo2d.core.protocol.trajectory import StepFigures
from echo2d.core.status.schema import SENTENCES_MAX, Alert, FaultStatus, VersionBytes
from tests.support.coordinator_world import World, rules, train, version_digest
from tests.support.tinker_clients import serving


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


def test_a_healthy_run_has_no_alert() -> None:
    assert said(running()) == []


def test_an_empty_run_has_an_alert_for_each_missing_part() -> None:
    assert said(World()) == [
        "no learner has opened a session",
        "the seed is away: versions spread only from worker to worker until it is back",
        "no worker is here: nothing is generated",
    ]
    assert kinds(World()) == [("no_learner", ""), ("seed_away", ""), ("no_workers", "")]


def test_the_learner_of_clients_has_no_step_to_resume() -> None:
    world = serving()
    status = world.state.status(now=world.now)
    silent = replace(status, learner=replace(status.learner, heard=True, silent_s=500.0))
    (sentence,) = [each.sentence for each in alerts(silent) if each.kind == "learner_silent"]
    assert sentence == (
        "the learner is silent for 500 s: it has ended, hangs, or cannot reach the coordinator; look at its log, and "
        "start it with --serve"
    )


def test_the_alert_about_a_silent_worker_says_when_its_leases_are_reassigned() -> None:
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
        f"a silent for 16 s: it has no leases, and is given up at {PEER_GONE_S:.0f} s"
    ]
    for _ in range(int(PEER_GONE_S) // 4):
        world.pass_time(4.0)
        beat(world, "b", "seed")
    assert said(world) == [], "it is gone"


def test_a_worker_that_announced_its_leave_raises_no_alert_when_it_has_finished() -> None:
    world = running()
    world.say(world.peers["a"], Leaving("spot notice"))
    world.pass_time(9.0)
    beat(world, "b", "seed")
    assert said(world) == ["a silent for 9 s: its 2 leases go to others in 6 s"]
    world.pass_time(8.0)
    beat(world, "b", "seed")
    assert said(world) == []


def test_versions_that_workers_do_not_serve_raise_an_alert() -> None:
    world = running(World(rules(staleness_max=0)))
    late = world.connect("late")
    assert said(world) == ["late serves no version yet"]
    world.say(late, RefitDone(Version(0), version_digest(0), 0.1, memory_ok=False))
    assert said(world) == [
        "late has weights in its engine's memory that are not those of its version"
    ]


def test_a_worker_without_disk_room_for_new_versions_raises_an_alert() -> None:
    world = World()
    world.connect("a")
    world.connect("b")
    versions = {3: VersionBytes(1, 16 * 10**9), 4: VersionBytes(1, 10**9)}

    def low(*free: int | None) -> list[tuple[str, str]]:
        for name, disk_free in zip("ab", free, strict=True):
            world.say(world.peers[name], Heartbeat(0, disk_free))
        found = alerts(replace(world.state.status(), version_bytes=versions))
        return [(each.subject, each.sentence) for each in found if each.kind == "worker_disk_low"]

    assert low(None, None) == [], "builds that do not say"
    assert low(32 * 10**9, 32 * 10**9) == []
    ((name, sentence),) = low(32 * 10**9, 20_000_000)
    assert name == "b"
    assert sentence.startswith(
        "b has 20.0 MB of disk left, and two versions of this run may take 32.0"
    )
    assert not [each for each in world.state.status().alerts if each.kind == "worker_disk_low"]


def test_a_dissemination_bound_run_raises_an_alert_once_it_is_known() -> None:
    status = running().state.status()
    bound = replace(status, dissemination_bound=True, t_bcast_s=(1.0,) * BROADCASTS_MIN)
    assert list(alerts(bound)) == []
    assert list(alerts(replace(bound, t_bcast_s=(*bound.t_bcast_s, 1.0)))) == [
        Alert(
            "slow_broadcasts",
            "a broadcast takes longer than S + 1 = 3 train steps: the learner waits for data",
        )
    ]


def test_the_alerts_about_a_hundred_workers_stay_short() -> None:
    status = running().state.status()
    silent = replace(
        status.workers[0], name="x", alive=False, silent_s=7.0, leases=1, leases_end_s=8.0
    )
    many = replace(status, seed_alive=True, workers=(silent,) * 100)
    found = tuple(alerts(many))
    assert [(each.kind, each.subject) for each in found[1:]] == [("worker_silent", "x")] * 100
    assert {each.peer for each in found[1:]} == {silent.id}
    sentences = replace(many, alerts=found).attention
    assert len(sentences) == SENTENCES_MAX + 1
    assert sentences[1] == "x silent for 7 s: its lease goes to others in 8 s"
    assert sentences[-1] == "and 77 more like these"


def trained(world: World, steps: int, *, planned: int) -> World:
    """After so many train steps with one worker; the learner plans more."""
    world.connect("seed", kind="seed")
    world.connect("a")
    train(world, steps, planned=planned)
    world.drain()
    world.refit(world.peers["a"])
    world.drain()
    return world


def alive(world: World, software: str = "1.0") -> None:
    epoch = world.ledger.epoch
    assert world.call(lambda number: AliveTold(number, epoch, software)).status == 200


def test_a_learner_that_falls_silent_is_named_within_half_a_minute() -> None:
    world = trained(World(), 3, planned=200)
    alive(world)
    world.pass_time(29.0)
    found = {each.kind: each.sentence for each in world.state.status(now=world.now).alerts}
    assert (
        "the learner is silent for 29 s, after step 3 of 200: it has ended"
        in found["learner_silent"]
    )
    assert world.state.status(now=world.now).provision.bottleneck.text == (
        "not known: the learner is silent"
    )
    alive(world)
    assert "learner_silent" not in dict(kinds(world))


def test_a_learner_without_heartbeats_may_train_for_minutes() -> None:
    status = running().state.status()
    busy = replace(status.learner, heard=True, silent_s=100.0)
    assert list(alerts(replace(status, learner=busy))) == []
    busy = replace(busy, silent_s=500.0)
    assert list(alerts(replace(status, learner=busy, t_train_s=(90.0, 110.0)))) == []
    (alert,) = alerts(replace(status, learner=busy, t_train_s=(90.0, 95.0)))
    assert alert.kind == "learner_silent"


def test_a_learner_that_waits_for_a_batch_is_not_reported_silent() -> None:
    world = running()
    world.ask_batch(1)
    world.now += 300.0
    assert "learner_silent" not in dict(kinds(world))


def test_a_learner_that_is_silent_since_the_coordinator_started_is_named() -> None:
    world = trained(World(), 2, planned=200)
    world.crash()
    world.pass_time(25.0)
    found = {each.kind: each.sentence for each in world.state.status(now=world.now).alerts}
    assert (
        "silent for 25 s, since the coordinator started, after step 2 of 200"
        in found["learner_silent"]
    )


def test_a_finished_run_is_reported_and_reports_no_missing_worker() -> None:
    world = trained(World(), 3, planned=3)
    world.now += 100.0
    for name in ("seed", "a"):
        world.say(world.peers[name], Heartbeat(0))
    (sentence,) = said(world)
    assert sentence.startswith("the run is finished, step 3 of 3: 1 worker is still here")
    assert world.state.status(now=world.now).provision.bottleneck.text == (
        "none: the run is finished"
    )
    status = replace(world.state.status(), workers=())
    assert [each.kind for each in alerts(status)] == ["run_finished"]


def test_rewards_that_are_all_equal_raise_an_alert_after_some_steps() -> None:
    world = World(rules(filter_zero_variance=False))
    world.reward = lambda cursor, sample: 0.0
    trained(world, FLAT_STEPS - 1, planned=200)
    assert "flat_rewards" not in dict(kinds(world))
    train(world, 1, start=FLAT_STEPS - 1)
    found = {each.kind: each.sentence for each in world.state.status(now=world.now).alerts}
    assert f"for {FLAT_STEPS} train steps (mean 0.000)" in found["flat_rewards"]
    world.reward = lambda cursor, sample: float(sample % 2)
    train(world, 4, start=FLAT_STEPS)
    assert "flat_rewards" not in dict(kinds(world))


def test_a_refusal_of_the_learner_raises_an_alert_for_a_while() -> None:
    status = running().state.status()
    refusal = FaultStatus("refusal", "step 71: too old", 1, 5.0)
    (alert,) = alerts(replace(status, faults=(refusal,)))
    assert alert.sentence == (
        "the learner refuses groups, and their work is lost: step 71: too old"
    )
    assert list(alerts(replace(status, faults=(replace(refusal, age_s=500.0),)))) == []


def test_answers_that_the_learner_trains_in_part_raise_an_alert() -> None:
    status = running().state.status()
    cutting = replace(status.learner, figures=StepFigures(truncated=0.031))
    (alert,) = alerts(replace(status, learner=cutting))
    assert alert.kind == "learner_truncates"
    assert "only the first tokens of 3.1% of the last step's answers" in alert.sentence


def test_the_alerts_about_a_failed_encoding_and_a_failed_apply_give_the_reason() -> None:
    status = running().state.status()
    worker = replace(status.workers[0], lag=9)
    full = "writing x failed: No space left on device"
    faults = (
        FaultStatus("encode", f"version 3: {full}", 1, 5.0),
        FaultStatus("apply", f"{worker.name}: {full}", 1, 5.0),
        FaultStatus("apply", "another: something else", 1, 1.0),
    )
    found = alerts(replace(status, workers=(worker,), faults=faults))
    assert [(alert.kind, alert.sentence.endswith(full)) for alert in found] == [
        ("seed_cannot_encode", True),
        ("worker_stale", True),
    ]


def test_a_worker_that_offers_much_and_delivers_little_is_named() -> None:
    world = running()
    status = world.state.status(now=world.now)
    fast, other = status.workers
    fast = replace(fast, tokens_per_s=900.0, slower=1.0, leased=0)

    def named(**facts: Any) -> list[str]:
        workers = (fast, replace(other, **facts))
        found = alerts(replace(status, workers=workers))
        return [each.sentence for each in found if each.kind == "worker_slow"]

    assert named(tokens_per_s=30.0, slower=1.5, usable=2, slots=1024, leased=1) == [
        (
            "b holds 1 samples and delivers 30.0 tokens/s, others 900 on average: it may use 2 of the "
            "1024 slots that it offers; without work: a"
        )
    ]
    assert named(tokens_per_s=30.0, slower=9.0, usable=2, slots=2)
    assert named(tokens_per_s=0.0, slots=4, usable=1)
    assert not named(tokens_per_s=30.0, slower=2.0, usable=2, slots=2), "a small box"
    assert not named(tokens_per_s=450.0, slower=1.0, usable=8, slots=512), "a newcomer"
    assert not named(slots=512, usable=8), "it has done nothing yet"

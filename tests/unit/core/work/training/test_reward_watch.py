"""Rewards that always fail end the run, or pause the task, or set a worker aside; each through the whole machine."""

import re
from collections.abc import Callable

import pytest

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.protocol.control_messages import Heartbeat
from echo2d.core.work.events import RewardsProbed, SampleScored, ScoreSample
from echo2d.core.work.training.reward_watch import (
    AWAY_S_MAX,
    FAILING_S,
    FAILURES_MAX,
    LATELY_MIN,
    LATELY_S,
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    RewardWatch,
)
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World
from tests.support.rollouts import grants, world_of

RULES = {"group_size": 4, "group_min": 2, "trajectories_per_step": 8, "staleness_max": 8}
Reward = Callable[[int, int], float | None]


def broken(cursor: int, sample: int) -> None:
    """The task's code fails at every answer."""


def fine(cursor: int, sample: int) -> float:
    return float(sample % 2)


def run_of(*slots: int, reward: Reward, probed: tuple[int, int]) -> tuple[World, list[FakePeer]]:
    world, workers = world_of(*slots, **RULES)
    world.reward, world.probed = reward, probed
    return world, workers


def answer_all(world: World, *peers: FakePeer) -> int:
    """All that these workers hold. Returns how many answers that were."""
    count = 0
    for peer in peers:
        for key, sample in list(peer.open):
            world.say(peer, peer.finish(key, sample))
            count += 1
    world.drain()
    return count


def answer(world: World, peers: list[FakePeer], most: int = FAILURES_MAX) -> int:
    """Until so many are answered, or the run has stopped, or nobody gets a lease."""
    count = 0
    while count < most and world.stopped is None and (some := answer_all(world, *peers)):
        count += some
    return count


def pass_time(world: World, seconds: float) -> None:
    for _ in range(int(seconds)):
        world.pass_time(1.0)
        for peer in world.peers.values():
            world.say(peer, Heartbeat(0))
        world.drain()


def alerts(world: World) -> dict[str, str]:
    return {each.kind: each.sentence for each in world.state.status(now=world.now).alerts}


@pytest.mark.parametrize(("slots", "probed"), [((4, 4), (0, 8)), ((8,), (8, 0)), ((4, 4), (8, 0))])
def test_rewards_that_always_failed_stop_the_run(
    slots: tuple[int, ...], probed: tuple[int, int]
) -> None:
    """The answers of two workers fail, or expected answers do."""
    world, workers = run_of(*slots, reward=broken, probed=probed)
    answered = answer(world, workers, 10 * FAILURES_MAX)
    # Those of a group that is dropped meanwhile do not count.
    assert FAILURES_MAX <= answered <= 2 * FAILURES_MAX
    assert world.stopped is not None
    assert world.stopped.startswith("the rewards of task '' do not come: crashed")


def test_the_first_failure_of_a_reward_raises_an_alert() -> None:
    world, workers = run_of(1, reward=broken, probed=(8, 0))
    assert "rewards_fail" not in alerts(world)
    answer_all(world, *workers)
    said = alerts(world)["rewards_fail"]
    assert said.startswith("the rewards of task  fail, 1 in a row: crashed; none has come yet")
    (task,) = world.state.status(now=world.now).tasks
    assert task.failing is not None
    assert (task.failing.failures, task.failing.ever, task.failing.retry_s) == (1, False, None)


def test_failures_between_successes_raise_an_alert_with_their_share() -> None:
    """Answers that are left out are seen by nobody: the policy is never punished for them."""
    count = 0

    def now_and_then(cursor: int, sample: int) -> float | None:
        nonlocal count
        count += 1
        return None if count % 3 == 0 else fine(cursor, sample)

    world, workers = run_of(8, 8, reward=now_and_then, probed=(8, 0))
    answer(world, workers, 2 * LATELY_MIN)
    assert "rewards_fail" not in alerts(world)
    answer(world, workers, 2 * LATELY_MIN)
    said = alerts(world)["rewards_fail"]
    assert re.fullmatch(
        r"the reward of task  fails for [34][0-9]% of the answers, which are left out: crashed",
        said,
    )
    assert world.stopped is None
    pass_time(world, LATELY_S + 1)
    assert "rewards_fail" not in alerts(world)


def test_few_failures_stop_the_run_after_a_while() -> None:
    """Slow boxes make few answers; the expected ones are of enough prompts."""
    world, workers = run_of(1, reward=broken, probed=(8, 0))
    answer_all(world, *workers)
    pass_time(world, FAILING_S - 1)
    assert world.stopped is None
    pass_time(world, 2)
    assert world.stopped is not None


def test_a_few_failures_of_few_prompts_do_not_stop_the_run() -> None:
    world, workers = run_of(1, 1, reward=broken, probed=(0, 8))
    answer_all(world, *workers)
    pass_time(world, 4 * FAILING_S)
    assert world.stopped is None


def test_failures_of_a_task_with_few_prompts_stop_the_run_too() -> None:
    world, workers = run_of(1, reward=broken, probed=(2, 0))
    answer_all(world, *workers)
    pass_time(world, FAILING_S + 1)
    assert world.stopped is not None


def test_a_worker_whose_answers_alone_fail_is_set_aside() -> None:
    liar = {"w0"}

    def reward(cursor: int, sample: int) -> float | None:
        return None if author in liar else fine(cursor, sample)

    world, (one, two) = run_of(4, 4, reward=reward, probed=(0, 8))
    for _ in range(FAILURES_MAX):
        for author, peer in (("w0", one), ("w1", two)):
            # The other one has not begun yet.
            if author == "w0":
                answer_all(world, peer)
        if one.open == []:
            break
    assert world.stopped is None
    assert "w0 is set aside" in alerts(world)["worker_set_aside"]
    assert "crashed" in alerts(world)["worker_set_aside"]
    before = len(grants(one))
    author = "w1"
    answer(world, [two], 40)
    assert len(grants(one)) == before, "it gets no leases"
    assert "rewards_fail" not in alerts(world)


def test_a_task_that_worked_before_is_paused_and_resumes() -> None:
    world, workers = run_of(4, 4, reward=fine, probed=(8, 0))
    answer(world, workers, 8)
    world.reward = broken
    answer(world, workers, 10 * FAILURES_MAX)
    assert world.stopped is None
    given = sum(len(grants(peer)) for peer in workers)
    (task,) = world.state.status(now=world.now).tasks
    assert task.failing is not None
    assert task.failing.ever
    assert task.failing.retry_s is not None
    assert task.failing.retry_s <= PAUSE_S_MIN
    assert "it gets no leases, and is asked again in" in alerts(world)["rewards_fail"]
    pass_time(world, 600)
    assert sum(len(grants(peer)) for peer in workers) == given
    world.reward = fine
    pass_time(world, PAUSE_S_MAX + 2)
    assert "rewards_fail" not in alerts(world)
    assert answer(world, workers, 40) >= 40


def test_a_task_that_stays_away_stops_the_run() -> None:
    world, workers = run_of(4, 4, reward=fine, probed=(8, 0))
    answer(world, workers, 8)
    world.reward = broken
    answer(world, workers, 10 * FAILURES_MAX)
    pass_time(world, AWAY_S_MAX - 10)
    before = world.stopped
    pass_time(world, 20)
    assert before is None
    assert "they have failed for 30 minutes: crashed" in str(world.stopped)


def test_one_reward_among_failures_keeps_the_run_going() -> None:
    world, workers = run_of(
        4, 4, reward=lambda cursor, sample: None if (cursor + sample) % 8 else 1.0, probed=(8, 0)
    )
    assert answer(world, workers, 20 * FAILURES_MAX) >= 20 * FAILURES_MAX
    assert world.stopped is None


def test_held_samples_are_scored_again_after_growing_pauses() -> None:
    watch = RewardWatch(["t"], succeeded=True)
    for number in range(FAILURES_MAX):
        watch.failed("t", (GroupId(number), 0), number, PeerId("w"), "no", now=0.0)
    (probe,) = watch.probes()
    assert not watch.probes()
    watch.probe_ended(RewardsProbed(probe.task, 8, 0, "no"))
    assert [verdict for _, verdict, _ in watch.verdicts(now=0.0)] == ["away"]
    watch.go_away("t", now=0.0)
    assert watch.failed("t", (GroupId(99), 1), 99, PeerId("w"), "no", now=0.0)
    times: list[float] = []
    now = 0.0
    while len(times) < 8:
        at = watch.wake_at()
        assert at is not None
        now = max(now, at)
        if watch.retries(now=now) == [(GroupId(99), 1)]:
            times.append(now)
    pauses = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert watch.succeeded("t") == [(GroupId(99), 1)]
    assert (watch.alert, watch.away, watch.wake_at()) == (False, set(), None)


def test_held_samples_of_a_removed_group_are_not_scored_again() -> None:
    world, _ = run_of(1, reward=fine, probed=(0, 8))
    assert world.state._groups._judge.ask_again((GroupId(77), 0)) == []
    assert not any(isinstance(each, ScoreSample) for each in world.actions)


def test_a_slow_probe_sets_no_deadline_while_it_runs() -> None:
    watch = RewardWatch(["t"], succeeded=False)
    watch.failed("t", (GroupId(0), 0), 0, PeerId("w"), "no", now=0.0)
    assert watch.probes()
    assert watch.wake_at() == FAILING_S
    assert list(watch.verdicts(now=FAILING_S)) == []
    assert watch.wake_at() is None
    watch.probe_ended(RewardsProbed("t", 8, 0, "no"))
    assert [verdict for _, verdict, _ in watch.verdicts(now=2 * FAILING_S)] == ["stop"]


def test_an_answer_whose_reward_fails_is_no_success() -> None:
    world, (worker,) = run_of(2, reward=broken, probed=(8, 0))
    key, sample = worker.open[0]
    world.say(worker, worker.finish(key, sample))
    world.drain()
    before = alerts(world)["rewards_fail"]
    key, sample = worker.open[0]
    world.say(worker, worker.finish(key, sample))
    (group,) = world.state._groups._groups
    assert sample in group.kept
    world.state._groups.scored(SampleScored(group.group, sample, None, "nobody can say"))
    assert alerts(world)["rewards_fail"] == before

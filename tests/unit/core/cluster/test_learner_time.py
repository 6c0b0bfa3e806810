"""The learner's time: training, waiting, and waiting only for rewards."""

from echo2d.core.cluster.learner_time import PACE_STEPS, LearnerTime


def test_the_bubble_is_the_share_of_time_that_the_learner_waits() -> None:
    time, now = LearnerTime(), 0.0
    assert (time.bubble_ratio, time.bubble(1, now=now)) == (None, None)
    for _ in range(2):
        time.session_opened()
        now += 1000.0  # the learner starts; that is no waiting
        for _ in range(3):
            time.trained(3.0, now=now)
            now += 4.0
    assert time.bubble_ratio == 0.25
    assert (time.trained_s, time.waited_s) == (12.0, 4.0)
    assert time.bubble(1, now=now) == 0.0, "it did not wait for data"
    time.waits(waits=True, now=now)
    now += 4.0
    assert time.bubble(1, now=now) == 0.5
    time.waits(waits=False, now=now)
    assert time.bubble(1, now=now) == 0.5
    assert time.starved_s == 4.0


def test_waiting_for_rewards_is_counted_separately() -> None:
    time, now = LearnerTime(), 0.0
    for _ in range(3):
        time.trained(1.0, now=now)
        time.waits(waits=True, now=now)
        now += 1.0
        time.waits(waits=True, lacks_rewards=True, now=now)
        now += 3.0
        time.waits(waits=False, now=now)
        now += 1.0
    assert time.unscored_share(16, now=now) == 0.75
    assert (time.starved_s, time.unscored_s) == (12.0, 9.0)
    assert time.waited_for_rollouts_s(now=now) == 3.0
    time.trained(1.0, now=now)
    assert time.unscored_share(2, now=now) == 0.75
    time.waits(waits=True, now=now)
    now += 8.0
    assert time.unscored_share(2, now=now) == 6.0 / 16.0


def test_the_pace_of_a_learner_is_that_of_its_newest_steps() -> None:
    time = LearnerTime()
    assert time.step_s is None
    time.trained(1.0, now=0.0)
    assert time.step_s is None, "the first one began at no commit"
    for number in range(1, 2 * PACE_STEPS):
        time.trained(1.0, now=float(number if number < PACE_STEPS else 3 * number))
    assert time.step_s == 3.0 + (PACE_STEPS * 2 + 1 - 3) / PACE_STEPS

"""The summaries of train steps from which the curves are drawn."""

from echo2d.core.base.ids import Digest, GroupId, PeerId, Version
from echo2d.core.cluster.step_history import (
    CURVE_LINES_MAX,
    RECENT_STEPS_MAX,
    RunTotals,
    StepHistory,
    StepSummary,
)
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    GroupRecord,
    PromptTag,
    RewardPart,
    Source,
    StepFigures,
    TrajectoryRecord,
)
from tests.support.coordinator_world import World, train


def step_of(world: World, step: int) -> StepSummary:
    found = world.state.step_summary(step)
    assert found is not None
    return found


def trained(steps: int) -> World:
    world = World()
    world.connect("seed", kind="seed")
    world.connect("a")
    train(world, steps)
    return world


def test_the_summary_of_a_step_has_its_figures() -> None:
    world = trained(3)
    first, last = step_of(world, 1), step_of(world, 3)
    assert (first.wait_s, first.tokens_per_s, first.t_bcast_s) == (None, None, None)
    assert (last.reward, last.trajectories, last.dropped) == (0.5, 4, 0)
    assert last.staleness is not None
    assert 0 <= last.staleness <= 2
    assert last.tokens > 0
    assert last.t_bcast_s is not None
    assert world.state.step_summary(4) is None


def test_a_summary_counts_what_happened_between_two_commits() -> None:
    history = StepHistory()
    history.trained(1, [], 2.0, RunTotals(10.0, 100, 4, 1), 0.5)
    history.trained(2, [], 2.0, RunTotals(15.0, 600, 9, 1), 0.5)
    history.trained(3, [], 2.0, RunTotals(17.0, 600, 9, 2), 0.7)
    second, third = history.of(2), history.of(3)
    assert second is not None
    assert third is not None
    assert (second.wait_s, second.tokens_per_s, second.dropped) == (3.0, 100.0, 5)
    assert (second.reward, second.staleness) == (None, None), "the batch was empty"
    assert (second.t_bcast_s, third.t_bcast_s) == (None, 0.7), (
        "no broadcast ended before the second"
    )


def test_a_summary_omits_the_time_before_a_session() -> None:
    history = StepHistory()
    history.trained(1, [], 2.0, RunTotals(10.0, 100, 4, 1), 0.5)
    history.session_opened()
    history.trained(2, [], 2.0, RunTotals(9000.0, 600, 9, 2), 0.5)
    second = history.of(2)
    assert second is not None
    assert (second.wait_s, second.tokens_per_s, second.t_bcast_s) == (None, None, None)


def scored(reward: float, *parts: tuple[str, float], task: str = "sums") -> TrajectoryRecord:
    named = tuple(RewardPart(*part) for part in parts)
    span = AuthoredSpan(0, 1, Version(0), Digest(bytes(32)), PeerId("a"))
    return TrajectoryRecord(
        0, b"\1\0\0\0", bytes(4), (span,), "stop", reward, named, source=Source(task)
    )


def grouped(level: int, *trajectories: TrajectoryRecord) -> GroupRecord:
    return GroupRecord(GroupId(level), b"", trajectories, tags=(PromptTag("level", str(level)),))


def test_a_summary_has_reward_parts_tags_and_the_learners_figures() -> None:
    history = StepHistory()
    groups = [
        grouped(2, scored(1.0, ("right", 1.0), ("short", 0.0)), scored(0.0, ("right", 0.0))),
        grouped(1, scored(0.5, ("right", 1.0))),
    ]
    figures = StepFigures(entropy=1.5, grad_norm=0.25)
    history.trained(1, groups, 2.0, RunTotals(10.0, 100, 4, 1), None, figures)
    step = history.of(1)
    assert step is not None
    assert (step.reward, step.trajectories, step.tokens) == (0.5, 3, 3)
    assert step.parts == {"right": 2 / 3, "short": 0.0}
    assert step.reward_by_tag == {"level=1": 0.5, "level=2": 0.5}
    assert (step.entropy, step.kl_rollout, step.kl_base, step.grad_norm) == (1.5, None, None, 0.25)


def test_curves_have_few_lines_and_name_their_task_if_there_are_several() -> None:
    history = StepHistory()
    groups = [grouped(level, scored(0.0, ("right", 1.0))) for level in range(CURVE_LINES_MAX)]
    groups.append(grouped(CURVE_LINES_MAX, scored(1.0, ("right", 0.5), task="words")))
    history.trained(1, groups, 2.0, RunTotals(10.0, 100, 4, 1), None)
    step = history.of(1)
    assert step is not None
    assert step.parts == {"sums/right": 1.0, "words/right": 0.5}
    assert list(step.reward_by_tag) == [f"level={level}" for level in range(CURVE_LINES_MAX)]


def test_the_history_is_bounded_and_the_newest_of_a_step_counts() -> None:
    history = StepHistory()
    for step in range(2 * RECENT_STEPS_MAX):
        history.trained(step, [], 1.0, RunTotals(float(step), 0, 0, 0), None)
        history.check()
    assert history.of(0) is None
    history.trained(2 * RECENT_STEPS_MAX - 1, [], 7.0, RunTotals(9e9, 0, 0, 0), None)
    newest = history.of(2 * RECENT_STEPS_MAX - 1)
    assert newest is not None
    assert newest.t_train_s == 7.0

"""The batches that the learner refuses (I1, I5)."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from echo2d.client import PeerFault, Trajectory
from echo2d.learner.batch.checks import TRAINED_MAX, Trained, faults, staleness, staleness_histogram
from tests.support.batches import MASKS, RULES, STEP, TOO_OLD, batch_of, trajectory, with_given


def test_a_good_batch_has_no_faults() -> None:
    assert (
        faults(
            batch_of(trajectory(), trajectory(spans=[(0, 1, 5), (1, 3, 7)])), STEP, RULES, Trained()
        )
        == {}
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            lambda: trajectory(spans=[(0, 1, 4), (1, 3, 7)]),
            "version 4 in step 8 with staleness bound 2",
        ),
        (lambda: trajectory(spans=[(0, 3, 8)]), "version 8"),
        (lambda: trajectory(spans=[(0, 2, 7)]), "spans"),
        (lambda: trajectory(spans=[(0, 1, 7), (2, 3, 7)]), "spans"),
        (lambda: trajectory(spans=[(0, 2, 7), (1, 3, 7)]), "spans"),
        (lambda: trajectory(spans=[(0, 0, 7), (0, 3, 7)]), "spans"),
        (lambda: trajectory(spans=[(0, 4, 7), (4, 3, 7)]), "spans"),
        (lambda: trajectory(spans=[]), "spans"),
        (lambda: trajectory(tokens=np.array([1, 2, 17], dtype=np.int32)), "vocabulary"),
        (lambda: trajectory(tokens=np.array([1, -2, 3], dtype=np.int32)), "vocabulary"),
        (lambda: trajectory(0), "has no tokens"),
        (lambda: trajectory(logprobs=np.zeros(2, dtype=np.float32)), "2 logprobs for 3 tokens"),
        (lambda: trajectory(logprobs=np.array([0, np.nan, 0], dtype=np.float32)), "logprob"),
        (lambda: trajectory(logprobs=np.array([0, -np.inf, 0], dtype=np.float32)), "logprob"),
        (lambda: trajectory(logprobs=np.array([0, 2e-4, 0], dtype=np.float32)), "logprob"),
        (lambda: trajectory(reward=float("nan")), "reward"),
        (lambda: trajectory(given=((0, 1),)), "given tokens do not cover its 3 tokens"),
        (lambda: with_given(trajectory(), 3, [4]), "ends with given tokens"),
        (
            lambda: trajectory(spans=[], given=((0, 3),)),
            "ends with given tokens",
        ),
        (
            lambda: dataclasses.replace(
                with_given(trajectory(), 1, [4]), logprobs=np.full(4, -0.5, dtype=np.float32)
            ),
            "a given token has a logprob other than 0",
        ),
    ],
)
def test_a_bad_trajectory_is_a_fault_of_its_group_only(
    bad: Callable[[], Trajectory], reason: str
) -> None:
    found = faults(batch_of(trajectory(), bad()), STEP, RULES, Trained())
    assert list(found) == [11]
    assert reason in found[11]
    assert found[11].startswith("trajectory 1: ")


def test_given_tokens_between_written_ones_are_accepted() -> None:
    one = with_given(with_given(trajectory(), 2, [4, 5]), 1, [6])
    assert one.given == ((1, 2), (3, 5))
    assert one.written.tolist() == [True, False, True, False, False, True]
    beside = dataclasses.replace(one, given=((1, 2), (3, 4), (4, 5)))
    assert faults(batch_of(one, beside), STEP, RULES, Trained()) == {}


@pytest.mark.parametrize(
    ("names", "rewards", "fault"),
    [
        ([(0, 0), (0, 1), (1, 0)], [1, 1, 0], ""),
        ([(1, 1), (0, 0), (1, 0)], [0, 1, 0], ""),
        ([(0, 0), (0, 2), (1, 0)], [1, 1, 0], "episode 0: expected branches 0 to 1; found [0, 2]"),
        ([(0, 0), (0, 1), (1, 1)], [1, 1, 0], "expected samples 0 to 1 or 3; found [0]"),
        ([(0, 0), (1, 0), (2, 1)], [1, 1, 0], "episode 2: expected branches 0 to 0; found [1]"),
        ([(0, 0), (0, 1), (1, 0)], [1, 2, 0], "episode 0: expected one reward for all branches"),
        ([(0, 0), (0, 1), (2, 0)], [1, 1, 0], "expected samples 0 to 1 or 3; found [0, 2]"),
    ],
)
def test_a_group_of_branches_has_as_many_episodes_as_others_have_samples(
    names: list[tuple[int, int]], rewards: list[float], fault: str
) -> None:
    members = [
        trajectory(episode=episode, branch=branch, reward=reward)
        for (episode, branch), reward in zip(names, rewards, strict=True)
    ]
    found = faults(batch_of(*members), STEP, RULES, Trained())
    assert found.get(11, "").startswith(fault)
    assert bool(found) == bool(fault)


def test_branches_have_sample_numbers_of_their_own() -> None:
    batch = batch_of(trajectory(), trajectory(branch=1), trajectory(episode=1))
    alike = tuple(dataclasses.replace(each, sample=0) for each in batch.groups[1].trajectories)
    groups = (batch.groups[0], dataclasses.replace(batch.groups[1], trajectories=alike))
    assert faults(dataclasses.replace(batch, groups=groups), STEP, RULES, Trained()) == {
        11: "two of its trajectories have the same sample number"
    }


def test_a_group_has_a_prompt_and_all_samples_but_those_that_it_declares_missing() -> None:
    assert faults(batch_of(trajectory()), STEP, RULES, Trained()) == {
        11: "expected samples 0 to 1 or 3; found [0]"
    }
    batch = batch_of(trajectory())
    good, cut = batch.groups
    declared = dataclasses.replace(batch, groups=(good, dataclasses.replace(cut, left_out=(1,))))
    few = {11: "expected 2 to 2 trajectories; found 1"}
    assert faults(declared, STEP, RULES, Trained()) == few
    assert faults(declared, STEP, dataclasses.replace(RULES, group_min=1), Trained()) == {}
    for prompt in ((), (17,)):
        assert (
            "prompt"
            in faults(batch_of(trajectory(), trajectory(), prompt=prompt), STEP, RULES, Trained())[
                11
            ]
        )


@pytest.mark.parametrize(
    ("count", "left_out", "fault"),
    [
        (2, (2, 3), ""),
        (2, (2,), "expected samples 0 to 1 or 3; found [0, 1, 2]"),
        (4, (), "expected 2 to 2 trajectories; found 4"),
        (2, (2, 3, 4, 5), "expected samples 0 to 1 or 3; found [0, 1, 2, 3, 4, 5]"),
    ],
)
def test_twice_as_many_samples_may_be_drawn_if_the_others_are_left_out(
    count: int, left_out: tuple[int, ...], fault: str
) -> None:
    batch = batch_of(*[trajectory()] * count)
    last = dataclasses.replace(batch.groups[1], left_out=left_out)
    declared = dataclasses.replace(
        batch, groups=(batch_of(trajectory(), trajectory()).groups[0], last)
    )
    assert faults(declared, STEP, RULES, Trained()) == ({11: fault} if fault else {})


def test_a_batch_other_than_the_requested_one_is_the_coordinators_fault() -> None:
    batch = batch_of(trajectory(), trajectory())
    for wrong in (
        dataclasses.replace(batch, step=STEP + 1),
        dataclasses.replace(batch, groups=batch.groups[:1]),
    ):
        with pytest.raises(PeerFault, match="asked for batch 8 of 2 groups"):
            faults(wrong, STEP, RULES, Trained())


def test_a_group_is_trained_once() -> None:
    """It may not be twice in a batch, nor again in a later batch."""
    batch, trained = batch_of(trajectory(), trajectory()), Trained()
    twice = dataclasses.replace(batch, groups=batch.groups[:1] * 2)
    assert faults(twice, STEP, RULES, trained) == {10: "it is in the batch twice"}
    trained.add(batch)
    assert faults(batch, STEP, RULES, trained) == dict.fromkeys(
        (10, 11), "it was trained in step 8"
    )
    others = tuple(
        dataclasses.replace(batch.groups[0], group_id=100 + index) for index in range(TRAINED_MAX)
    )
    trained.add(dataclasses.replace(batch, groups=others))
    assert faults(batch, STEP, RULES, trained) == {}


def test_staleness_counts_from_the_oldest_span() -> None:
    mixed = trajectory(spans=[(0, 1, 5), (1, 3, 7)])
    assert staleness(mixed, STEP) == 2
    assert staleness_histogram(batch_of(trajectory(), mixed)) == {0: 3, 2: 1}


def test_a_group_without_a_fresh_token_is_refused_even_with_masks() -> None:
    stale = trajectory(2, spans=[(0, 2, TOO_OLD)])
    assert faults(batch_of(stale, stale), STEP, MASKS, Trained()) == {
        11: "it has no token with staleness up to 2"
    }
    ahead = trajectory(2, spans=[(0, 2, STEP)])
    assert list(faults(batch_of(trajectory(), ahead), STEP, MASKS, Trained())) == [11]


def test_a_row_that_cannot_fit_is_refused_or_truncated() -> None:
    batch = batch_of(trajectory(3), trajectory(6), prompt=(3, 4))
    expected = "its prompt of 2 tokens with its longest answer of 6 is beyond row_tokens_max = {}"
    for row_tokens_max, refuses_long, fault in (
        (8, True, ""),
        (7, True, expected.format(7)),
        (7, False, ""),
        (3, False, ""),
        (2, False, expected.format(2)),  # no answer fits behind this prompt
    ):
        rules = dataclasses.replace(RULES, row_tokens_max=row_tokens_max, refuses_long=refuses_long)
        found = faults(batch, STEP, rules, Trained())
        assert found.get(11, "") == fault

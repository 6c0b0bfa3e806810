"""What the learner refuses (I1, I5), and how a batch becomes micro-batches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo2d.client import Batch, Group, PeerFault, Span, Trajectory
from learner.batches import BatchRules, faults, micro_batches, staleness, staleness_histogram

RULES = BatchRules(staleness_max=2, groups=2, group_size=2, vocab_size=17)
STEP = 8


def trajectory(length: int = 3, *, spans: list[tuple[int, int, int]] | None = None, **fields: Any) -> Trajectory:
    made = Trajectory(
        tokens=np.arange(1, length + 1, dtype=np.int32),
        logprobs=np.linspace(-1.0, 0.0, length, dtype=np.float32),
        spans=tuple(Span(*span, digest="00") for span in ([(0, length, 7)] if spans is None else spans)),
        reward=1.0,
        worker="w",
    )
    return dataclasses.replace(made, **fields)


def batch_of(*members: Trajectory, prompt: tuple[int, ...] = (3, 4)) -> Batch:
    """Group 10 is right, group 11 has these members."""
    tokens = np.array(prompt, dtype=np.int32)
    good = Group(10, np.array([5], dtype=np.int32), (trajectory(), trajectory(2, reward=0.0)))
    return Batch(step=STEP, epoch=1, digest="d", groups=(good, Group(11, tokens, members)))


def test_a_good_batch_has_no_faults() -> None:
    assert faults(batch_of(trajectory(), trajectory(spans=[(0, 1, 5), (1, 3, 7)])), STEP, RULES) == {}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (lambda: trajectory(spans=[(0, 1, 4), (1, 3, 7)]), "version 4 in step 8 with staleness bound 2"),
        (lambda: trajectory(spans=[(0, 3, 8)]), "version 8"),
        (lambda: trajectory(spans=[(0, 2, 7)]), "spans"),
        (lambda: trajectory(spans=[(0, 1, 7), (2, 3, 7)]), "spans"),
        (lambda: trajectory(spans=[(0, 2, 7), (1, 3, 7)]), "spans"),
        (lambda: trajectory(spans=[(0, 0, 7), (0, 3, 7)]), "spans"),
        (lambda: trajectory(spans=[(0, 4, 7), (4, 3, 7)]), "spans"),
        (lambda: trajectory(spans=[]), "spans"),
        (lambda: trajectory(tokens=np.array([1, 2, 17], dtype=np.int32)), "vocabulary"),
        (lambda: trajectory(tokens=np.array([1, -2, 3], dtype=np.int32)), "vocabulary"),
        (lambda: trajectory(0), "missing"),
        (lambda: trajectory(logprobs=np.zeros(2, dtype=np.float32)), "2 logprobs of 3 tokens"),
        (lambda: trajectory(logprobs=np.array([0, np.nan, 0], dtype=np.float32)), "logprob"),
        (lambda: trajectory(logprobs=np.array([0, -np.inf, 0], dtype=np.float32)), "logprob"),
        (lambda: trajectory(logprobs=np.array([0, 2e-4, 0], dtype=np.float32)), "logprob"),
        (lambda: trajectory(reward=float("nan")), "reward"),
    ],
)
def test_a_bad_trajectory_is_a_fault_of_its_group_only(bad: Callable[[], Trajectory], reason: str) -> None:
    found = faults(batch_of(trajectory(), bad()), STEP, RULES)
    assert list(found) == [11]
    assert reason in found[11]
    assert found[11].startswith("trajectory 1: ")


def test_a_group_is_whole_and_has_a_prompt() -> None:
    assert faults(batch_of(trajectory()), STEP, RULES) == {11: "1 trajectories of 2"}
    for prompt in ((), (17,)):
        assert "prompt" in faults(batch_of(trajectory(), trajectory(), prompt=prompt), STEP, RULES)[11]


def test_another_batch_than_asked_for_is_the_coordinators_fault() -> None:
    batch = batch_of(trajectory(), trajectory())
    for wrong in (
        dataclasses.replace(batch, step=STEP + 1),
        dataclasses.replace(batch, groups=batch.groups[:1]),
        dataclasses.replace(batch, groups=batch.groups[:1] * 2),
    ):
        with pytest.raises(PeerFault, match="asked for batch 8 of 2 groups"):
            faults(wrong, STEP, RULES)


def test_staleness_counts_from_the_oldest_span() -> None:
    mixed = trajectory(spans=[(0, 1, 5), (1, 3, 7)])
    assert staleness(mixed, STEP) == 2
    assert staleness_histogram(batch_of(trajectory(), mixed)) == {0: 3, 2: 1}


def test_micro_batches_hold_every_row_once_within_the_limit() -> None:
    batch = batch_of(trajectory(4), trajectory(1, reward=0.0))
    micro = micro_batches(batch, 12, RULES)
    assert [part.tokens_bt.shape for part in micro] == [(2, 6), (2, 3)]
    assert micro[0].tokens_bt.tolist() == [[3, 4, 1, 2, 3, 4], [5, 1, 2, 3, 0, 0]]
    assert micro[0].answer_bt.tolist() == [
        [False, False, True, True, True, True],
        [False, True, True, True, False, False],
    ]
    for part in micro:
        assert part.answer_bt.sum() == len(part.rollout_logprobs_n) == len(part.advantages_n)


def test_logprobs_and_advantages_stand_in_the_order_of_the_marked_tokens() -> None:
    (part,) = micro_batches(batch_of(trajectory(4), trajectory(1, reward=0.0)), 1000, RULES)
    assert part.rollout_logprobs_n.tolist()[:4] == pytest.approx(np.linspace(-1.0, 0.0, 4).tolist())
    tokens = part.tokens_bt[part.answer_bt].tolist()
    assert tokens == [1, 2, 3, 4, 1, 2, 3, 1, 2, 1]
    assert np.sign(part.advantages_n).tolist() == [1, 1, 1, 1, 1, 1, 1, -1, -1, -1]


def test_a_row_longer_than_the_limit_stands_alone() -> None:
    micro = micro_batches(batch_of(trajectory(9), trajectory(9)), 4, RULES)
    assert [part.tokens_bt.shape[0] for part in micro] == [1] * 4


MASKS = dataclasses.replace(RULES, masks=True)
TOO_OLD, OLD, NEW = STEP - 4, STEP - 3, STEP - 1  # the bound is 2


def test_masked_tokens_are_read_and_not_trained_on() -> None:
    mixed = trajectory(4, spans=[(0, 1, TOO_OLD), (1, 2, OLD), (2, 4, NEW)])
    stale = trajectory(2, spans=[(0, 2, TOO_OLD)], reward=0.0)
    batch = batch_of(mixed, stale)
    assert faults(batch, STEP, MASKS) == {}
    assert list(faults(batch, STEP, RULES)) == [11]
    (part,) = micro_batches(batch, 1000, MASKS)
    assert part.tokens_bt.tolist()[0] == [3, 4, 1, 2, 3, 4]
    assert part.answer_bt.tolist()[0] == [False, False, False, True, True, True]
    assert len(part.tokens_bt) == 3  # of the other group two, of the stale trajectory none
    assert part.rollout_logprobs_n.tolist()[:3] == mixed.logprobs.tolist()[1:]
    assert np.sign(part.advantages_n[:3]).tolist() == [1, 1, 1]  # its partner's reward still counts


def test_a_group_without_one_fresh_token_is_no_group_even_with_masks() -> None:
    stale = trajectory(2, spans=[(0, 2, TOO_OLD)])
    assert faults(batch_of(stale, stale), STEP, MASKS) == {11: "no token with staleness up to 2"}
    ahead = trajectory(2, spans=[(0, 2, STEP)])
    assert list(faults(batch_of(trajectory(), ahead), STEP, MASKS)) == [11]

"""A hostile batch never gives a gradient from data that may not be trained: it is refused, with the reason."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2d.client import Batch, Group, PeerFault, Span, Trajectory
from echo2d.learner.batch.checks import BatchRules, Trained, faults
from echo2d.learner.batch.packing import answers_of
from echo2d.learner.config import Recipe
from echo2d.learner.objective.hooks import advantages_of
from tests.support.batches import with_given

VOCAB, STEP, STALENESS, GROUPS, SIZE = 17, 20, 3, 4, 3
RULES = BatchRules(STALENESS, GROUPS, SIZE, VOCAB, group_min=SIZE)
versions = st.integers(STEP - 1 - STALENESS, STEP - 1)


def made(length: int, cut: int, old: int, new: int, given: list[tuple[int, int]]) -> Trajectory:
    """given: (place, how many) among the written tokens; those at the ends are left out."""
    edges = (
        [(0, cut, min(old, new)), (cut, length, max(old, new))]
        if 0 < cut < length
        else [(0, length, old)]
    )
    found = Trajectory(
        tokens=np.arange(length, dtype=np.int32) % VOCAB,
        logprobs=np.full(length, -0.5, dtype=np.float32),
        spans=tuple(Span(*edge, digest="00") for edge in edges),
        reward=float(length % 2),
        worker="w",
    )
    for at, count in sorted(given, reverse=True):
        found = with_given(found, at, [5] * count) if at < length else found
    return found


runs = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=3)
trajectories = st.builds(made, st.integers(1, 8), st.integers(0, 8), versions, versions, runs)
groups = st.lists(trajectories, min_size=SIZE, max_size=SIZE).map(
    lambda members: tuple(dataclasses.replace(one, sample=at) for at, one in enumerate(members))
)
batches = st.lists(groups, min_size=GROUPS, max_size=GROUPS).map(
    lambda members: Batch(
        STEP,
        1,
        "digest",
        tuple(
            Group(index, np.array([1, 2], dtype=np.int32), each)
            for index, each in enumerate(members)
        ),
    )
)


def respan(change: Callable[[Span], Span]) -> Callable[[Trajectory], Trajectory]:
    return lambda one: dataclasses.replace(one, spans=(*one.spans[:-1], change(one.spans[-1])))


def at_last(name: str, value: float) -> Callable[[Trajectory], Trajectory]:
    """Replace the last token or logprob by this value."""

    def change(one: Trajectory) -> Trajectory:
        values = getattr(one, name).copy()
        values[-1] = value
        changed: dict[str, Any] = {name: values}
        return dataclasses.replace(one, **changed)

    return change


def regiven(change: Callable[[Trajectory], tuple[int, int]]) -> Callable[[Trajectory], Trajectory]:
    """Add one more given range, the last one."""
    return lambda one: dataclasses.replace(one, given=(*one.given, change(one)))


def continued(one: Trajectory, logprob: float = 0.0) -> Trajectory:
    """Append a given token with this logprob, and a written one."""
    end = len(one.tokens)
    return dataclasses.replace(
        one,
        tokens=np.append(one.tokens, one.tokens[:1].repeat(2)),
        logprobs=np.append(one.logprobs, np.array([logprob, -0.5], dtype=np.float32)),
        spans=(*one.spans, dataclasses.replace(one.spans[-1], start=end + 1, end=end + 2)),
        given=(*one.given, (end, end + 1)),
    )


ATTACKS: dict[str, Callable[[Trajectory], Trajectory]] = {
    "stale": respan(lambda span: dataclasses.replace(span, version=STEP - 2 - STALENESS)),
    "of the future": respan(lambda span: dataclasses.replace(span, version=STEP)),
    "truncated spans": respan(lambda span: dataclasses.replace(span, end=span.end - 1)),
    "spans beyond the end": respan(lambda span: dataclasses.replace(span, end=span.end + 1)),
    "a hole in the spans": respan(lambda span: dataclasses.replace(span, start=span.start + 1)),
    "spans from below": respan(lambda span: dataclasses.replace(span, start=-1)),
    "no spans": lambda one: dataclasses.replace(one, spans=()),
    "a token beyond the vocabulary": at_last("tokens", VOCAB),
    "a negative token": at_last("tokens", -1),
    "a logprob that is NaN": at_last("logprobs", float("nan")),
    "a logprob of -inf": at_last("logprobs", float("-inf")),
    "a probability above 1": at_last("logprobs", 0.1),
    "logprobs that are too few": lambda one: dataclasses.replace(one, logprobs=one.logprobs[1:]),
    "no tokens": lambda one: dataclasses.replace(one, tokens=one.tokens[:0]),
    "a reward that is NaN": lambda one: dataclasses.replace(one, reward=float("nan")),
    "an infinite reward": lambda one: dataclasses.replace(one, reward=float("inf")),
    "given tokens at the end": lambda one: with_given(one, len(one.tokens), [1, 2]),
    "written tokens that are given too": regiven(
        lambda one: (one.spans[-1].start, len(one.tokens))
    ),
    "given tokens beyond the end": regiven(lambda one: (len(one.tokens), len(one.tokens) + 1)),
    "an empty given range": regiven(lambda one: (one.spans[-1].start, one.spans[-1].start)),
    "given ranges from below": lambda one: dataclasses.replace(one, given=((-1, 0), *one.given)),
    "a given range twice": lambda one: dataclasses.replace(
        (found := continued(one)), given=(*found.given, found.given[-1])
    ),
    "given ranges out of order": lambda one: dataclasses.replace(
        (found := continued(continued(one))), given=found.given[::-1]
    ),
    "a given token with a logprob": lambda one: continued(one, -0.5),
}


def with_group(batch: Batch, index: int, group: Group) -> Batch:
    return dataclasses.replace(
        batch, groups=(*batch.groups[:index], group, *batch.groups[index + 1 :])
    )


@given(batches)
def test_a_batch_that_keeps_the_rules_is_trained(batch: Batch) -> None:
    assert faults(batch, STEP, RULES, Trained()) == {}
    for group, answers in zip(
        batch.groups, answers_of(batch, RULES, advantages_of(Recipe())), strict=True
    ):
        for trajectory, answer in zip(group.trajectories, answers, strict=True):
            assert answer.tokens.tolist() == [*group.prompt, *trajectory.tokens]
            assert answer.counts.tolist() == [*[False] * len(group.prompt), *trajectory.written]
            assert (answer.logprobs_n == -0.5).all()
            assert len(answer.logprobs_n) == answer.counts.sum()
            assert answer.staleness_n.min() >= 0
            assert answer.staleness_n.max() <= STALENESS


@pytest.mark.parametrize("attack", ATTACKS)
@settings(max_examples=12)  # of each of 25
@given(batch=batches, at=st.tuples(st.integers(0, GROUPS - 1), st.integers(0, SIZE - 1)))
def test_an_attack_on_one_trajectory_gets_only_its_group_refused(
    attack: str, batch: Batch, at: tuple[int, int]
) -> None:
    index, member = at
    group = batch.groups[index]
    members = [*group.trajectories]
    members[member] = ATTACKS[attack](members[member])
    spoilt = with_group(batch, index, dataclasses.replace(group, trajectories=tuple(members)))
    found = faults(spoilt, STEP, RULES, Trained())
    assert list(found) == [index]
    assert found[index].startswith(f"trajectory {member}: ")


@given(batch=batches, index=st.integers(0, GROUPS - 1), data=st.data())
def test_an_attacked_group_is_refused(batch: Batch, index: int, data: st.DataObject) -> None:
    group, other = batch.groups[index], batch.groups[index - 1]
    attacks = (
        dataclasses.replace(group, trajectories=group.trajectories[1:]),
        dataclasses.replace(group, trajectories=group.trajectories * 2),
        dataclasses.replace(group, prompt=group.prompt[:0]),
        dataclasses.replace(group, prompt=np.array([VOCAB], dtype=np.int32)),
        dataclasses.replace(group, group_id=other.group_id),
    )
    attacked = data.draw(st.sampled_from(attacks))
    assert list(faults(with_group(batch, index, attacked), STEP, RULES, Trained())) == [
        attacked.group_id
    ]


@given(batches)
def test_a_batch_of_another_step_or_size_ends_the_learner(batch: Batch) -> None:
    for wrong in (
        dataclasses.replace(batch, step=STEP + 1),
        dataclasses.replace(batch, groups=batch.groups[1:]),
    ):
        with pytest.raises(PeerFault, match="asked for batch 20 of 4 groups; got batch"):
            faults(wrong, STEP, RULES, Trained())

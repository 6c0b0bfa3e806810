"""Batches as the learner takes them from the coordinator, for one train step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from echo2d.client import Batch, Group, Span, Trajectory
from echo2d.learner.batch.checks import BatchRules

RULES = BatchRules(staleness_max=2, groups=2, group_size=2, vocab_size=17, group_min=2)
STEP = 8


def trajectory(
    length: int = 3, *, spans: list[tuple[int, int, int]] | None = None, **fields: Any
) -> Trajectory:
    made = Trajectory(
        tokens=np.arange(1, length + 1, dtype=np.int32),
        logprobs=np.linspace(-1.0, 0.0, length, dtype=np.float32),
        spans=tuple(
            Span(*span, digest="00") for span in ([(0, length, 7)] if spans is None else spans)
        ),
        reward=1.0,
        worker="w",
    )
    return dataclasses.replace(made, **fields)


def batch_of(*members: Trajectory, prompt: tuple[int, ...] = (3, 4)) -> Batch:
    """A batch of two groups: group 10 is right, group 11 has these members."""
    tokens = np.array(prompt, dtype=np.int32)
    good = (trajectory(), trajectory(2, reward=0.0))
    groups = (
        Group(10, np.array([5], dtype=np.int32), numbered(good)),
        Group(11, tokens, numbered(members)),
    )
    return Batch(step=STEP, epoch=1, digest="d", groups=groups)


def numbered(members: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    return tuple(dataclasses.replace(each, sample=at) for at, each in enumerate(members))


def with_given(written: Trajectory, at: int, tokens: Sequence[int]) -> Trajectory:
    """The trajectory with one turn more, and with these given tokens before its output token `at`."""
    count = len(tokens)

    def moved(place: int) -> int:
        return place + count * (place >= at)

    spans = [
        dataclasses.replace(span, start=start, end=end)
        for span in written.spans
        for start, end in (
            (span.start, min(span.end, at)),
            (max(span.start, at) + count, span.end + count),
        )
        if start < end
    ]
    given = [(moved(start), moved(start) + end - start) for start, end in written.given]
    return dataclasses.replace(
        written,
        tokens=np.insert(written.tokens, at, tokens),
        logprobs=np.insert(written.logprobs, at, [0.0] * count),
        spans=tuple(spans),
        given=tuple(sorted([*given, (at, at + count)])),
        turns=written.turns + 1,
    )


MASKS = dataclasses.replace(RULES, masks=True)
TOO_OLD, OLD, NEW = STEP - 4, STEP - 3, STEP - 1  # the bound is 2

"""Lay a batch out for the model: answers in rows, rows in micro-batches, micro-batches in optimizer
steps.

    parts        whole groups, dealt at random by (rng_seed, step): one part per optimizer step
    rows         best fit, longest answers first; a row is never longer than the longest answer,
                 so that packing does not make attention longer
    ranks        rows are dealt to the ranks in turn, longest first, so that loads differ by a row
    micro-batch  rows of similar length: at most `tokens_max` tokens with padding, or one row;
                 all ranks get the same number, some of them perhaps empty, because all ranks run
                 forward and backward together

The same batch always gives the same layout. Answers without a token in the loss are left out.

Suffixes of names: b = rows of a micro-batch, t = positions, n = answer tokens in the loss, in
row-major order.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo2d.client import Batch, Group
from learner.batches import CUT_OFF, BatchRules
from learner.objectives import group_advantages

PAD = 0  # any token id: attention is causal, so padding on the right is never seen


@dataclass(frozen=True, slots=True)
class PackedAnswer:
    """A prompt and one trajectory [t]. counts [t]: which tokens are in the loss; the others have no
    entry in n. group_id, sample: the trajectory's group, and its number there.
    """

    group_id: int
    sample: int
    tokens: NDArray[np.int32]
    counts: NDArray[np.bool_]
    logprobs_n: NDArray[np.float32]
    staleness_n: NDArray[np.int64]
    advantage: np.float32
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass, padded on the right.

    answer_bt marks the tokens in the loss. positions_bt restarts at 0 in each answer, and is None
    if no two answers share a row. answers_n is the index of each token's answer.
    trajectories names the group of each answer, and its number there.
    """

    tokens_bt: NDArray[np.int64]
    answer_bt: NDArray[np.bool_]
    positions_bt: NDArray[np.int64] | None
    rollout_logprobs_n: NDArray[np.float32]
    staleness_n: NDArray[np.int64]
    advantages_n: NDArray[np.float32]
    answers_n: NDArray[np.int64]
    temperatures_n: NDArray[np.float32]
    trajectories: tuple[tuple[int, int], ...]

    @property
    def answers(self) -> int:
        return len(self.trajectories)

    @property
    def tokens(self) -> int:
        """The number of tokens in the loss."""
        return len(self.advantages_n)


_NOTHING = MicroBatch(
    np.full((1, 2), PAD, dtype=np.int64),
    np.zeros((1, 2), dtype=np.bool_),
    None,
    np.zeros(0, dtype=np.float32),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.float32),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.float32),
    (),
)


def answers_of(batch: Batch, rules: BatchRules, *, scaled: bool) -> list[list[PackedAnswer]]:
    """Answers with tokens in the loss, by group. scaled: as in `objectives.group_advantages`."""
    return [list(_answers(group, batch.step, rules, scaled=scaled)) for group in batch.groups]


def parts(
    groups: Sequence[list[PackedAnswer]], count: int, *, step: int, rng_seed: int
) -> list[list[PackedAnswer]]:
    """The answers of each optimizer step, without empty parts. With one part the order stays as it
    is.
    """
    order = (
        np.random.default_rng((rng_seed, step)).permutation(len(groups))
        if count > 1
        else range(len(groups))
    )
    dealt: list[list[PackedAnswer]] = [[] for _ in range(count)]
    for place, index in enumerate(order):
        dealt[place % count] += groups[index]
    return [part for part in dealt if part]


def micro_batches(
    answers: Sequence[PackedAnswer], tokens_max: int, *, packed: bool, rank: int = 0, ranks: int = 1
) -> list[MicroBatch]:
    """The micro-batches of one rank. packed: whether answers may share rows."""
    by_length = sorted(answers, key=lambda answer: len(answer.tokens), reverse=True)
    rows = _best_fit(by_length) if packed else [[answer] for answer in by_length]
    rows.sort(key=_width, reverse=True)
    dealt = [_cut(rows[each::ranks], tokens_max) for each in range(ranks)]
    mine = [_collate(micro) for micro in dealt[rank]]
    return mine + [_NOTHING] * (max(map(len, dealt)) - len(mine))


def _cut(rows: Sequence[list[PackedAnswer]], tokens_max: int) -> list[Sequence[list[PackedAnswer]]]:
    """Cut rows, longest first, into micro-batches."""
    micro = []
    while rows:
        count = max(1, tokens_max // _width(rows[0]))
        micro.append(rows[:count])
        rows = rows[count:]
    return micro


def _answers(group: Group, step: int, rules: BatchRules, *, scaled: bool) -> Iterator[PackedAnswer]:
    rewards = np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float32)
    advantages = group_advantages(rewards, scaled=scaled)
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        if not rules.trains_cut and trajectory.finish in CUT_OFF:
            continue
        fresh = np.zeros(len(trajectory.tokens), dtype=np.bool_)
        staleness = np.zeros(len(trajectory.tokens), dtype=np.int64)
        for span in trajectory.spans:
            fresh[span.start : span.end] = rules.fresh(span, step)
            staleness[span.start : span.end] = (step - 1) - span.version
        if fresh.any():
            tokens = np.concatenate([group.prompt, trajectory.tokens])
            counts = np.concatenate([np.zeros(len(group.prompt), dtype=np.bool_), fresh])
            yield PackedAnswer(
                group.group_id,
                trajectory.sample,
                tokens,
                counts,
                trajectory.logprobs[fresh],
                staleness[fresh],
                advantage,
                group.sampling.temperature,
            )


def _best_fit(answers: Sequence[PackedAnswer]) -> list[list[PackedAnswer]]:
    """Pack answers, longest first, into rows that are at most as long as the first answer."""
    rows: list[list[PackedAnswer]] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for answer in answers:
        length = len(answer.tokens)
        # The first row with enough room is the one with the least room that fits.
        at = bisect.bisect_left(free, (length, 0))
        if at == len(free):
            room, row = len(answers[0].tokens), len(rows)
            rows.append([])
        else:
            room, row = free.pop(at)
        rows[row].append(answer)
        bisect.insort(free, (room - length, row))
    return rows


def _width(row: Sequence[PackedAnswer]) -> int:
    return sum(len(answer.tokens) for answer in row)


def _collate(rows: Sequence[Sequence[PackedAnswer]]) -> MicroBatch:
    shape = (len(rows), _width(rows[0]))
    tokens_bt = np.full(shape, PAD, dtype=np.int64)
    answer_bt = np.zeros(shape, dtype=np.bool_)
    positions_bt = np.tile(np.arange(shape[1]), (shape[0], 1))
    for index, row in enumerate(rows):
        start = 0
        for answer in row:
            end = start + len(answer.tokens)
            tokens_bt[index, start:end] = answer.tokens
            answer_bt[index, start:end] = answer.counts
            # Restart at 0 here. The rest of the row is overwritten by the next answer, or is
            # padding.
            positions_bt[index, start:] -= positions_bt[index, start]
            start = end
    answers = [answer for row in rows for answer in row]
    lengths = [len(answer.logprobs_n) for answer in answers]
    return MicroBatch(
        tokens_bt,
        answer_bt,
        positions_bt if len(answers) > len(rows) else None,
        np.concatenate([answer.logprobs_n for answer in answers]),
        np.concatenate([answer.staleness_n for answer in answers]),
        np.repeat([answer.advantage for answer in answers], lengths).astype(np.float32),
        np.repeat(np.arange(len(answers)), lengths),
        np.repeat([answer.temperature for answer in answers], lengths).astype(np.float32),
        tuple((answer.group_id, answer.sample) for answer in answers),
    )

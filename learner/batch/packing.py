"""Lay a batch out for the model: answers in rows, rows in micro-batches, micro-batches in optimizer
steps.

    parts        whole groups, dealt at random by (rng_seed, step): one part per optimizer step
    bundles      answers of a group that read one copy of its prompt, if the model can; else each
                 answer alone
    rows         best fit, longest first; a row is never longer than the longest answer, or than
                 ROW_TOKENS with bundles, so that packing does not make attention longer
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
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from echo2d.client import Batch, Group
from learner.batch.checks import CUT_OFF, BatchRules
from learner.objective.objectives import group_advantages

PAD = 0  # any token id: attention is causal, so padding on the right is never seen
Item = TypeVar("Item")
# A row of bundles may be so long: attention to so few tokens costs little beside the layers.
ROW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PackedAnswer:
    """A prompt and one trajectory [t]. counts [t]: which tokens are in the loss; the others have no
    entry in n. group_id, sample: the trajectory's group, and its number there. prompt: how many of
    the tokens are the prompt, which all answers of the group have alike.
    """

    group_id: int
    sample: int
    tokens: NDArray[np.int32]
    counts: NDArray[np.bool_]
    logprobs_n: NDArray[np.float32]
    staleness_n: NDArray[np.int64]
    advantage: np.float32
    temperature: float = 1.0
    prompt: int = 1


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The attention mask of rows in which several answers share one copy of their prompt.

    A piece is a shared prompt or an answer; pieces are numbered within a row. piece_bt is the piece of
    a token, prompt_bt the piece of its prompt; without a shared prompt both are the same. A token
    attends to earlier tokens of these two pieces.
    """

    piece_bt: NDArray[np.int64]
    prompt_bt: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass, padded on the right.

    answer_bt marks the tokens in the loss. positions_bt restarts in each answer, and is None if no
    two answers share a row; shared is None if no two share a prompt. answers_n is the index of each
    token's answer. trajectories names the group of each answer, and its number there.
    """

    tokens_bt: NDArray[np.int64]
    answer_bt: NDArray[np.bool_]
    positions_bt: NDArray[np.int64] | None
    shared: SharedPrompts | None
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
    None,
    np.zeros(0, dtype=np.float32),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.float32),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.float32),
    (),
)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Answers of a group and the first `shared` tokens of its prompt, which stand there once.

    The last prompt token is not shared: it predicts the first token of an answer, so each has one.
    """

    answers: Sequence[PackedAnswer]
    shared: int = 0

    @property
    def width(self) -> int:
        return self.shared + sum(len(answer.tokens) - self.shared for answer in self.answers)

    def pieces(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_], int]]:
        """The tokens of each piece, which of them are in the loss, and the first one's position."""
        first = self.answers[0]
        if self.shared:
            yield first.tokens[: self.shared], first.counts[: self.shared], 0
        for answer in self.answers:
            yield answer.tokens[self.shared :], answer.counts[self.shared :], self.shared


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
    answers: Sequence[PackedAnswer],
    tokens_max: int,
    *,
    packed: bool,
    shared: bool = False,
    rank: int = 0,
    ranks: int = 1,
) -> list[MicroBatch]:
    """The micro-batches of one rank. packed: whether answers may share rows; shared: and a prompt."""
    by_length = sorted(answers, key=lambda answer: len(answer.tokens), reverse=True)
    room = len(by_length[0].tokens)
    if shared:
        own = sum(len(answer.tokens) - answer.prompt for answer in answers)
        room = max(room, min(ROW_TOKENS, tokens_max, own // ranks))
    bundles = _bundles(by_length, room) if shared else [_Bundle([each]) for each in by_length]
    bundles.sort(key=lambda bundle: bundle.width, reverse=True)
    rows = (
        _best_fit([(bundle.width, bundle) for bundle in bundles], room)
        if packed
        else [[bundle] for bundle in bundles]
    )
    rows.sort(key=_width, reverse=True)
    dealt = [_cut(rows[each::ranks], tokens_max) for each in range(ranks)]
    mine = [_collate(micro) for micro in dealt[rank]]
    return mine + [_NOTHING] * (max(map(len, dealt)) - len(mine))


def _cut(rows: Sequence[list[_Bundle]], tokens_max: int) -> list[Sequence[list[_Bundle]]]:
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
                len(group.prompt),
            )


def _bundles(by_length: Sequence[PackedAnswer], room: int) -> list[_Bundle]:
    """The answers of each group, longest first, in bundles of at most `room` tokens."""
    groups: dict[int, list[PackedAnswer]] = {}
    for answer in by_length:
        groups.setdefault(answer.group_id, []).append(answer)
    bundles = []
    for answers in groups.values():
        shared = answers[0].prompt - 1
        if not shared:
            bundles += [_Bundle([answer]) for answer in answers]
            continue
        own = [(len(answer.tokens) - shared, answer) for answer in answers]
        bundles += [
            _Bundle(fitting, shared if len(fitting) > 1 else 0)
            for fitting in _best_fit(own, room - shared)
        ]
    return bundles


def _best_fit(items: Sequence[tuple[int, Item]], room: int) -> list[list[Item]]:
    """Put (width, item), widest first, into rows of at most `room`."""
    rows: list[list[Item]] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for width, item in items:
        # The first row with enough room is the one with the least room that fits.
        at = bisect.bisect_left(free, (width, 0))
        if at == len(free):
            left, row = room, len(rows)
            rows.append([])
        else:
            left, row = free.pop(at)
        rows[row].append(item)
        bisect.insort(free, (left - width, row))
    return rows


def _width(row: Sequence[_Bundle]) -> int:
    return sum(bundle.width for bundle in row)


def _collate(rows: Sequence[Sequence[_Bundle]]) -> MicroBatch:
    shape = (len(rows), _width(rows[0]))
    tokens_bt = np.full(shape, PAD, dtype=np.int64)
    answer_bt = np.zeros(shape, dtype=np.bool_)
    positions_bt, piece_bt, prompt_bt = np.zeros((3, *shape), dtype=np.int64)
    for index, row in enumerate(rows):
        start = piece = 0
        for bundle in row:
            prompt = piece
            for tokens, counts, position in bundle.pieces():
                end = start + len(tokens)
                tokens_bt[index, start:end] = tokens
                answer_bt[index, start:end] = counts
                positions_bt[index, start:end] = position + np.arange(len(tokens))
                # To the end of the row: padding belongs to the last piece, and nobody reads it.
                piece_bt[index, start:], prompt_bt[index, start:] = piece, prompt
                start, piece = end, piece + 1
    bundles = [bundle for row in rows for bundle in row]
    answers = [answer for bundle in bundles for answer in bundle.answers]
    lengths = [len(answer.logprobs_n) for answer in answers]
    return MicroBatch(
        tokens_bt,
        answer_bt,
        positions_bt if len(answers) > len(rows) else None,
        SharedPrompts(piece_bt, prompt_bt) if any(each.shared for each in bundles) else None,
        np.concatenate([answer.logprobs_n for answer in answers]),
        np.concatenate([answer.staleness_n for answer in answers]),
        np.repeat([answer.advantage for answer in answers], lengths).astype(np.float32),
        np.repeat(np.arange(len(answers)), lengths),
        np.repeat([answer.temperature for answer in answers], lengths).astype(np.float32),
        tuple((answer.group_id, answer.sample) for answer in answers),
    )

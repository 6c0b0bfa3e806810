"""Lay a batch out for the model: answers in rows, rows in micro-batches, micro-batches in optimizer
steps.

    parts        whole groups, dealt at random by (rng_seed, step): one part per optimizer step
    bundles      answers of a group that share one copy of its prompt; else each answer alone
    rows         of at most `tokens_max` tokens, or one bundle: as few as hold all of them, times the ranks.
                 Bundles are dealt to them, costliest first, each to the row with the least to do
    micro-batch  one row. All ranks run their first one together, then their second one, and so on, so
                 these are of about one cost: each step of the ranks waits for its slowest row

If the model cannot keep the answers of a row apart, each answer gets its own row, padded to the longest
answer of its micro-batch. The same batch always gives the same layout. Answers without a token in the loss
are left out.

Given tokens, and tokens that are too old, are read as context. They have no entry in n, so log p, ratios,
means and scores are not computed for them. Branches of an episode share its
advantage, and together they have the weight of one answer.

Suffixes of names: b = rows of a micro-batch, t = positions, p = pieces, n = answer tokens in the loss, in
row-major order, l = layers, c = experts that a token is sent to.
"""

import bisect
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from echo2d.client import Batch, Group, Trajectory
from echo2d.learner.batch.checks import CUT_OFF, BatchRules
from echo2d.learner.objective.hooks import Advantages

_PAD = 0  # any token id would do: attention is causal, so no token sees padding on its right
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class PackedAnswer:
    """A prompt and one trajectory."""

    # The trajectory's group, and its number there.
    group_id: int
    sample: int
    tokens: NDArray[np.int32]  # [t]
    counts: NDArray[np.bool_]  # [t], which tokens are in the loss; the others have no entry in n
    logprobs_n: NDArray[np.float32]
    staleness_n: NDArray[np.int64]
    advantage: np.float32
    temperature: float = 1.0
    prompt: int = 1  # how many of the tokens are the prompt, which is the same in the whole group
    # How many tokens all branches of its episode have in the loss; 0: its episode has no other branch.
    episode_tokens: int = 0
    first: bool = True  # whether it is the first of these branches in the batch
    # The experts of the output tokens [n, l, c] as the engine told them, and which of these tokens it wrote. None: it
    # told none.
    told: tuple[NDArray[Any], NDArray[np.bool_]] | None = None

    @property
    def experts(self) -> NDArray[np.int16] | None:
        """The experts with which the engine computed each token's output [t, l, c]; -1: not told. None: of no token.

        They are made when they are needed: those of a whole batch take twice the bytes of what was told.
        """
        if self.told is None:
            return None
        experts_nlc, written_n = self.told
        placed = np.full((len(self.tokens), *experts_nlc.shape[1:]), -1, dtype=np.int16)
        # Each token has those of the token after it.
        placed[self.prompt - 1 : -1][written_n] = experts_nlc[written_n]
        return placed


@dataclass(frozen=True, slots=True)
class Pieces:
    """Which tokens of a row see which. Piece p is a run of tokens. Each token sees the piece's context, which is an
    earlier run, and the tokens of the piece up to itself.

    The pieces of a row follow each other without a gap.
    """

    starts_p: NDArray[np.int64]
    tokens_p: NDArray[np.int64]
    context_starts_p: NDArray[np.int64]
    context_tokens_p: NDArray[np.int64]

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (start, tokens, start of the context, tokens of the context) for each piece."""
        columns = (self.starts_p, self.tokens_p, self.context_starts_p, self.context_tokens_p)
        yield from zip(*(column.tolist() for column in columns), strict=True)

    @property
    def pairs(self) -> int:
        """Pairs of tokens of which one sees the other."""
        own = self.tokens_p * (self.tokens_p + 1) // 2
        return int((own + self.tokens_p * self.context_tokens_p).sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: a row of pieces, or padded rows of one answer each."""

    tokens_bt: NDArray[np.int64]
    lengths_b: NDArray[np.int64]  # of the rows without their padding
    answer_bt: NDArray[np.bool_]  # marks the tokens in the loss
    # Positions restart in each answer. This and pieces are None if each answer has its own row.
    positions_bt: NDArray[np.int64] | None
    pieces: Pieces | None
    rollout_logprobs_n: NDArray[np.float32]
    staleness_n: NDArray[np.int64]
    advantages_n: NDArray[np.float32]
    answers_n: NDArray[np.int64]  # index of each token's answer
    episode_tokens_n: NDArray[np.int64]  # how many tokens the token's episode has in the loss
    temperatures_n: NDArray[np.float32]
    trajectories: tuple[tuple[int, int], ...]  # the group of each answer, and its number there
    # As in PackedAnswer, for all tokens of all rows.
    experts_tlc: NDArray[np.int16] | None = None

    @property
    def answers(self) -> int:
        return len(self.trajectories)

    @property
    def tokens(self) -> int:
        """The number of tokens in the loss."""
        return len(self.advantages_n)

    @property
    def places(self) -> NDArray[np.int64]:
        """The indices, counted over all rows, of the tokens that are not padding."""
        return np.flatnonzero(np.arange(self.tokens_bt.shape[1]) < self.lengths_b[:, None])


_NOTHING = MicroBatch(
    np.full((1, 2), _PAD, dtype=np.int64),
    np.zeros(1, dtype=np.int64),
    np.zeros((1, 2), dtype=np.bool_),
    None,
    None,
    np.zeros(0, dtype=np.float32),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.float32),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.float32),
    (),
)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Answers of a group with one copy of the first `shared` tokens of its prompt.

    The last prompt token is not shared: it predicts the first token of an answer, so each answer has
    its own.
    """

    answers: Sequence[PackedAnswer]
    shared: int = 0

    @property
    def width(self) -> int:
        return self.shared + sum(len(answer.tokens) - self.shared for answer in self.answers)

    def cost(self, pair_cost: float) -> float:
        """What its tokens and the pairs that they see cost, in tokens."""
        own = [len(answer.tokens) - self.shared for answer in self.answers]
        pairs = self.shared * (self.shared + 1) / 2
        pairs += sum(each * ((each + 1) / 2 + self.shared) for each in own)
        return self.width + pair_cost * pairs

    def split(self, room: int) -> tuple["_Bundle", "_Bundle"] | None:
        """Two bundles, of which the first fits into `room`; None: a split is not worth another copy of the prompt."""
        first: list[PackedAnswer] = []
        rest: list[PackedAnswer] = []
        free = room - self.shared
        for answer in self.answers:
            own = len(answer.tokens) - self.shared
            fits = own <= free
            (first if fits else rest).append(answer)
            free -= own if fits else 0
        if room - self.shared - free < max(1, self.shared):
            return None
        return _bundle(first, self.shared), _bundle(rest, self.shared)

    def pieces(self) -> Iterator[tuple[PackedAnswer, slice]]:
        """For each piece: an answer, and which of its tokens are the piece."""
        if self.shared:
            yield self.answers[0], slice(self.shared)
        for answer in self.answers:
            yield answer, slice(self.shared, len(answer.tokens))


def _bundle(answers: Sequence[PackedAnswer], shared: int) -> _Bundle:
    return _Bundle(answers, shared if len(answers) > 1 else 0)


def answers_of(
    batch: Batch,
    rules: BatchRules,
    advantages: Advantages,
    penalties: Mapping[tuple[int, int], float] = MappingProxyType({}),
) -> list[list[PackedAnswer]]:
    """Answers with tokens in the loss, by group. penalties: of trajectories, by group and number there; those of the
    branches of an episode are taken from its reward.
    """
    rewards = [_rewards(group, penalties) for group in batch.groups]
    found = advantages([np.array([*each.values()], dtype=np.float32) for each in rewards])
    return [
        list(_answers(group, batch.step, rules, dict(zip(episodes, found_g, strict=True))))
        for group, episodes, found_g in zip(batch.groups, rewards, found, strict=True)
    ]


def whole_answers(batch: Batch, rules: BatchRules) -> list[PackedAnswer]:
    """All answers with all their written tokens, also those that are not in the loss, as far as a row has room."""
    every = replace(rules, staleness_max=batch.step, trains_cut=True)
    return [*chain.from_iterable(answers_of(batch, every, lambda rewards: rewards))]


def _rewards(group: Group, penalties: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """The reward of each episode."""
    found: dict[int, float] = {}
    for episode, trajectory in zip(group.episodes, group.trajectories, strict=True):
        before = found.get(episode, trajectory.reward)
        found[episode] = before - penalties.get((group.group_id, trajectory.sample), 0.0)
    return found


def parts(
    groups: Sequence[list[PackedAnswer]], count: int, *, step: int, rng_seed: int
) -> list[list[PackedAnswer]]:
    """The answers of each optimizer step, without empty parts. With one part the order stays the same."""
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
    rank: int = 0,
    ranks: int = 1,
    pair_cost: float = 0.0,
    multiple: int = 1,
) -> list[MicroBatch]:
    """The micro-batches of one rank. packed: whether answers may share rows and prompts. pair_cost: of a pair of
    tokens of which one sees the other, over that of a token (`ModelSize.pair_cost`). multiple: packed rows are padded
    to a multiple of this many tokens.
    """
    by_length = sorted(answers, key=lambda answer: len(answer.tokens), reverse=True)
    if packed:
        rows = _best_rows(by_length, tokens_max, ranks, pair_cost)
        own = [_in_a_row(row, multiple) for row in rows[rank::ranks]]
        most = -(-len(rows) // ranks)
    else:
        dealt = [[*_cut(by_length[each::ranks], tokens_max)] for each in range(ranks)]
        own = [_in_rows(row) for row in dealt[rank]]
        most = max(map(len, dealt))
    return own + [_NOTHING] * (most - len(own))


def _best_rows(
    by_length: Sequence[PackedAnswer], tokens_max: int, ranks: int, pair_cost: float
) -> list[list[_Bundle]]:
    """The rows with which the ranks end first. Smaller bundles can be dealt more evenly, but copy prompts more
    often.
    """
    total = sum(len(answer.tokens) for answer in by_length)
    if ranks == 1:
        room = max(len(by_length[0].tokens), min(tokens_max, total // 8))
        return _filled(_bundles(by_length, room), tokens_max)
    tried = (
        _rows(
            _bundles(by_length, min(tokens_max, total // ranks // parts)),
            tokens_max,
            ranks,
            pair_cost,
        )
        for parts in (8, 16, 32)
    )
    return min(tried, key=lambda rows: _lock_step(rows, ranks, pair_cost))


def _lock_step(rows: Sequence[Sequence[_Bundle]], ranks: int, pair_cost: float) -> float:
    """The cost of what a rank does and waits: each step of the ranks takes as long as its costliest row, its first."""
    return sum(sum(bundle.cost(pair_cost) for bundle in row) for row in rows[::ranks])


def _rows(
    bundles: Sequence[_Bundle], room: int, ranks: int, pair_cost: float
) -> list[list[_Bundle]]:
    """Rows of at most `room` tokens, or of one bundle that is wider; the costliest first.

    They are as few as hold all bundles, times the ranks.
    """
    room = max(room, *(bundle.width for bundle in bundles))
    each = -(-sum(bundle.width for bundle in bundles) // (room * ranks))
    while (rows := _even(bundles, room, each * ranks, pair_cost)) is None:
        each += 1
    return rows


def _even(
    bundles: Sequence[_Bundle], room: int, count: int, pair_cost: float
) -> list[list[_Bundle]] | None:
    """Deal bundles to `count` rows, costliest first, each to the cheapest row that has room; the costliest row comes
    first. None: a bundle fits into no row, nor does a worthwhile part of it.
    """
    rows: list[list[_Bundle]] = [[] for _ in range(count)]
    free = [room] * count
    cheapest = [(0.0, row) for row in range(count)]
    waiting = [(-bundle.cost(pair_cost), place, bundle) for place, bundle in enumerate(bundles)]
    heapq.heapify(waiting)
    while waiting:
        _, place, bundle = heapq.heappop(waiting)
        full: list[tuple[float, int]] = []
        while cheapest and free[cheapest[0][1]] < bundle.width:
            full.append(heapq.heappop(cheapest))
        if cheapest:
            load, row = heapq.heappop(cheapest)
        else:
            load, row = max(full, key=lambda each: (free[each[1]], each))
            halves = bundle.split(free[row])
            if halves is None:
                return None
            full.remove((load, row))
            bundle, rest = halves
            heapq.heappush(waiting, (-rest.cost(pair_cost), place, rest))
        rows[row].append(bundle)
        free[row] -= bundle.width
        for each in (*full, (load + bundle.cost(pair_cost), row)):
            heapq.heappush(cheapest, each)
    return [rows[row] for _, row in sorted(cheapest, reverse=True) if rows[row]]


def _filled(bundles: Sequence[_Bundle], room: int) -> list[list[_Bundle]]:
    """Put bundles, widest first, into rows of at most `room` tokens, or of one answer that is longer.

    A bundle that fits into no row is split so that its first half fills the emptiest row.
    """
    rows: list[list[_Bundle]] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), ascending
    waiting = [(-bundle.width, place, bundle) for place, bundle in enumerate(bundles)]
    heapq.heapify(waiting)
    while waiting:
        _, place, bundle = heapq.heappop(waiting)
        # The first row with enough room is the one with the least room that fits.
        at = bisect.bisect_left(free, (bundle.width, 0))
        if at < len(free):
            left, row = free.pop(at)
        elif free and (halves := bundle.split(free[-1][0])):
            (left, row), (bundle, rest) = free.pop(), halves
            heapq.heappush(waiting, (-rest.width, place, rest))
        else:
            left, row = max(room, bundle.width), len(rows)
            rows.append([])
        rows[row].append(bundle)
        bisect.insort(free, (left - bundle.width, row))
    return rows


def _cut(answers: Sequence[PackedAnswer], tokens_max: int) -> Iterator[Sequence[PackedAnswer]]:
    """Cut answers, longest first, into the rows of micro-batches."""
    while answers:
        count = max(1, tokens_max // len(answers[0].tokens))
        yield answers[:count]
        answers = answers[count:]


def _answers(
    group: Group, step: int, rules: BatchRules, advantage_of: Mapping[int, np.float32]
) -> Iterator[PackedAnswer]:
    branches: dict[int, list[PackedAnswer]] = {}
    for episode, trajectory in zip(group.episodes, group.trajectories, strict=True):
        if answer := _answer(group, trajectory, advantage_of[episode], step, rules):
            branches.setdefault(episode, []).append(answer)
    for answers in branches.values():
        tokens = sum(len(answer.logprobs_n) for answer in answers)
        for answer in answers:
            yield replace(answer, episode_tokens=tokens, first=answer is answers[0])


def _answer(
    group: Group, trajectory: Trajectory, advantage: np.float32, step: int, rules: BatchRules
) -> PackedAnswer | None:
    """One answer; None: none of its tokens is in the loss."""
    if not rules.trains_cut and trajectory.finish in CUT_OFF:
        return None
    # Given tokens have no span, so they stay False.
    counts = np.zeros(rules.room(group, len(trajectory.tokens)), dtype=np.bool_)
    staleness = np.zeros(len(counts), dtype=np.int64)
    for span in trajectory.spans:
        counts[span.start : span.end] = rules.fresh(span, step)
        staleness[span.start : span.end] = (step - 1) - span.version
    if not counts.any():
        return None
    # Tokens after the last token in the loss are left out: attention is causal, so no token in the loss sees them.
    end = int(counts.nonzero()[0][-1]) + 1
    counts, staleness = counts[:end], staleness[:end]
    experts = rules.experts_of(trajectory)
    return PackedAnswer(
        group.group_id,
        trajectory.sample,
        np.concatenate([group.prompt, trajectory.tokens[:end]]),
        np.concatenate([np.zeros(len(group.prompt), dtype=np.bool_), counts]),
        trajectory.logprobs[:end][counts],
        staleness[counts],
        advantage,
        group.sampling.temperature,
        len(group.prompt),
        told=None if experts is None else (experts[:end], trajectory.written[:end]),
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
        bundles += [_bundle(fitting, shared) for fitting in best_fit(own, room - shared)]
    return bundles


def best_fit(items: Sequence[tuple[int, Item]], room: int) -> list[list[Item]]:
    """Put items, given as (width, item), widest first, into rows of at most `room`, or of one wider item."""
    rows: list[list[Item]] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for width, item in items:
        # The first row with enough room is the one with the least room that fits.
        at = bisect.bisect_left(free, (width, 0))
        if at == len(free):
            left, row = max(room, width), len(rows)
            rows.append([])
        else:
            left, row = free.pop(at)
        rows[row].append(item)
        bisect.insort(free, (left - width, row))
    return rows


def _in_a_row(bundles: Sequence[_Bundle], multiple: int) -> MicroBatch:
    tokens, counts, positions, pieces = [], [], [], []
    told: list[tuple[int, NDArray[np.int16] | None]] = []
    start = 0
    for bundle in bundles:
        context = (start, bundle.shared)
        for answer, part in bundle.pieces():
            own, position = answer.tokens[part], part.start or 0
            tokens.append(own)
            counts.append(answer.counts[part])
            positions.append(position + np.arange(len(own)))
            pieces.append((start, len(own), *(context if position else (0, 0))))
            experts = answer.experts
            told.append((start, None if experts is None else experts[part]))
            start += len(own)
    if padding := -start % multiple:
        # A piece of its own, so that no answer reads it.
        tokens.append(np.full(padding, _PAD, dtype=np.int32))
        counts.append(np.zeros(padding, dtype=np.bool_))
        positions.append(np.arange(padding))
        pieces.append((start, padding, 0, 0))
    return _micro_batch(
        [answer for bundle in bundles for answer in bundle.answers],
        np.concatenate(tokens).astype(np.int64)[None],
        np.array([start]),
        np.concatenate(counts)[None],
        np.concatenate(positions)[None],
        Pieces(*np.array(pieces, dtype=np.int64).T),
        _joined(told, start + padding),
    )


def _in_rows(answers: Sequence[PackedAnswer]) -> MicroBatch:
    shape = (len(answers), len(answers[0].tokens))
    tokens_bt = np.full(shape, _PAD, dtype=np.int64)
    answer_bt = np.zeros(shape, dtype=np.bool_)
    for row, answer in enumerate(answers):
        tokens_bt[row, : len(answer.tokens)] = answer.tokens
        answer_bt[row, : len(answer.tokens)] = answer.counts
    lengths_b = np.array([len(answer.tokens) for answer in answers])
    told = [(row * shape[1], answer.experts) for row, answer in enumerate(answers)]
    experts_tlc = _joined(told, shape[0] * shape[1])
    return _micro_batch(answers, tokens_bt, lengths_b, answer_bt, None, None, experts_tlc)


def _joined(
    told: Sequence[tuple[int, NDArray[np.int16] | None]], tokens: int
) -> NDArray[np.int16] | None:
    """The experts of all tokens. told: places of first tokens, with the experts from there on. None: of no token."""
    known = [(start, experts) for start, experts in told if experts is not None]
    if not known:
        return None
    joined = np.full((tokens, *known[0][1].shape[1:]), -1, dtype=np.int16)
    for start, experts in known:
        joined[start : start + len(experts)] = experts
    return joined


def _micro_batch(
    answers: Sequence[PackedAnswer],
    tokens_bt: NDArray[np.int64],
    lengths_b: NDArray[np.int64],
    answer_bt: NDArray[np.bool_],
    positions_bt: NDArray[np.int64] | None,
    pieces: Pieces | None,
    experts_tlc: NDArray[np.int16] | None,
) -> MicroBatch:
    lengths = [len(answer.logprobs_n) for answer in answers]
    return MicroBatch(
        tokens_bt,
        lengths_b,
        answer_bt,
        positions_bt,
        pieces,
        np.concatenate([answer.logprobs_n for answer in answers]),
        np.concatenate([answer.staleness_n for answer in answers]),
        np.repeat([answer.advantage for answer in answers], lengths).astype(np.float32),
        np.repeat(np.arange(len(answers)), lengths),
        np.repeat([answer.episode_tokens or len(answer.logprobs_n) for answer in answers], lengths),
        np.repeat([answer.temperature for answer in answers], lengths).astype(np.float32),
        tuple((answer.group_id, answer.sample) for answer in answers),
        experts_tlc,
    )

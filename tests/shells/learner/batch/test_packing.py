"""The layout of a batch: every counting token once, within the budget, the same each time."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echo2d.learner.batch.packing import MicroBatch, PackedAnswer, answers_of, micro_batches, parts
from echo2d.learner.config import Recipe
from echo2d.learner.objective.hooks import advantages_of
from tests.support.batches import (
    MASKS,
    NEW,
    OLD,
    RULES,
    STEP,
    TOO_OLD,
    batch_of,
    trajectory,
    with_given,
)

SCALED = advantages_of(Recipe())
CENTRED = advantages_of(Recipe(objective="dr_grpo", loss_tokens=1))


def answers(*lengths: int, prompt: int = 1) -> list[PackedAnswer]:
    """Answers of these lengths, each with its own tokens, logprobs and advantage."""
    return [
        PackedAnswer(
            group_id=0,
            sample=index,
            tokens=np.arange(100 * index, 100 * index + length, dtype=np.int32),
            counts=np.arange(length) >= prompt,
            logprobs_n=-np.arange(1, length - prompt + 1, dtype=np.float32) / np.float32(index + 1),
            staleness_n=np.full(length - prompt, index % 3),
            advantage=np.float32(index),
        )
        for index, length in enumerate(lengths)
    ]


def laid_out(found: Sequence[MicroBatch]) -> list[tuple[int, float, int, float]]:
    """(token, logprob, staleness, advantage) of every token that counts."""
    return sorted(
        fact
        for micro in found
        for fact in zip(
            micro.tokens_bt[micro.answer_bt].tolist(),
            micro.rollout_logprobs_n.tolist(),
            micro.staleness_n.tolist(),
            micro.advantages_n.tolist(),
            strict=True,
        )
    )


@settings(max_examples=40)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(1, 200))
def test_every_counting_token_is_packed_once_and_within_the_budget(
    lengths: list[int], tokens_max: int
) -> None:
    given_answers = answers(*lengths)
    plain, packed = (
        micro_batches(given_answers, tokens_max, packed=each) for each in (False, True)
    )
    assert laid_out(plain) == laid_out(packed)
    for micro in (*plain, *packed):
        assert micro.tokens_bt.size <= max(tokens_max, *lengths)
        assert micro.answers == micro.answers_n[-1] + 1
        assert (np.diff(micro.answers_n) >= 0).all()
    again = micro_batches(given_answers, tokens_max, packed=True)
    assert [micro.tokens_bt.tolist() for micro in again] == [
        micro.tokens_bt.tolist() for micro in packed
    ]


def one_group(group: int, prompt: int, lengths: Sequence[int]) -> list[PackedAnswer]:
    """Answers of these lengths to one prompt."""
    asked = 1000 + 100 * group + np.arange(prompt, dtype=np.int32)
    return [
        dataclasses.replace(
            each,
            group_id=group,
            prompt=prompt,
            tokens=np.concatenate([asked, each.tokens]),
            counts=np.concatenate([np.zeros(prompt, dtype=np.bool_), each.counts]),
        )
        for each in answers(*lengths, prompt=0)
    ]


GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=9)),
    min_size=1,
    max_size=6,
)


def told_apart(micro: MicroBatch) -> list[list[int]]:
    """What each answer of a row reads: its context and itself."""
    assert micro.pieces is not None
    assert micro.positions_bt is not None
    read, end = [], 0
    for start, tokens, context_start, context in micro.pieces.rows():
        assert (start, context_start + context <= start) == (end, True)
        end = start + tokens
        seen = np.r_[context_start : context_start + context, start:end]
        assert micro.positions_bt[0, seen].tolist() == list(range(len(seen)))
        if micro.answer_bt[0, start:end].any():
            read.append(micro.tokens_bt[0, seen].tolist())
    assert end == micro.tokens_bt.size
    return read


@settings(max_examples=60)
@given(GROUPS, st.integers(1, 300), st.integers(1, 3))
@example([(1, [3, 3]), (9, [3, 3])], 300, 1)
def test_answers_behind_a_shared_prompt_attend_to_it_and_to_themselves_alone(
    drawn: list[tuple[int, list[int]]], tokens_max: int, ranks: int
) -> None:
    given_answers = [
        each
        for group, (prompt, lengths) in enumerate(drawn)
        for each in one_group(group, prompt, lengths)
    ]
    found = [
        micro
        for rank in range(ranks)
        for micro in micro_batches(given_answers, tokens_max, packed=True, rank=rank, ranks=ranks)
    ]
    plain = micro_batches(given_answers, tokens_max, packed=False)
    assert laid_out(found) == laid_out(plain)
    whole = sorted(each.tokens.tolist() for each in given_answers)
    longest = max(len(each) for each in whole)
    assert sorted(read for micro in found if micro.tokens for read in told_apart(micro)) == whole
    assert all(micro.tokens_bt.size <= max(tokens_max, longest) for micro in found)


def test_a_group_of_short_answers_reads_its_prompt_once() -> None:
    given_answers = [each for group in range(8) for each in one_group(group, 30, [6] * 12)]
    plain, shared = (
        sum(micro.tokens_bt.size for micro in micro_batches(given_answers, 16384, packed=each))
        for each in (False, True)
    )
    assert plain == 8 * 12 * 36
    assert shared == 8 * (29 + 12 * 7)
    # Two ranks have the same amount of work.
    loads = [
        sum(
            micro.tokens
            for micro in micro_batches(given_answers, 16384, packed=True, rank=rank, ranks=2)
        )
        for rank in range(2)
    ]
    assert loads == [8 * 12 * 6 / 2] * 2


@settings(max_examples=40)
@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(1, 200), st.integers(1, 5)
)
def test_ranks_share_the_rows_and_run_as_many_micro_batches(
    lengths: list[int], tokens_max: int, ranks: int
) -> None:
    given_answers = answers(*lengths)
    whole = micro_batches(given_answers, tokens_max, packed=True)
    dealt = [
        micro_batches(given_answers, tokens_max, packed=True, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    assert laid_out([micro for mine in dealt for micro in mine]) == laid_out(whole)
    assert len({len(mine) for mine in dealt}) == 1
    loads = [sum(micro.tokens for micro in mine) for mine in dealt]
    longest = max(int(micro.answer_bt.sum(1).max()) for micro in whole)
    assert max(loads) - min(loads) <= 2 * max(longest, max(lengths))


def test_short_answers_share_a_row_and_have_positions_of_their_own() -> None:
    (micro,) = micro_batches(answers(6, 3, 2, 5), 100, packed=True)
    assert micro.tokens_bt.tolist() == [
        [0, 1, 2, 3, 4, 5, 300, 301, 302, 303, 304, 100, 101, 102, 200, 201]
    ]
    assert micro.positions_bt is not None
    assert micro.positions_bt.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]
    assert micro.pieces is not None
    assert list(micro.pieces.rows()) == [(0, 6, 0, 0), (6, 5, 0, 0), (11, 3, 0, 0), (14, 2, 0, 0)]
    assert micro.pieces.pairs == 21 + 15 + 6 + 3
    assert micro.answers_n.tolist() == [0] * 5 + [1] * 4 + [2] * 2 + [3]
    assert micro.answer_bt.sum() == micro.tokens == 12


def test_packing_leaves_hardly_any_padding() -> None:
    lengths = np.random.default_rng(0).integers(2, 200, size=300).tolist()
    sizes = [
        sum(micro.tokens_bt.size for micro in micro_batches(answers(*lengths), 1000, packed=packed))
        for packed in (False, True)
    ]
    assert sum(lengths) == sizes[1] < 1.03 * sum(lengths) < sizes[0]


def test_each_answer_has_its_own_row_without_packing() -> None:
    micro = micro_batches(answers(6, 3, 2, 5), 12, packed=False)
    assert [part.tokens_bt.shape for part in micro] == [(2, 6), (2, 3)]
    assert all(part.positions_bt is None and part.pieces is None for part in micro)


def test_a_row_longer_than_the_budget_stands_alone() -> None:
    assert [part.tokens_bt.size for part in micro_batches(answers(9, 9, 2), 4, packed=True)] == [
        9,
        9,
        2,
    ]


def test_rows_are_filled_to_the_budget() -> None:
    given_answers = [
        each for group in range(32) for each in one_group(group, 40, [20, 35, 50, 90] * 4)
    ]
    found = micro_batches(given_answers, 4096, packed=True)
    assert all(micro.tokens_bt.size <= 4096 for micro in found)
    assert sum(micro.tokens_bt.size for micro in found[:-1]) > 0.98 * 4096 * len(found[:-1])


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(1, 9),
)
def test_the_parts_of_a_step_hold_every_group_once_and_whole(
    sizes: list[int], count: int, rng_seed: int, step: int
) -> None:
    groups = [answers(*[5 + index] * size) for index, size in enumerate(sizes)]
    dealt = parts(groups, count, step=step, rng_seed=rng_seed)
    assert sorted(id(answer) for part in dealt for answer in part) == sorted(
        id(answer) for group in groups for answer in group
    )
    for group in groups:
        assert (
            sum(any(answer is each for each in part) for answer in group[:1] for part in dealt) == 1
        )
    again = parts(groups, count, step=step, rng_seed=rng_seed)
    assert [[id(each) for each in part] for part in again] == [
        [id(each) for each in part] for part in dealt
    ]
    assert len(dealt) == min(count, len(groups))


def test_each_step_deals_its_groups_to_parts_in_another_way() -> None:
    groups = [answers(5) for _ in range(20)]
    orders = {
        tuple(id(each) for each in parts(groups, 2, step=step, rng_seed=0)[0])
        for step in range(1, 5)
    }
    assert len(orders) == 4


def test_advantages_are_computed_within_each_group() -> None:
    (first, second) = answers_of(batch_of(trajectory(4), trajectory(1, reward=0.0)), RULES, CENTRED)
    assert [float(each.advantage) for each in (*first, *second)] == [0.5, -0.5, 0.5, -0.5]
    assert first[0].tokens.tolist() == [5, 1, 2, 3]
    assert first[0].logprobs_n.tolist() == pytest.approx([-1.0, -0.5, 0.0])


def test_masked_tokens_are_read_and_not_trained_on() -> None:
    mixed = trajectory(4, spans=[(0, 1, TOO_OLD), (1, 2, OLD), (2, 4, NEW)])
    stale = trajectory(2, spans=[(0, 2, TOO_OLD)], reward=0.0)
    _, found = answers_of(batch_of(mixed, stale), MASKS, SCALED)
    (answer,) = found  # of the stale trajectory no token counts
    assert answer.tokens.tolist() == [3, 4, 1, 2, 3, 4]
    assert answer.counts.tolist() == [False, False, False, True, True, True]
    assert answer.logprobs_n.tolist() == mixed.logprobs.tolist()[1:]
    assert answer.staleness_n.tolist() == [STEP - 1 - OLD, 0, 0]
    assert answer.advantage > 0  # its partner's reward still counts


def test_staleness_of_a_token_comes_from_its_span() -> None:
    mixed = trajectory(3, spans=[(0, 1, OLD + 1), (1, 3, NEW)])
    rules = dataclasses.replace(RULES, staleness_max=3)
    _, found = answers_of(batch_of(mixed, trajectory(1)), rules, SCALED)
    assert found[0].staleness_n.tolist() == [1, 0, 0]


def test_answers_that_were_cut_off_may_count_in_the_mean_alone() -> None:
    whole = trajectory(NEW, reward=1.0)
    cut = dataclasses.replace(trajectory(NEW, reward=0.0), finish="length")
    batch = batch_of(whole, cut)
    filtered = dataclasses.replace(RULES, trains_cut=False)
    both, kept = [answers_of(batch, rules, CENTRED)[1] for rules in (RULES, filtered)]
    assert [each.advantage for each in both] == [0.5, -0.5]
    assert [each.advantage for each in kept] == [0.5]


def test_an_answer_beyond_the_longest_row_loses_its_last_tokens() -> None:
    long = trajectory(6, spans=[(0, 4, NEW), (4, 6, NEW)])
    batch = batch_of(long, trajectory(2), prompt=(3, 4))
    _, (whole, short) = answers_of(batch, RULES, CENTRED)
    narrow = dataclasses.replace(RULES, row_tokens_max=7)
    _, (cut, same) = answers_of(batch, narrow, CENTRED)
    assert len(whole.tokens) == 8
    for name in ("tokens", "counts"):
        assert getattr(cut, name).tolist() == getattr(whole, name)[:7].tolist()
    for name in ("logprobs_n", "staleness_n"):
        assert getattr(cut, name).tolist() == getattr(whole, name)[:5].tolist()
    assert same.tokens.tolist() == short.tokens.tolist()
    assert cut.advantage == whole.advantage


def test_a_row_holds_no_answer_whose_only_fresh_tokens_are_beyond_its_end() -> None:
    mixed = trajectory(6, spans=[(0, 5, TOO_OLD), (5, 6, NEW)])
    narrow = dataclasses.replace(MASKS, row_tokens_max=7)
    _, found = answers_of(batch_of(mixed, trajectory(2)), narrow, CENTRED)
    assert [len(each.tokens) for each in found] == [4]


def test_given_tokens_are_read_and_not_trained_on() -> None:
    one = with_given(trajectory(4, spans=[(0, 3, OLD), (3, 4, NEW)]), 2, [9, 8])
    rules = dataclasses.replace(RULES, staleness_max=NEW - OLD)
    _, (answer, _) = answers_of(batch_of(one, trajectory(1, reward=0.0)), rules, CENTRED)
    assert answer.tokens.tolist() == [3, 4, 1, 2, 9, 8, 3, 4]
    assert answer.counts.tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2
    assert answer.logprobs_n.tolist() == trajectory(4).logprobs.tolist()
    assert answer.staleness_n.tolist() == [NEW - OLD] * 3 + [0]


def test_given_tokens_before_a_cut_are_not_read_either() -> None:
    one = with_given(trajectory(4), 2, [9, 8])
    narrow = dataclasses.replace(RULES, row_tokens_max=5)
    _, (answer, _) = answers_of(batch_of(one, trajectory(1, reward=0.0)), narrow, CENTRED)
    assert answer.tokens.tolist() == [3, 4, 1, 2]


def test_branches_of_an_episode_share_its_advantage_and_its_weight() -> None:
    members = [
        trajectory(3, branch=0),
        trajectory(4, episode=1, reward=0.0),
        trajectory(5, branch=1),
    ]
    _, found = answers_of(batch_of(*members), RULES, CENTRED)
    facts = [(each.sample, float(each.advantage), each.episode_tokens) for each in found]
    assert facts == [(0, 0.5, 8), (2, 0.5, 8), (1, -0.5, 4)]
    assert [each.first for each in found] == [True, False, True]
    narrow = micro_batches(found, 6, packed=True)
    lengths = {each.trajectories[0][1]: set(each.episode_tokens_n) for each in narrow}
    assert lengths == {0: {8}, 1: {4}, 2: {8}}

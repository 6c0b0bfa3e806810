"""Rows whose rewards are always equal are retired, tested again, and remembered."""

import random

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.protocol.trajectory import Source
from echo2d.core.rules.tasks import Informative, RowFilter
from echo2d.core.work.events import RowJudged
from echo2d.core.work.training import sampler as module
from echo2d.core.work.training.contrast import spread
from echo2d.core.work.training.sampler import Sampler


def source(row: str) -> Source:
    return Source("sums", row)


def judge(
    sampler: Sampler, row: str, version: int, *, equal: bool, spread: float = 0.5
) -> RowJudged | None:
    spread = 0.0 if equal else spread
    found = sampler.judged(source(row), equal=equal, spread=spread, version=Version(version))
    sampler.check()
    return found


def wants(sampler: Sampler, row: str, newest: int) -> bool:
    return sampler.wants(row, Version(newest))


def test_every_row_is_asked_and_none_is_remembered_without_a_filter() -> None:
    sampler = Sampler(None)
    assert judge(sampler, "a", 3, equal=True) is None
    assert wants(sampler, "a", 3)
    assert sampler.retired == 0


def test_a_row_is_retired_after_equal_groups_and_tested_some_versions_later() -> None:
    sampler = Sampler(RowFilter(retire_after=2, retest_after=10))
    assert judge(sampler, "a", 3, equal=True) == RowJudged(source("a"), 1, 1, 0.0, Version(3))
    assert wants(sampler, "a", 3)
    judge(sampler, "a", 4, equal=True)
    found = []
    for newest in (4, 13, 14):
        found.append(wants(sampler, "a", newest))
        sampler.asked()  # another row
    assert found == [False, False, True]
    assert (sampler.retired, sampler.passed) == (1, 2)
    # Equal again: it is retired anew, from the version of that test on.
    judge(sampler, "a", 14, equal=True)
    assert [wants(sampler, "a", newest) for newest in (23, 24)] == [False, True]


def test_a_row_whose_rewards_differ_is_forgotten() -> None:
    sampler = Sampler(RowFilter(1, 10))
    judge(sampler, "a", 3, equal=True)
    assert judge(sampler, "a", 13, equal=False) == RowJudged(source("a"), 0, 0, 0.0, Version(13))
    assert judge(sampler, "a", 14, equal=False) is None
    assert wants(sampler, "a", 14)


def test_prompts_without_a_row_are_always_asked() -> None:
    sampler = Sampler(RowFilter(1, 10))
    assert judge(sampler, "", 3, equal=True) is None
    assert wants(sampler, "", 3)


def test_one_row_is_asked_after_a_while_if_all_are_retired() -> None:
    """After one round of all rows: nothing else can be asked, and no new version would come."""
    sampler = Sampler(RowFilter(1, 10_000))
    for row in "abc":
        judge(sampler, row, 0, equal=True)
    assert [wants(sampler, row, 0) for row in "abca"] == [False, False, False, True]
    sampler.asked()
    assert not wants(sampler, "b", 0)


def test_the_number_of_consecutively_skipped_prompts_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PASSED_MAX", 2)
    sampler = Sampler(RowFilter(1, 10_000))
    for row in "abc":
        judge(sampler, row, 0, equal=True)
    assert [wants(sampler, row, 0) for row in "abc"] == [False, False, True]


def test_the_oldest_rows_are_forgotten_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS_MAX", 2)
    sampler = Sampler(RowFilter(1, 10))
    for row in "abc":
        judge(sampler, row, 0, equal=True)
    assert [wants(sampler, row, 0) for row in "abc"] == [True, False, False]


def known_rows(*spreads: float, explore: float = 0.1) -> Sampler:
    """Rows "0", "1" and so on with one group each, of version 0."""
    sampler = Sampler(Informative(explore))
    for row, found in enumerate(spreads):
        judge(sampler, str(row), 0, equal=not found, spread=found)
    return sampler


def test_a_row_is_informative_if_its_rewards_differ_as_much_as_the_average_rows() -> None:
    sampler = known_rows(0.0, 0.2, 0.4)
    assert [wants(sampler, row, 0) for row in ("0", "1", "2", "new", "")] == [
        False, True, True, True, True,
    ]  # fmt: skip
    assert (sampler.passed, sampler.retired) == (1, 0)


def test_a_dull_row_is_asked_again_ever_more_rarely() -> None:
    """0.1 * sqrt(age / groups) reaches the mean of 0.2 after 4 versions for each group that it had."""
    sampler, asked_at = known_rows(0.0, 0.4), []
    for newest in range(40):
        if wants(sampler, "0", newest):
            asked_at.append(newest)
            judge(sampler, "0", newest, equal=True)
        sampler.asked()  # another row
    assert asked_at == [4, 12, 24]


def test_the_newest_group_makes_half_of_the_volatility() -> None:
    sampler = known_rows(0.4)
    found = judge(sampler, "0", 7, equal=True)
    assert found == RowJudged(source("0"), 2, 1, 0.2, Version(7))
    found = judge(sampler, "0", 8, equal=False, spread=0.2)
    assert found == RowJudged(source("0"), 3, 0, 0.2, Version(8))


@pytest.mark.parametrize("spread", [0.0, 0.1, 1 / 3])
def test_all_rows_are_asked_if_all_are_alike(spread: float) -> None:
    """Also if their mean cannot be told exactly: 0.1 + 0.1 + ... is not n times 0.1."""
    sampler = known_rows(*[spread] * 49)
    assert all(wants(sampler, str(row), 0) for row in range(49))


def test_one_row_is_asked_after_a_while_if_only_dull_rows_come() -> None:
    sampler = known_rows(0.0, 0.0, 1.0)
    assert [wants(sampler, row, 0) for row in "0101"] == [False, False, False, True]


def test_another_sampler_before_a_restart_does_no_harm() -> None:
    rows = [
        RowJudged(source("a"), 3, 0, 0.4, Version(5)),
        RowJudged(source("b"), 2, 2, 0.0, Version(5)),
    ]
    retiring, scoring = Sampler(RowFilter(1, 10), rows), Sampler(Informative(0.1), rows)
    for sampler in (retiring, scoring):
        sampler.check()
        assert [wants(sampler, row, 5) for row in "ab"] == [True, False]


@pytest.mark.parametrize("policy", [RowFilter(2, 20), Informative(0.05)])
def test_a_restarted_sampler_makes_the_same_choices(policy: RowFilter | Informative) -> None:
    """10,000 choices from a history of judgements, with a restart in the middle and without."""
    kept: dict[Source, RowJudged] = {}

    def run(*, restarts: bool) -> list[bool]:
        rng, sampler, choices = random.Random(5), Sampler(policy), []
        kept.clear()
        for newest in range(10_000):
            row = str(rng.randrange(50))
            choices.append(wants(sampler, row, newest // 10))
            if choices[-1]:
                sampler.asked()
                equal = rng.random() < int(row) / 50
                judged = judge(sampler, row, newest // 10, equal=equal, spread=rng.random())
                if judged is not None:
                    kept.pop(judged.source, None)
                    if judged.groups:
                        kept[judged.source] = judged
            if restarts and newest % 700 == 699:
                sampler = Sampler(policy, kept.values())
        return choices

    assert run(restarts=False) == run(restarts=True)


@pytest.mark.parametrize("rng_seed", range(3))
def test_three_epochs_cost_less_than_six_tenths_per_informative_group(rng_seed: int) -> None:
    """Half of the rows are always solved, a quarter never: their groups teach nothing."""
    rows, rng = 400, random.Random(rng_seed)
    chances = [1.0] * (rows // 2) + [0.0] * (rows // 4) + [0.5] * (rows // 4)

    def asked_per_informative(row_filter: RowFilter | Informative | None) -> float:
        sampler, asked, informative, version = Sampler(row_filter), 0, 0, 0
        for _ in range(3):
            for row in rng.sample(range(rows), rows):
                if not wants(sampler, str(row), version):
                    continue
                sampler.asked()
                rewards = [float(rng.random() < chances[row]) for _ in range(8)]
                equal, found = len(set(rewards)) == 1, spread(rewards)
                asked, informative = asked + 1, informative + (not equal)
                judge(sampler, str(row), version, equal=equal, spread=found)
                version = informative // 8
        return asked / informative

    shuffled = asked_per_informative(None)
    for policy in (
        RowFilter(
            retire_after=1,
            retest_after=100,
        ),
        Informative(
            explore=0.01,
        ),
    ):
        assert asked_per_informative(policy) <= 0.6 * shuffled, (rng_seed, policy)

"""Rows whose rewards are always equal are retired, tested again, and remembered."""

import random

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.cluster.rules import RowFilter
from echo2d.core.protocol.trajectory import Source
from echo2d.core.rollouts import sampler as module
from echo2d.core.rollouts.events import RowJudged
from echo2d.core.rollouts.sampler import Sampler


def source(row: str) -> Source:
    return Source("sums", row)


def judge(sampler: Sampler, row: str, version: int, *, equal: bool) -> RowJudged | None:
    found = sampler.judged(source(row), equal=equal, version=Version(version))
    sampler.check()
    return found


def wants(sampler: Sampler, row: str, newest: int) -> bool:
    return sampler.wants(row, Version(newest))


def test_without_a_filter_every_row_is_asked_and_nothing_is_remembered() -> None:
    sampler = Sampler(None)
    assert judge(sampler, "a", 3, equal=True) is None
    assert wants(sampler, "a", 3)
    assert sampler.retired == 0


def test_a_row_is_retired_after_equal_groups_and_tested_some_versions_later() -> None:
    sampler = Sampler(RowFilter(retire_after=2, retest_after=10))
    assert judge(sampler, "a", 3, equal=True) == RowJudged(source("a"), 1, Version(3))
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
    assert judge(sampler, "a", 13, equal=False) == RowJudged(source("a"), 0, Version(13))
    assert judge(sampler, "a", 14, equal=False) is None
    assert wants(sampler, "a", 14)


def test_prompts_without_a_row_are_always_asked() -> None:
    sampler = Sampler(RowFilter(1, 10))
    assert judge(sampler, "", 3, equal=True) is None
    assert wants(sampler, "", 3)


def test_when_all_rows_are_retired_one_is_asked_after_a_while() -> None:
    """After one round of all rows: nothing else can be asked, and no new version would come."""
    sampler = Sampler(RowFilter(1, 10_000))
    for row in "abc":
        judge(sampler, row, 0, equal=True)
    assert [wants(sampler, row, 0) for row in "abca"] == [False, False, False, True]
    sampler.asked()
    assert not wants(sampler, "b", 0)


def test_not_too_many_prompts_in_a_row_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PASSED_MAX", 2)
    sampler = Sampler(RowFilter(1, 10_000))
    for row in "abc":
        judge(sampler, row, 0, equal=True)
    assert [wants(sampler, row, 0) for row in "abc"] == [False, False, True]


def test_the_oldest_rows_are_forgotten_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_MAX", 2)
    sampler = Sampler(RowFilter(1, 10))
    for row in "abc":
        judge(sampler, row, 0, equal=True)
    assert [wants(sampler, row, 0) for row in "abc"] == [True, False, False]


def test_a_restart_chooses_what_would_have_been_chosen() -> None:
    """10,000 choices from a history of judgements, with a restart in the middle and without."""
    kept: dict[Source, RowJudged] = {}

    def run(*, restarts: bool) -> list[bool]:
        rng, sampler, choices = random.Random(5), Sampler(RowFilter(2, 20)), []
        kept.clear()
        for newest in range(10_000):
            row = str(rng.randrange(50))
            choices.append(wants(sampler, row, newest // 10))
            if choices[-1]:
                sampler.asked()
                equal = rng.random() < int(row) / 50
                judged = sampler.judged(source(row), equal=equal, version=Version(newest // 10))
                if judged is not None:
                    kept.pop(judged.source, None)
                    if judged.equal:
                        kept[judged.source] = judged
            if restarts and newest % 700 == 699:
                sampler = Sampler(RowFilter(2, 20), kept.values())
        return choices

    assert run(restarts=False) == run(restarts=True)


@pytest.mark.parametrize("rng_seed", range(3))
def test_three_epochs_cost_less_than_six_tenths_per_informative_group(rng_seed: int) -> None:
    """Half of the rows are always solved, a quarter never: their groups teach nothing."""
    rows, rng = 400, random.Random(rng_seed)
    chances = [1.0] * (rows // 2) + [0.0] * (rows // 4) + [0.5] * (rows // 4)

    def asked_per_informative(row_filter: RowFilter | None) -> float:
        sampler, asked, informative, version = Sampler(row_filter), 0, 0, 0
        for _ in range(3):
            for row in rng.sample(range(rows), rows):
                if not wants(sampler, str(row), version):
                    continue
                sampler.asked()
                rewards = {rng.random() < chances[row] for _ in range(8)}
                asked, informative = asked + 1, informative + (len(rewards) > 1)
                judge(sampler, str(row), version, equal=len(rewards) == 1)
                version = informative // 8
        return asked / informative

    shuffled, filtered = asked_per_informative(None), asked_per_informative(RowFilter())
    assert filtered <= 0.6 * shuffled, (rng_seed, filtered / shuffled)

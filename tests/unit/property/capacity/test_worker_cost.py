"""The choice equals the best of all sets; above EXACT_MAX offers it has at most one worker more than the bound."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2d.core.capacity.worker_cost import COST_SLACK, EXACT_MAX, WorkerOffer, choose

MU = st.one_of(st.integers(1, 8).map(float), st.floats(0.01, 10.0))
USD = st.one_of(st.integers(0, 8).map(float), st.floats(0.0, 10.0))


def offers(low: int, high: int) -> st.SearchStrategy[list[WorkerOffer]]:
    pairs = st.lists(st.tuples(MU, USD), min_size=low, max_size=high)
    return pairs.map(lambda rows: [WorkerOffer(str(index), *row) for index, row in enumerate(rows)])


@settings(max_examples=60)
@given(offers(1, 9), st.floats(0.01, 1.2))
def test_no_set_of_workers_is_cheaper_than_the_choice(
    candidates: list[WorkerOffer], share: float
) -> None:
    target = share * sum(offer.mu for offer in candidates)
    best = choose(candidates, target)
    sets = [
        taken for size in range(len(candidates) + 1) for taken in combinations(candidates, size)
    ]
    enough = [
        taken for taken in sets if sum(offer.mu for offer in taken) >= target * (1 - COST_SLACK)
    ]
    assert best.enough == bool(enough)
    if enough:
        cheapest = min(sum(offer.usd_per_h for offer in taken) for taken in enough)
        assert abs(best.usd_per_h - cheapest) <= 1e-9 * max(1.0, cheapest)
        assert best.exact
        assert best.mu >= target * (1 - 2 * COST_SLACK)
        assert best.bound_usd_per_h <= cheapest * (1 + 1e-6) + 1e-9


@settings(max_examples=30)
@given(offers(EXACT_MAX + 1, 120), st.floats(0.01, 1.0))
def test_the_choice_has_at_most_one_worker_above_the_bound(
    candidates: list[WorkerOffer], share: float
) -> None:
    target = share * sum(offer.mu for offer in candidates)
    best = choose(candidates, target)
    assert best.enough
    assert best.mu >= target * (1 - 2 * COST_SLACK)
    assert (
        best.usd_per_h <= best.bound_usd_per_h + max(offer.usd_per_h for offer in candidates) + 1e-6
    )
    assert len({offer.name for offer in best.offers}) == len(best.offers)

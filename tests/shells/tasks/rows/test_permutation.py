import pytest

from echo2d.tasks.rows.permutation import permuted


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 400, 1023])
def test_an_epoch_has_each_row_once(count: int) -> None:
    for epoch in range(3):
        order = [permuted(place, count, rng_seed=7, epoch=epoch) for place in range(count)]
        assert sorted(order) == list(range(count))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def order(rng_seed: int, epoch: int) -> list[int]:
        return [permuted(place, 1000, rng_seed=rng_seed, epoch=epoch) for place in range(1000)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    # Neighbours are scattered: a sorted data set does not come sorted.
    steps = [b - a for a, b in zip(order(1, 0), order(1, 0)[1:], strict=False)]
    assert len(set(steps)) > 700


def test_a_place_costs_the_same_in_a_data_set_of_any_size() -> None:
    assert 0 <= permuted(10**15, 10**15 + 1, rng_seed=0, epoch=0) <= 10**15

from echo2d.tasks.rows.split import is_held_out, row_key, rows_of

KEYS = [row_key(f"question {number}") for number in range(20_000)]


def test_a_share_of_the_rows_is_held_out_and_the_rest_is_not() -> None:
    train = rows_of("train", len(KEYS), KEYS.__getitem__, held_out=0.2)
    held_out = rows_of("heldout", len(KEYS), KEYS.__getitem__, held_out=0.2)
    assert sorted([*train, *held_out]) == list(range(len(KEYS)))
    assert 0.19 < len(held_out) / len(KEYS) < 0.21


def test_a_row_stays_on_its_side_when_the_share_grows() -> None:
    assert all(is_held_out(key, 0.3) for key in KEYS if is_held_out(key, 0.2))


def test_all_rows_are_for_training_without_a_held_out_share() -> None:
    assert list(rows_of("train", 3, KEYS.__getitem__, held_out=0.0)) == [0, 1, 2]
    assert not rows_of("heldout", 3, KEYS.__getitem__, held_out=0.0)

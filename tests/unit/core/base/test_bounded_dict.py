"""Dictionaries with a limit."""

from echo2d.core.base.bounded_dict import keep_newest


def test_the_oldest_entries_of_a_dictionary_make_room() -> None:
    entries = {"first": 1, "second": 2, "third": 3}
    keep_newest(entries, 3)
    assert list(entries) == ["first", "second", "third"]
    keep_newest(entries, 1)
    assert entries == {"third": 3}


def test_entries_that_are_needed_stay() -> None:
    entries = {"first": 1, "second": 2, "third": 3}
    keep_newest(entries, 2, keep=["first"])
    assert list(entries) == ["first", "third"]

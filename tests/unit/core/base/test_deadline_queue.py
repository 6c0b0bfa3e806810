"""The earliest of many deadlines, after any changes."""

import random

from echo2d.core.base.deadline_queue import STALE_ENTRIES, DeadlineQueue


class Book:
    """Deadlines, and what they should be."""

    def __init__(self) -> None:
        self.due: dict[str, float] = {}
        self.deadlines = DeadlineQueue[str](self.due.get)

    def put(self, key: str, at: float) -> None:
        earlier = key not in self.due or at < self.due[key]
        self.due[key] = at
        if earlier:
            self.deadlines.set(key)

    def check(self) -> None:
        self.deadlines.check(self.due)
        assert self.deadlines.earliest() == min(self.due.values(), default=None)
        self.deadlines.check(self.due)


def test_a_deadline_may_move_either_way_and_end() -> None:
    book = Book()
    book.check()
    for key, at in (("a", 5.0), ("b", 6.0), ("a", 9.0), ("b", 7.0), ("a", 1.0), ("c", 1.0)):
        book.put(key, at)
        book.check()
    assert book.deadlines.first() in [(1.0, "a"), (1.0, "c")]
    for key in ("a", "c", "b"):
        del book.due[key]
        book.check()
    book.put("a", 3.0)
    book.check()


def test_the_queue_finds_the_earliest_of_all_deadlines() -> None:
    rng = random.Random(7)
    book = Book()
    for _ in range(3000):
        key = f"{rng.randrange(12)}"
        if rng.random() < 0.2:
            book.due.pop(key, None)
        else:
            book.put(key, book.due.get(key, 0.0) + rng.choice((2.0, 1.0, -1.5)))
        if rng.random() < 0.5:
            book.check()


def test_deadlines_that_move_again_and_again_take_no_room() -> None:
    book = Book()
    for number in range(10 * STALE_ENTRIES):
        book.put("a", 1000.0 - number)
    assert len(book.deadlines._heap) <= STALE_ENTRIES + 2
    book.check()

"""The order of the samples that wait for workers."""

import random

import pytest

from echo2d.core.tinker.draw_queue import DRAW_RETRY_S, DrawQueue
from echo2d.core.tinker.futures import FutureId
from tests.support.tinker_samplers import sample, sampler


def test_samples_of_a_caller_come_in_their_order_from_the_folders_that_are_open() -> None:
    queue = DrawQueue()
    for number, folder in enumerate(("f1", "f2", "f1", "f3")):
        queue.put(sample(sampler(folder), str(number), now=float(number)))
    found = []
    while (first := queue.ready(("f2", "f1"), "ann", now=9.0)) is not None:
        assert queue.take(first.future) is first
        queue.check()
        found.append(first.future)
    assert found == ["0", "1", "2"]
    assert [*queue.folders] == ["f3"]
    assert queue.ready(("f3",), "bob", now=9.0) is None


def test_a_sample_that_workers_failed_rests_and_is_then_first() -> None:
    queue = DrawQueue()
    one, two = sample(sampler("f1"), "1"), sample(sampler("f1"), "2")
    queue.put(two)
    queue.put_back(one, now=5.0)
    assert queue.ready(("f1",), "ann", now=5.0) is two
    assert queue.wake_at(5.0) == 5.0 + DRAW_RETRY_S
    assert queue.ready(("f1",), "ann", now=5.0 + DRAW_RETRY_S) is one
    assert queue.first("f1", "ann") is one
    assert queue.wake_at(5.0 + DRAW_RETRY_S) is None


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_calls_keeps_every_sample_in_its_place(seed: int) -> None:
    chance, queue = random.Random(seed), DrawQueue()
    samplers = [sampler(f"f{number % 3}", "ann" if number % 2 else "bob") for number in range(6)]
    inside = []
    for number in range(400):
        match chance.randrange(4):
            case 0 | 1:
                new = sample(chance.choice(samplers), str(number), now=float(number))
                inside.append(new)
                if chance.random() < 0.2:
                    queue.put_back(new, now=float(number))
                else:
                    queue.put(new)
            case 2 if inside:
                gone = inside.pop(chance.randrange(len(inside)))
                assert queue.take(gone.future) is gone
                assert queue.take(gone.future) is None
            case _:
                moved = chance.choice(samplers)
                before, moved.folder = moved.folder, f"f{chance.randrange(3)}"
                queue.moved(moved, before)
        queue.check()
        assert {each.future for each in queue} == {each.future for each in inside}
    assert queue.get(FutureId("none")) is None

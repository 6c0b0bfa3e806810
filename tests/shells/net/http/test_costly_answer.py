"""An expensive answer is made rarely, a cheap one for each request."""

from dataclasses import dataclass

import pytest

from echo2d.net.http.costly_answer import ANSWER_SHARE_MAX, CHEAP_S, CostlyAnswer


@dataclass
class Work:
    """Makes answers that take `cost_s` of CPU time, and counts them."""

    cost_s: float
    made: int = 0
    now: float = 0.0
    cpu: float = 0.0

    def make(self) -> bytes:
        self.made += 1
        self.cpu += self.cost_s
        return b"%d" % self.made


def answer(work: Work) -> CostlyAnswer[bytes]:
    return CostlyAnswer(work.make, clock=lambda: work.now, cpu=lambda: work.cpu)


def test_a_cheap_answer_is_made_for_every_caller() -> None:
    work = Work(0.9 * CHEAP_S)
    asked = answer(work)
    assert [asked.get(), asked.get()] == [b"1", b"2"]


@pytest.mark.parametrize("cost_s", [0.04, 0.1])
def test_a_costly_answer_takes_only_its_share_of_the_time(
    cost_s: float,
) -> None:
    work = Work(cost_s)
    asked = answer(work)
    got = set()
    for tick in range(1000):
        work.now = 0.1 * tick
        got.add(asked.get())
    assert work.cpu == pytest.approx(100 * ANSWER_SHARE_MAX, rel=0.06)
    assert len(got) == work.made


def test_a_cheap_answer_with_many_callers_takes_only_its_share_of_the_time() -> None:
    work = Work(0.1 * CHEAP_S)
    asked = CostlyAnswer(work.make, cheap_s=0.0, clock=lambda: work.now, cpu=lambda: work.cpu)
    for tick in range(10_000):
        work.now = 0.001 * tick
        asked.get()
    assert work.cpu == pytest.approx(10 * ANSWER_SHARE_MAX, rel=0.1)


def test_an_answer_that_became_cheap_is_made_for_each_request() -> None:
    work = Work(2 * CHEAP_S)
    asked = answer(work)
    assert [asked.get(), asked.get()] == [b"1", b"1"]
    work.cost_s, work.now = 0.0, 2 * CHEAP_S / ANSWER_SHARE_MAX
    assert [asked.get(), asked.get()] == [b"2", b"3"]


def test_a_costly_answer_is_made_again_after_an_order() -> None:
    work = Work(0.1)
    asked = answer(work)
    assert [asked.get(), asked.get()] == [b"1", b"1"]
    asked.forget()
    assert [asked.get(), asked.get()] == [b"2", b"2"]

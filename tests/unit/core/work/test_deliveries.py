"""The number of samples that a worker may hold follows from its deliveries, not from its offer."""

from dataclasses import dataclass

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.control_messages import PROGRESS_S
from echo2d.core.work.deliveries import Deliveries

WINDOW, GROUP = 128, 8


@dataclass(slots=True)
class Box:
    """slots that it offers; tokens/s of one sample, and of all of them together at most."""

    name: str
    slots: int
    speed: float = 40.0
    most: float = 1e9
    token: str = ""

    def makes(self, holds: int) -> float:
        return min(self.speed * holds, self.most)


class Pool:
    """Every box holds as many samples as it may, and reports every PROGRESS_S."""

    def __init__(self, *boxes: Box, window: int = WINDOW) -> None:
        self.deliveries = Deliveries(window, GROUP)
        self.boxes: dict[str, Box] = {}
        self.now = 0.0
        self.join(*boxes)

    def join(self, *boxes: Box) -> None:
        for box in boxes:
            self.boxes[box.name] = box
            token = box.token or box.name
            self.deliveries.holds(PeerId(box.name), token, box.slots, 0, now=self.now)
        self.deliveries.review(now=self.now)

    def holds(self, name: str) -> int:
        return min(self.boxes[name].slots, self.deliveries.bounds(PeerId(name))[0])

    def play(self, seconds: float) -> None:
        for _ in range(round(seconds / PROGRESS_S)):
            for box in self.boxes.values():
                held = self.holds(box.name)
                token = box.token or box.name
                self.deliveries.holds(PeerId(box.name), token, box.slots, held, now=self.now)
            held_now = {name: self.holds(name) for name in self.boxes}
            self.now += PROGRESS_S
            for name, held in held_now.items():
                self.deliveries.wrote(
                    PeerId(name), round(self.boxes[name].makes(held) * PROGRESS_S)
                )
            self.deliveries.review(now=self.now)
            self.deliveries.check()


FAST = Box("a", 48), Box("b", 48)


def test_equal_workers_hold_as_many_samples_as_they_offer_slots() -> None:
    pool = Pool(*FAST)
    pool.play(10.0)
    assert [pool.holds(name) for name in "ab"] == [48, 48]


def test_an_honest_slow_worker_with_many_slots_holds_its_share() -> None:
    pool = Pool(*FAST, Box("slow", 1024, most=30.0))
    pool.play(20.0)
    assert pool.holds("slow") <= 4
    assert pool.deliveries.bounds(PeerId("slow"))[1] >= 0
    assert [pool.holds(name) for name in "ab"] == [48, 48]


@pytest.mark.parametrize("slots", [8, 48, 4096])
def test_a_worker_that_delivers_nothing_is_on_trial(slots: int) -> None:
    pool = Pool(*FAST)
    pool.play(20.0)
    pool.join(Box("hold", slots, speed=0.0))
    assert min(slots, GROUP) <= pool.holds("hold") <= WINDOW / 3 / 4
    pool.play(12.0)
    assert pool.holds("hold") == 1
    assert pool.deliveries.slow() == ["hold"]


def test_all_workers_of_one_token_are_on_trial_together() -> None:
    pool = Pool(*FAST)
    pool.play(20.0)
    pool.join(*(Box(f"key{number}", 4096, speed=0.0, token="evil") for number in range(20)))
    names = [f"key{number}" for number in range(20)]
    assert sum(map(pool.holds, names)) <= WINDOW / 3
    pool.play(20.0)
    assert sum(map(pool.holds, names)) == GROUP


def test_a_fast_newcomer_soon_holds_what_it_offers() -> None:
    pool = Pool(Box("a", 512), Box("b", 512), window=3 * 512)
    pool.play(20.0)
    pool.join(Box("new", 512))
    pool.play(30.0)
    assert pool.holds("new") == 512


def test_a_worker_that_is_a_little_slower_keeps_its_slots() -> None:
    pool = Pool(*FAST, Box("old", 16, speed=40.0 * 0.75))
    pool.play(60.0)
    assert pool.holds("old") == 16


def test_a_worker_whose_rate_falls_gives_its_slots_up_and_gets_them_back() -> None:
    pool = Pool(*FAST, Box("c", 48))
    pool.play(30.0)
    assert pool.holds("c") == 48
    pool.boxes["c"].speed /= 100.0
    pool.play(60.0)
    assert pool.holds("c") <= 8
    pool.boxes["c"].speed *= 100.0
    pool.play(60.0)
    assert pool.holds("c") == 48


def test_a_lone_worker_holds_what_it_offers_whatever_it_delivers() -> None:
    pool = Pool(Box("a", 64, speed=0.01))
    pool.play(30.0)
    assert pool.holds("a") == 64


def test_a_pause_for_a_version_counts_against_no_worker() -> None:
    pool = Pool(*FAST)
    pool.play(30.0)
    before = pool.deliveries.rate(PeerId("a"))
    pool.boxes["a"].speed = 0.0
    pool.play(10.0)
    pool.deliveries.stood_still(PeerId("a"), 10.0)
    after = pool.deliveries.rate(PeerId("a"))
    assert before is not None
    assert after == pytest.approx(before, rel=0.05)

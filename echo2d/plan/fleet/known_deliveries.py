"""The delivery rates of a simulated fleet. The rate of each box is known as soon as the box is present.

A real run measures the rate of a box within a few seconds, from messages that a simulated fleet does not send.
"""

import math
from collections.abc import Mapping

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.membership import SLOTS_MAX
from echo2d.core.work.deliveries import (
    GROWTH,
    RANK_MAX,
    RANK_MIN,
    UNBOUND,
    Bounds,
    Deliveries,
    usual_speed,
)
from echo2d.plan.fleet.worker import FleetWorker


class KnownDeliveries(Deliveries):
    """Counts samples per second instead of tokens. Set `review_at` to 0 when boxes have joined or left."""

    def __init__(self, boxes: Mapping[PeerId, FleetWorker], window: int) -> None:
        super().__init__(window, 1)
        self._boxes = boxes
        self._bounds: dict[PeerId, Bounds] = {}
        # For each box: samples/s of one slot, and of all its slots.
        self._speeds: dict[PeerId, tuple[float, float]] = {}
        # The usual speed, and the ranks that were computed with it.
        self._ranked_by, self._ranks = 0.0, dict[PeerId, int]()

    def bounds(self, worker: PeerId) -> Bounds:
        return self._bounds.get(worker, UNBOUND)

    def slow(self) -> list[PeerId]:
        return []

    def holds(self, worker: PeerId, *_: object, **__: object) -> Bounds:
        """The bounds of a worker; the arguments are ignored, because nothing is measured."""
        return self._bounds.get(worker, UNBOUND)

    def review(self, **_: object) -> set[PeerId]:
        """Compute how many samples each box may hold, from the rate of its kind."""
        self.review_at = math.inf
        before, self._bounds = self._bounds, {}
        here = [(each, self._speed(each, box)) for each, box in self._boxes.items() if box.here]
        usual, pool = usual_speed([both for _, both in here]), sum([rate for _, (_, rate) in here])
        if usual != self._ranked_by:
            self._ranked_by, self._ranks = usual, {}
        if usual:
            holds_s = max(self._window / pool, GROWTH / usual)
            for each, (speed, rate) in here:
                if (rank := self._ranks.get(each)) is None:
                    slower = math.log2(usual / speed) if speed else RANK_MAX
                    rank = self._ranks[each] = max(RANK_MIN, min(RANK_MAX, round(slower)))
                self._bounds[each] = int(max(1.0, min(SLOTS_MAX, rate * holds_s))), rank
        both = before.keys() | self._bounds.keys()
        return {each for each in both if before.get(each) != self._bounds.get(each)}

    def _speed(self, worker: PeerId, box: FleetWorker) -> tuple[float, float]:
        known = self._speeds.get(worker)
        if known is None:
            speed = 1.0 / box.sample_s
            known = self._speeds[worker] = speed, box.peer.slots * speed
        return known

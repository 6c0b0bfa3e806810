"""What workers have cost since the coordinator started: their price times the time that they were here.

    hello --> here, at usd/h --> gone
                |                  |
                +-- a new hello, perhaps at another price

A worker counts from its hello until it has left or is suspected, whether it works, stands by or is
cordoned. Traffic is not in it: what the seed sends is in `Status.seed_usd_total`. Rented boxes are
paid for from before they join until after they have left; their bill is in the renter's book.
"""

from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.membership import PEERS_MAX
from echo2d.core.status.schema import CostsStatus

HOUR_S = 3600.0


@dataclass(slots=True)
class _Bill:
    """usd: until `since`. usd_per_h: from then on; 0: it is gone."""

    usd: float = 0.0
    usd_per_h: float = 0.0
    since: float = 0.0

    def at(self, now: float) -> float:
        return self.usd + self.usd_per_h * (now - self.since) / HOUR_S


class Costs:
    """See the module docstring. `now` is monotonic seconds. committed: the last step before the start."""

    def __init__(self, committed: int) -> None:
        self._committed = committed
        self._bills: dict[PeerId, _Bill] = {}
        # Of workers that were forgotten.
        self._forgotten_usd = 0.0

    def here(self, worker: PeerId, usd_per_h: float, *, now: float) -> None:
        """The worker said hello; it costs this much from now on."""
        bill = self._bills.setdefault(worker, _Bill())
        bill.usd, bill.usd_per_h, bill.since = bill.at(now), usd_per_h, now
        if len(self._bills) > PEERS_MAX:
            oldest = self._bills[next(iter(self._bills))]
            self._forgotten_usd += oldest.at(now)
            keep_newest(self._bills, PEERS_MAX)

    def gone(self, worker: PeerId, *, now: float) -> None:
        """The worker left, or counts as lost."""
        if worker in self._bills:
            self.here(worker, 0.0, now=now)

    def of(self, worker: PeerId, *, now: float) -> float:
        """USD so far."""
        return self._bills[worker].at(now) if worker in self._bills else 0.0

    def status(self, committed: int, *, now: float) -> CostsStatus:
        usd = self._forgotten_usd + sum(bill.at(now) for bill in self._bills.values())
        steps = max(0, committed - self._committed)
        return CostsStatus(
            workers_usd_per_h=sum(bill.usd_per_h for bill in self._bills.values()),
            workers_usd=usd,
            steps=steps,
            usd_per_step=usd / steps if steps and usd else None,
        )

    def check(self) -> None:
        assert len(self._bills) <= PEERS_MAX
        assert all(bill.usd >= 0 and bill.usd_per_h >= 0 for bill in self._bills.values())

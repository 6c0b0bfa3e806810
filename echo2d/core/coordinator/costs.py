"""What workers have cost since the coordinator started: for the time that they were here, and for the
versions that they received and passed on.

    hello --> here, at usd/h --> gone
                |                  |
                +-- a new hello, perhaps at another price

A worker counts from its hello until it has left or is suspected, whether it works, stands by or is
cordoned. Its traffic counts at its last price (`core/broadcast/traffic.py`). What the seed sends is in
`Status.seed_usd_total`. Rented boxes are
paid for from before they join until after they have left; their bill is in the renter's book.
"""

from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.traffic import NO_TRAFFIC, Traffic
from echo2d.core.capacity.prices import Price
from echo2d.core.cluster.membership import PEERS_MAX
from echo2d.core.status.schema import CostsStatus

HOUR_S = 3600.0
GB = 1e9
FREE = Price()


@dataclass(slots=True)
class _Bill:
    """usd: for its time until `since`. usd_per_h: from then on; 0: it is gone. price: its last one."""

    usd: float = 0.0
    usd_per_h: float = 0.0
    since: float = 0.0
    price: Price = FREE
    pays_traffic: bool = False

    def at(self, now: float) -> float:
        return self.usd + self.usd_per_h * (now - self.since) / HOUR_S


class Costs:
    """See the module docstring. `now` is monotonic seconds. committed: the last step before the start."""

    def __init__(self, committed: int, traffic: Traffic) -> None:
        self._committed = committed
        self.traffic = traffic
        self._bills: dict[PeerId, _Bill] = {}
        # Of workers that were forgotten.
        self._forgotten_usd = 0.0

    def here(self, worker: PeerId, price: Price, *, now: float) -> None:
        """The worker said hello; it costs this much from now on."""
        bill = self._bills.setdefault(worker, _Bill())
        bill.price, bill.pays_traffic = price, bool(price.usd_per_gb_down or price.usd_per_gb_up)
        bill.usd, bill.usd_per_h, bill.since = bill.at(now), price.usd_per_h, now
        if len(self._bills) > PEERS_MAX:
            self._forgotten_usd += self.of(next(iter(self._bills)), now=now)
            keep_newest(self._bills, PEERS_MAX)

    def gone(self, worker: PeerId, *, now: float) -> None:
        """The worker left, or counts as lost."""
        bill = self._bills.get(worker)
        if bill is not None:
            bill.usd, bill.usd_per_h, bill.since = bill.at(now), 0.0, now

    def of(self, worker: PeerId, *, now: float) -> float:
        """USD so far."""
        bill = self._bills.get(worker)
        if bill is None:
            return 0.0
        return bill.at(now) + (self._traffic_usd(worker, bill.price) if bill.pays_traffic else 0.0)

    def _traffic_usd(self, worker: PeerId, price: Price) -> float:
        moved = self.traffic.peers.get(worker, NO_TRAFFIC)
        return (moved.received * price.usd_per_gb_down + moved.sent * price.usd_per_gb_up) / GB

    def status(self, committed: int, *, now: float) -> CostsStatus:
        usd = self._forgotten_usd + sum([bill.at(now) for bill in self._bills.values()])
        usd += sum(
            [
                self._traffic_usd(worker, bill.price)
                for worker, bill in self._bills.items()
                if bill.pays_traffic
            ]
        )
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

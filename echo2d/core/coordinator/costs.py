"""What workers have cost since the coordinator started: the time that they were here, and their traffic.

    hello --> here, at usd/h --> gone
                |    |             |
                |    +-- heartbeat: bytes received and sent since its program started; what exceeds
                |        its last report is paid for
                +-- a new hello, perhaps at another price

A worker costs money from its hello until it has left or is suspected, whether it works, stands by
or is cordoned. Its next hello reports what it moved after its last heartbeat, unless its program
ended. A peer may report more than it moved, as its owner may state any price; at most RATE_MAX is
believed. A relay peer's traffic is counted, but costs nothing here. What the seed sends is in
`Status.seed_usd_total`. A rented box is paid for from before it joins until after it has left; that
bill is in the renter's book.
"""

from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.membership import PEERS_MAX
from echo2d.core.rules.prices import FREE, Price
from echo2d.core.status.schema import CostsStatus

# At most this many bytes/s in each direction are believed: 100 Gbit/s.
RATE_MAX = 12.5e9


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes of versions."""

    received: int = 0
    sent: int = 0


NO_TRAFFIC = Traffic()


@dataclass(slots=True)
class Bill:
    """What one peer has cost."""

    usd: float = 0.0  # without the time after `since`
    usd_per_h: float = 0.0  # since `since`; 0: the peer is gone
    since: float = 0.0
    price: Price = FREE
    traffic: Traffic = NO_TRAFFIC  # since the coordinator started
    boot_id: str = ""
    # What the program with this boot_id has moved since it started, as reported last, at told_at.
    told: Traffic = NO_TRAFFIC
    told_at: float = 0.0

    def at(self, now: float) -> float:
        return self.usd + self.usd_per_h * (now - self.since) / 3600.0


NO_BILL = Bill()


class Costs:
    """See the module docstring. `now` is monotonic seconds. committed: the last step before the start."""

    def __init__(self, committed: int) -> None:
        self._committed = committed
        self._bills: dict[PeerId, Bill] = {}
        # What forgotten workers have cost.
        self._forgotten_usd = 0.0

    def here(self, peer: PeerId, price: Price, *, now: float) -> None:
        """The peer is here, and costs this much from now on."""
        bill = self._bills.pop(peer, None) or Bill()
        self._bills[peer] = bill  # inserted last, so that the dict stays in order of age
        bill.usd, bill.since = bill.at(now), now
        bill.price, bill.usd_per_h = price, price.usd_per_h
        if len(self._bills) > PEERS_MAX:
            oldest = self._bills[next(iter(self._bills))]
            self._forgotten_usd += oldest.at(now)
            keep_newest(self._bills, PEERS_MAX)

    def began(self, peer: PeerId, boot_id: str, told: Traffic, *, now: float) -> int:
        """A peer said hello. Returns how many bytes were sent since the last report, as `moved` does.

        What it moved before its first hello to this coordinator is not counted, nor is anything of
        a peer that was never `here`.
        """
        bill = self._bills.get(peer)
        if bill is not None and bill.boot_id == boot_id:
            return self.moved(peer, told, now=now)
        if bill is not None:
            bill.boot_id, bill.told, bill.told_at = boot_id, told, now
        return 0

    def moved(self, peer: PeerId, told: Traffic, *, now: float) -> int:
        """Count a heartbeat's traffic, and return how many bytes were sent since the last report.

        told: traffic since the peer's program started.
        """
        bill = self._bills.get(peer)
        if bill is None or told == bill.told:
            return 0
        most = int(RATE_MAX * (now - bill.told_at))
        received = max(0, min(told.received - bill.told.received, most))
        sent = max(0, min(told.sent - bill.told.sent, most))
        bill.traffic = Traffic(bill.traffic.received + received, bill.traffic.sent + sent)
        bill.usd += (received * bill.price.usd_per_gb_down + sent * bill.price.usd_per_gb_up) / 1e9
        bill.told, bill.told_at = told, now
        return sent

    def gone(self, peer: PeerId, *, now: float) -> None:
        """The peer left, or counts as lost."""
        bill = self._bills.get(peer)
        if bill is not None:
            bill.usd, bill.usd_per_h, bill.since = bill.at(now), 0.0, now

    def of(self, peer: PeerId) -> Bill:
        return self._bills.get(peer) or NO_BILL

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

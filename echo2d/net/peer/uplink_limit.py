"""Limits what all links of a peer send together to the rate that its owner allows and its uplink carries.

Frames wait for their turn. Messages are small and are sent at once; the frames after them wait longer in return.
The owner's limit holds whatever rate `core/topology/uplink_pace` measures.
"""

import asyncio
from collections.abc import Callable, Iterable

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.uplink_pace import HEADERS, LONG, LOOK_S, Sent, TokenBucket, UplinkPace
from echo2d.net.peer.tcp_info import TcpInfo

# The loop's clock ticks in milliseconds: with shorter waits the loop would turn all the time.
_TICK_S = 0.001
# A connection with fewer packets in flight shows little about the queue.
IN_FLIGHT_MIN = 4


class UplinkLimit:
    """most: bytes/s that the owner allows; None: no limit. infos: returns the TcpInfo of every link.

    allowed: called with a peer that had to wait, as soon as a frame may be sent to it.
    """

    def __init__(
        self,
        most: float | None,
        infos: Callable[[], Iterable[TcpInfo]],
        allowed: Callable[[PeerId], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._most, self._infos, self._allowed = most, infos, allowed
        self._pace = UplinkPace()
        self._look_at = 0.0
        self._allowance = TokenBucket(most, now=self._loop.time())
        self._waiting: dict[PeerId, None] = {}  # first come, first served
        self._timer: asyncio.TimerHandle | None = None

    def sent(self, size: int) -> None:
        """Count this many bytes as sent."""
        now = self._loop.time()
        self._allowance.spend(size, now=now)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look(now)

    def may_send(self, peer: PeerId) -> bool:
        """Whether a frame may go to this peer now; if not, `allowed` is called later."""
        wait_s = self._allowance.wait_s(now=self._loop.time())
        if not wait_s:
            return True
        self._waiting[peer] = None
        if self._timer is None:
            self._timer = self._loop.call_later(wait_s + _TICK_S / 2, self._next)
        return False

    def _next(self) -> None:
        """Allow the waiting peers, in turn, until the allowance is spent again."""
        self._timer = None
        for peer in tuple(self._waiting):
            if not self.may_send(peer):
                return
            # Remove the peer first: it may queue again, at the end, from within `allowed`.
            del self._waiting[peer]
            self._allowed(peer)

    def _look(self, now: float) -> None:
        infos = list(self._infos())
        so_far = Sent(
            sum(info.sent for info in infos),
            sum(info.again for info in infos),
            sum(info.acknowledged for info in infos),
        )
        # If only one link is delayed, the queue may be elsewhere. A queue in the uplink delays all links.
        trips = [
            info.trip_s / info.least_trip_s
            for info in infos
            if info.least_trip_s and info.in_flight >= IN_FLIGHT_MIN
        ]
        self._pace.look(now, so_far, long_trips=min(trips, default=1.0) > LONG)
        if self._pace.bytes_per_s is not None:
            able = HEADERS * self._pace.bytes_per_s
            self._allowance.change(able if self._most is None else min(able, self._most), now=now)

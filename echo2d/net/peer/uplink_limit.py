"""The uplink of a peer whose owner limits it: its links take turns, and together never send more.

Frames wait; messages are small, go at once and are made up for. What the coordinator plans has no say in it.
"""

import asyncio
from collections.abc import Callable

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.token_bucket import TokenBucket


class UplinkLimit:
    """`allowed(peer)` is called when a peer that had to wait may be sent something."""

    def __init__(self, bytes_per_s: float, allowed: Callable[[PeerId], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._allowance = TokenBucket(bytes_per_s, now=self._loop.time())
        self._allowed = allowed
        self._waiting: dict[PeerId, None] = {}  # in the order in which they came
        self._timer: asyncio.TimerHandle | None = None

    def sent(self, size: int) -> None:
        self._allowance.spend(size, now=self._loop.time())

    def may_send(self, peer: PeerId) -> bool:
        """Whether it is this peer's turn; if not, it will be told."""
        wait_s = self._allowance.wait_s(now=self._loop.time())
        if not wait_s:
            return True
        self._waiting[peer] = None
        if self._timer is None:
            self._timer = self._loop.call_later(wait_s, self._next)
        return False

    def _next(self) -> None:
        """Those who wait, in turn, until the allowance is spent again."""
        self._timer = None
        for peer in tuple(self._waiting):
            if not self.may_send(peer):
                return
            del self._waiting[peer]
            self._allowed(peer)

"""Enforces the uplink limit that a peer's owner set: its links take turns, and share the rate.

Frames wait for their turn. Messages are small and go at once; later frames make up for them.
The limit holds whatever rates the coordinator plans.
"""

import asyncio
from collections.abc import Callable

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.token_bucket import TokenBucket


class UplinkLimit:
    """allowed: called with a peer that had to wait, as soon as a frame may be sent to it."""

    def __init__(self, bytes_per_s: float, allowed: Callable[[PeerId], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._allowance = TokenBucket(bytes_per_s, now=self._loop.time())
        self._allowed = allowed
        self._waiting: dict[PeerId, None] = {}  # first come, first served
        self._timer: asyncio.TimerHandle | None = None

    def sent(self, size: int) -> None:
        self._allowance.spend(size, now=self._loop.time())

    def may_send(self, peer: PeerId) -> bool:
        """Whether a frame may go to this peer now; if not, `allowed` is called later."""
        wait_s = self._allowance.wait_s(now=self._loop.time())
        if not wait_s:
            return True
        self._waiting[peer] = None
        if self._timer is None:
            self._timer = self._loop.call_later(wait_s, self._next)
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

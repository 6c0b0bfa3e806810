"""Watches the access table for changes of tokens by the operator, and for convictions by the audit."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import PeerPardoned, PeerRevoked
from echo2d.core.coordinator.events import CoordinatorEvent
from echo2d.errors import StoreFault
from echo2d.net.security.auth import Denied, KnownPeer
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.operator_log import OperatorNews

# The access table is reread this often, so a revoked token works no longer than this.
ACCESS_RELOAD_S = 1.0

log = logging.getLogger("echo2d.coordinator")


class AccessWatch:
    """See the module docstring. run_dir: has the log of the operators' orders."""

    def __init__(
        self,
        access: AccessTable,
        run_dir: Path,
        emit: Callable[[CoordinatorEvent], Awaitable[None]],
    ) -> None:
        self._access, self._run_dir, self._emit = access, run_dir, emit
        # The peers that the core refuses because the access table says so.
        self._convicted = set(access.convicted())

    def known_peer(self, peer: PeerId) -> KnownPeer:
        """The known peer. Denied: its token was revoked or deleted, or the audit has convicted the peer."""
        return self._access.peer(peer, now_s=time.time())

    async def convict(self, worker: PeerId, reason: str) -> None:
        """Make it durable that the audit has convicted a worker."""
        log.warning("convicted peer=%s reason=%s", worker, reason)
        try:
            await asyncio.to_thread(self._access.convict, worker, reason, now_s=time.time())
            self._convicted.add(worker)
        except StoreFault as fault:
            # The core refuses the worker for as long as this process runs.
            log.warning("the conviction of %s is not durable: %s", worker, fault)

    async def watch(self, peers: Callable[[], Iterable[PeerId]]) -> None:
        """Report changes to the core until cancelled. peers: returns the peers that have a session."""
        # The core gets one event for each peer whose token was revoked or deleted, and one for each
        # that a person has pardoned.
        told: frozenset[PeerId] = frozenset()
        news = await asyncio.to_thread(OperatorNews, self._run_dir)
        while True:
            await asyncio.sleep(ACCESS_RELOAD_S)
            for each in await asyncio.to_thread(news.take):
                log.info(
                    "ordered %s %s by=%s", *(each.get(key) for key in ("order", "token", "by"))
                )
            try:
                await asyncio.to_thread(self._access.reload)
            except StoreFault as fault:
                log.warning("cannot reread the access table, keeping the last one: %s", fault)
            revoked = frozenset(filter(self._lost_access, peers()))
            for peer in revoked - told:
                await self._emit(PeerRevoked(peer))
            told = revoked
            pardoned = self._convicted - self._access.convicted().keys()
            self._convicted -= pardoned
            for peer in pardoned:
                await self._emit(PeerPardoned(peer))

    def _lost_access(self, peer: PeerId) -> bool:
        try:
            self.known_peer(peer)
        except Denied:
            return True
        return False

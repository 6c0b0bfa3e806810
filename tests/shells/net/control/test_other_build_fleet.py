"""A fleet that the coordinator does not understand: real handshakes over real sockets, counted on a clock that skips
idle time.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import Epoch, PeerId, PublishSeq
from echo2d.core.cluster.events import PeerConnected
from echo2d.core.coordinator.events import CoordinatorEvent
from echo2d.core.protocol.builds import OURS, Build
from echo2d.core.protocol.control_messages import Heartbeat, Welcome
from echo2d.net.control import server as control_server
from echo2d.net.control.client import ControlLink, Identity
from echo2d.net.control.server import Sessions
from echo2d.net.security.auth import KnownPeer, public_bytes
from tests.support.control_link import HELLO, Owner
from tests.support.skipping_loop import SkippingLoop

WORKERS = 500
MINUTES = 20
RUN = Ed25519PrivateKey.from_private_bytes(bytes(32))


class LaterOwner(Owner):
    """A worker of a later build: by its number, or only by what it says in a heartbeat."""

    def __init__(self, name: str, *, by_number: bool) -> None:
        build = Build(OURS.protocol + 2, OURS.protocol + 1, "0.9.1") if by_number else OURS
        super().__init__(replace(HELLO, name=name, build=build))

    def heartbeat(self) -> Heartbeat:
        return Heartbeat("a number as text")  # type: ignore[arg-type]  # what another build may say


class Fleet:
    """The coordinator's end of all links, and all workers. handshakes: by second."""

    def __init__(self, loop: SkippingLoop) -> None:
        self.loop, self.began = loop, loop.time()
        self.handshakes: Counter[int] = Counter()
        keys = [Ed25519PrivateKey.from_private_bytes(n.to_bytes(32)) for n in range(1, WORKERS + 1)]
        self.identities = [Identity(key, public_bytes(RUN)) for key in keys]
        self._known = {
            each.peer: KnownPeer(each.peer, public_bytes(key), "worker")
            for each, key in zip(self.identities, keys, strict=True)
        }
        self.sessions = Sessions(RUN, known_peer=self._known_peer, emit=self._emit)

    def _known_peer(self, peer: PeerId) -> KnownPeer:
        return self._known[peer]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.handshakes[int(self.loop.time() - self.began)] += 1
        return await self.sessions.handle(request)

    async def _emit(self, event: CoordinatorEvent) -> None:
        if isinstance(event, PeerConnected):
            run_id = self.identities[0].run_id
            welcome = Welcome(event.peer, run_id, Epoch(1), PublishSeq(0), 2.0, (), ())
            self.sessions.send(welcome, event.session)

    async def run(self, seconds: float, *, by_number: bool) -> None:
        app = web.Application()
        app.router.add_get("/v1/worker", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=WORKERS).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        rng = random.Random(1)
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                for number, identity in enumerate(self.identities):
                    owner = LaterOwner(f"gpu-{number}", by_number=by_number)
                    tasks.create_task(ControlLink(url, identity, owner, rng=rng).run())
        except TimeoutError:
            pass
        finally:
            await runner.cleanup()

    def per_s(self, first: int, last: int) -> float:
        return sum(self.handshakes[second] for second in range(first, last)) / (last - first)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    loop = SkippingLoop()
    monkeypatch.setattr(control_server, "time", loop.clock)
    yield Fleet(loop)
    loop.close()


@pytest.mark.nightly
@pytest.mark.parametrize("by_number", [True, False], ids=["by its number", "by what it says"])
def test_a_fleet_of_another_build_makes_at_most_one_handshake_a_second(
    fleet: Fleet, *, by_number: bool
) -> None:
    fleet.loop.run_until_complete(fleet.run(60.0 * MINUTES, by_number=by_number))
    minutes = [fleet.per_s(60 * minute, 60 * minute + 60) for minute in range(MINUTES)]
    assert sum(fleet.handshakes.values()) > 2 * WORKERS - 100, "they keep trying"
    assert max(minutes[1:]) <= 0.75
    assert len(fleet.sessions.other_builds.here(fleet.loop.time())) == (WORKERS if by_number else 0)

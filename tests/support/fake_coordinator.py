"""A coordinator for tests of peers. It decides nothing; the test decides.

Sockets, credentials, signatures and messages are real.

It signs and forwards roots as the seed reports segments, answers SegmentsWanted, and keeps every
message for the test: `said(Message)` lists the received ones, `until` waits for a condition.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from echo2d.core.base.ids import (
    Digest,
    Epoch,
    FormId,
    Generation,
    PeerId,
    PlanId,
    PublishSeq,
    SessionId,
    StripeId,
    Version,
)
from echo2d.core.cluster.events import PeerConnected, PeerDisconnected, PeerSaid
from echo2d.core.coordinator.events import CoordinatorEvent
from echo2d.core.protocol.control_messages import (
    EdgePeer,
    EncodeVersion,
    FormEncoded,
    Hello,
    LeaseGranted,
    PlanEdges,
    SampleAnswered,
    SampleFinished,
    SegmentEncoded,
    SegmentPage,
    SegmentsWanted,
    SignedRoot,
    StripeEdge,
    ToPeer,
    Welcome,
)
from echo2d.core.weights.encoder import RootWriter
from echo2d.core.weights.form import FRAME_BYTES_MIN, FormFacts
from echo2d.core.weights.signed_index import FormTotals, Root
from echo2d.net.control.server import Sessions
from echo2d.net.security.auth import Denied, peer_id_of, sign_root, write_token_file
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from tests.support.free_port import free_port
from tests.support.polling import HANG_S
from tests.support.worker import a_lease

M = TypeVar("M")
SLICE_S = 1.0


class CoordinatorDouble:
    """One run, served at `url`; `async with CoordinatorDouble.serving(folder)`."""

    def __init__(self, run_dir: Path, *, tls: bool = False) -> None:
        self.run = RunDirectory(run_dir)
        self._tls = self.run.authority.coordinator() if tls else None
        self.access = AccessTable(self.run)
        self.sessions = Sessions(
            self.run.key,
            known_peer=lambda peer: self.access.peer(peer, now_s=time.time()),
            emit=self._emit,
        )
        self.hellos: dict[PeerId, Hello] = {}
        self.connected: dict[PeerId, SessionId] = {}
        self.messages: list[tuple[PeerId, Any]] = []
        self.roots: list[SignedRoot] = []
        self.keep_leases = True
        self.answer_results = True
        self.refused_roots: set[FormId] = set()  # not forwarded
        self._peers: dict[SessionId, PeerId] = {}
        self._writers: dict[FormId, RootWriter] = {}
        self._changed = asyncio.Event()
        self._port = free_port()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @staticmethod
    @asynccontextmanager
    async def serving(run_dir: Path, *, tls: bool = False) -> AsyncIterator["CoordinatorDouble"]:
        double = await asyncio.to_thread(CoordinatorDouble, run_dir, tls=tls)
        await double.open()
        try:
            yield double
        finally:
            await double.close()

    async def open(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/worker", self.sessions.handle)
        app.router.add_post("/v1/enrol", self._enrol)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        ssl_context = None if self._tls is None else self._tls.listener
        await web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=ssl_context).start()

    async def close(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def token(self, path: Path, name: str = "box") -> Path:
        """Write a worker's token. Blocking."""
        write_token_file(path, self.access.create(name, "worker"))
        return path

    # --- talking to peers

    def send(self, peer: PeerId, message: ToPeer) -> None:
        self.sessions.send(message, self.connected[peer])

    def said(self, kind: type[M], peer: PeerId | None = None) -> list[M]:
        return [
            message
            for who, message in self.messages
            if isinstance(message, kind) and peer in (None, who)
        ]

    async def until(self, holds: Callable[[], bool], *, timeout_s: float = HANG_S) -> None:
        """Wait for the condition. Time in which the whole machine stands still does not count."""
        clock, left_s = asyncio.get_running_loop(), timeout_s
        while not holds():
            if left_s <= 0:
                raise TimeoutError(f"nothing of this kind within {timeout_s:g} s")
            began = clock.time()
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SLICE_S):
                    await self._changed.wait()
            left_s -= min(SLICE_S, clock.time() - began)

    async def until_said(
        self,
        kind: type[M],
        peer: PeerId | None = None,
        *,
        count: int = 1,
        timeout_s: float = HANG_S,
    ) -> M:
        """Wait for `count` messages of this kind. Returns the last of them."""
        await self.until(lambda: len(self.said(kind, peer)) >= count, timeout_s=timeout_s)
        return self.said(kind, peer)[count - 1]

    async def peers(self, count: int) -> dict[str, PeerId]:
        """The connected peers by name, once this many are connected."""
        await self.until(lambda: len(self.connected) >= count)
        return {self.hellos[peer].name: peer for peer in self.connected}

    # --- versions

    def facts(self, version: int, publish_seq: int, *, epoch: int = 1) -> FormFacts:
        seq, number = PublishSeq(publish_seq), Version(version)
        return FormFacts(self.run.run_id, Epoch(epoch), number, seq, "full", None, FRAME_BYTES_MIN)

    def order(self, facts: FormFacts, digest: Digest, path: Path) -> EncodeVersion:
        relative = str(path.relative_to(self.run.path))
        return EncodeVersion(
            facts.form, "full", facts.version, digest, relative, facts.frame_bytes, facts.encode(), None
        )  # fmt: skip

    def start_form(self, facts: FormFacts) -> None:
        self._writers[facts.form] = RootWriter(facts)

    def chain(self, form: FormId, peers: Sequence[PeerId], plan: int) -> None:
        """Send each peer its part of the chain."""
        self.chains(form, [peers], plan)

    def chains(
        self,
        form: FormId,
        chains: Sequence[Sequence[PeerId]],
        plan: int,
        *,
        sources: Sequence[PeerId] = (),
    ) -> None:
        """Send a stripe for each chain. All chains have the same peers and root; the last peer has these sources."""
        newcomer = chains[0][-1]
        for peer in chains[0]:
            stripes = [_stripe(number, chain, peer) for number, chain in enumerate(chains)]
            pairs = {
                frozenset(pair) for chain in chains for pair in pairwise(chain) if peer in pair
            }
            pairs |= {
                frozenset((newcomer, source)) for source in sources if peer in (newcomer, source)
            }
            edges = [self._edge(peer, other) for pair in pairs for other in pair - {peer}]
            of = tuple(sources) if peer == newcomer else ()
            self.send(
                peer, PlanEdges(form, PlanId(plan), Generation(1), tuple(stripes), tuple(edges), of)
            )

    def _edge(self, me: PeerId, other: PeerId) -> EdgePeer:
        """The peer with the smaller id dials. Both peers know the secret, which has 32 bytes."""
        secret = peer_id_of("".join(sorted((me, other))).encode()).encode()
        return EdgePeer(
            other, self.hellos[other].listen if me < other else None, me < other, secret
        )

    def signed(self, root: Root) -> SignedRoot:
        data = root.signing_bytes()
        return SignedRoot(data, sign_root(self.run.key, data))

    def lease(
        self, number: int, *, attempt: int = 1, samples: int = 2, oldest: int = 0, tokens: int = 8
    ) -> LeaseGranted:
        return a_lease(
            number, attempt=attempt, samples=range(samples), oldest=oldest, tokens=tokens
        )

    # --- what comes in

    async def _enrol(self, request: web.Request) -> web.Response:
        body = await request.json()
        secret = request.headers["Authorization"].removeprefix("Bearer ")
        key, proof = bytes.fromhex(body["key"]), bytes.fromhex(body["proof"])
        try:
            peer = await asyncio.to_thread(self.access.enrol, secret, key, proof, now_s=time.time())
        except Denied as denied:
            return web.json_response({"detail": denied.detail}, status=denied.status)
        answer = {
            "peer": peer,
            "run_id": self.run.run_id,
            "certificate": self.run.authority.certify_peer(key),
        }
        return web.json_response(answer)

    async def _emit(self, event: CoordinatorEvent) -> None:
        match event:
            case PeerConnected(session, peer, hello):
                self._peers[session] = peer
                self.hellos[peer], self.connected[peer] = hello, session
                keep, cancel = (hello.leases, ()) if self.keep_leases else ((), hello.leases)
                welcome = Welcome(peer, self.run.run_id, Epoch(1), PublishSeq(0), 0.2, keep, cancel)
                self.sessions.send(welcome, session)
                for root in self.roots:
                    self.sessions.send(root, session)
            case PeerDisconnected(session):
                peer = self._peers.pop(session)
                if self.connected.get(peer) == session:
                    del self.connected[peer]
            case PeerSaid(session, message):
                self._on_message(self._peers[session], session, message)
            case _:
                raise AssertionError(f"{event} does not come from a session")
        self._changed.set()

    def _on_message(self, peer: PeerId, session: SessionId, message: Any) -> None:
        self.messages.append((peer, message))
        match message:
            case SegmentEncoded(form, segment, digest) if segment == len(
                self._writers[form].segments
            ):
                self._writers[form].add(digest)
                self._announce(form, self._writers[form].take())
            case FormEncoded(form, snapshot, _, wire_bytes, full_bytes) if (
                self.said(FormEncoded).count(message) == 1
            ):
                self._announce(
                    form, self._writers[form].take(FormTotals(wire_bytes, full_bytes, snapshot))
                )
            case SegmentsWanted(form, start):
                page = tuple(self._writers[form].segments[start:])
                self.sessions.send(SegmentPage(form, start, page), session)
            case SampleFinished(lease, attempt, sample) if self.answer_results:
                self.sessions.send(SampleAnswered(lease, attempt, sample, True, ""), session)

    def _announce(self, form: FormId, roots: Sequence[Root]) -> None:
        if form in self.refused_roots:
            return
        for root in roots:
            self.roots.append(self.signed(root))
            workers = [
                session
                for peer, session in self.connected.items()
                if self.hellos[peer].kind != "seed"
            ]
            self.sessions.send(self.roots[-1], *workers)


def _stripe(number: int, chain: Sequence[PeerId], peer: PeerId) -> StripeEdge:
    at = list(chain).index(peer)
    parent = chain[at - 1] if at else None
    return StripeEdge(StripeId(number), parent, tuple(chain[at + 1 : at + 2]))

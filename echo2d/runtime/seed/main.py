"""The seed process: encodes published versions and sends their frames to the first workers.

It is a child process of the coordinator (`python -m echo2d.runtime.seed.main`) and a peer like any
other, with a control link, peer links and a frame store under run_dir/seed.

    EncodeVersion -> chunks encoded in threads -> segments on disk -> SegmentEncoded, FormEncoded
                                                     +--> frames to the peers that the plan names

A version is encoded from the coordinator's own copy, and the result is accepted only if it has the
ordered digest. If several orders wait, the latest runs first. A second task encodes forms for a few
peers (aside). Deltas for all peers are kept, and deltas for peers that lag further are composed from
the kept ones. Not here: the choice of a version's form, and signatures.
"""

import asyncio
import logging
import random
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.canonical import require
from echo2d.core.base.ids import Digest, FormId, frame_id
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    DeltasKept,
    EdgeBroken,
    EncodeFailed,
    EncodeVersion,
    ForgetForm,
    FormEncoded,
    FrameAccused,
    Heartbeat,
    Hello,
    PlanEdges,
    SegmentEncoded,
    ToCoordinator,
    ToPeer,
    Welcome,
)
from echo2d.core.relay import events as relay_events
from echo2d.core.relay.relay import Relay
from echo2d.core.weights.encoder import RootWriter, Segment
from echo2d.core.weights.form import FormFacts
from echo2d.core.weights.manifest import Chunk, Manifest
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault
from echo2d.logs import say
from echo2d.net.security.urls import is_loopback
from echo2d.runtime.peer.base_model import BaseModel
from echo2d.runtime.peer.peer_process import PeerProcess
from echo2d.runtime.peer.state_dir import open_frames
from echo2d.runtime.process.child import child_main
from echo2d.runtime.process.lifecycle import collect_rarely
from echo2d.runtime.seed.delta_bases import BaseChain, BaseCopy, BaseLost
from echo2d.runtime.seed.encoder import Base, Encoder
from echo2d.runtime.seed.supervisor import SeedHandover
from echo2d.store.budget import DiskBudget
from echo2d.store.deltas import DeltaStore
from echo2d.store.snapshots import leave_page_cache

# 1 / DELTAS_SHARE of the disk budget is for kept deltas; the rest is for frames.
DELTAS_SHARE = 8

log = logging.getLogger("echo2d.seed")


class _Differs(IntegrityFault):
    """A version's files are not those that were published."""


class Seed:
    """One run of the seed."""

    def __init__(self, handover: SeedHandover) -> None:
        self._handover, self._run_dir = handover, Path(handover.run_dir)
        rng = random.Random(secrets.randbits(64))
        self._peer: PeerProcess[relay_events.RelayEvent] = PeerProcess(
            handover.url, handover.identity(), self, rng=rng
        )
        self._control = self._peer.control
        self._relay = Relay(self._peer.identity.peer)
        self._orders: dict[FormId, EncodeVersion] = {}
        # The messages sent about each form, to repeat if the form is ordered again.
        self._said: dict[FormId, list[ToCoordinator]] = {}
        # `base_sum` of each chunk, by digest of the encoded snapshot.
        self._sums: dict[Digest, dict[Chunk, bytes]] = {}
        self._ordered = {aside: asyncio.Event() for aside in (False, True)}

    async def run(self) -> None:
        """Serve until cancelled. OperatorFault: refused, or cannot listen on the address."""
        disk_bytes_max = self._handover.disk_bytes_max
        budget, for_deltas = (
            DiskBudget(disk_bytes_max - disk_bytes_max // DELTAS_SHARE),
            disk_bytes_max // DELTAS_SHARE,
        )
        self._deltas = await asyncio.to_thread(
            DeltaStore, self._run_dir / "seed" / "deltas", for_deltas
        )
        store = await asyncio.to_thread(open_frames, self._run_dir / "seed", budget)
        host, port = self._handover.link_host, self._handover.link_port
        self._receiver = self._peer.open(
            store,
            self._relay.busy,
            no_tls=not is_loopback(host),
            uplink_limit=self._handover.uplink_limit,
        )
        await self._peer.listen(host, port, key="link.port")
        async with asyncio.TaskGroup() as self._tasks:
            encoders = (self._encode_all(aside=aside) for aside in (False, True))
            for work in (self._receiver.run(), self._control.run(), self._turns(), *encoders):
                self._tasks.create_task(work)

    # --- relay

    async def _turns(self) -> None:
        while True:
            event, actions = await self._peer.turn(self._relay)
            if isinstance(event, relay_events.FormForgotten) and event.form in self._orders:
                self._say(
                    event.form,
                    EncodeFailed(event.form, "the disk is full: a newer form evicted this one"),
                )
            for action in actions:
                self._perform(action)

    def _perform(self, action: relay_events.RelayAction) -> None:
        match action:
            case relay_events.ReportEdgeBroken(plan, generation, peer, reason):
                self._control.send(EdgeBroken(plan, generation, peer, reason))
            case relay_events.Accuse(form, frame, accused):
                self._control.send(FrameAccused(form, frame, accused))
            case relay_events.FormArrived():
                # The seed encoded this form itself.
                pass
            case relay_events.FrameGone(form, frame):
                self._receiver.holdings.give_up(
                    form,
                    f"frame {frame} is lost at the seed, which cannot encode it again",
                )
            case _:
                self._receiver.perform(action)

    # --- encoding

    async def _encode_all(self, *, aside: bool) -> None:
        """Encode the orders for a few peers (aside) or the orders for all peers, until cancelled.

        One task runs for each kind, so that forms for all peers never wait for the others.
        """
        while True:
            orders = [order for order in self._orders.values() if order.aside == aside]
            waiting = [order for order in orders if order.form not in self._said]
            if waiting:
                # Take the latest order, not the highest version: a learner may have resumed from an older one.
                await self._encode(waiting[-1])
            else:
                ordered = self._ordered[aside]
                ordered.clear()
                await ordered.wait()

    async def _encode(self, order: EncodeVersion) -> None:
        """Encode a form. Sends FormEncoded or EncodeFailed at the end, or neither if the form was forgotten."""
        self._said[order.form] = []
        started_at = asyncio.get_running_loop().time()
        try:
            facts = FormFacts.decode(order.facts)
            require(facts.form == order.form, "the order's facts are another form's")
            say(log, logging.INFO, "encoding", form=order.form, version=order.version)
            encoder = await asyncio.to_thread(self._make_encoder, order, facts)
            await self._encode_segments(order, facts, encoder, started_at)
        except (IntegrityFault, StoreFault, OperatorFault) as fault:
            if self._is_wanted(order):
                log.warning(
                    "encoding failed form=%s version=%d reason=%s", order.form, order.version, fault
                )
                lacks_base, differs = (isinstance(fault, kind) for kind in (BaseLost, _Differs))
                self._say(order.form, EncodeFailed(order.form, str(fault), lacks_base, differs))

    def _make_encoder(self, order: EncodeVersion, facts: FormFacts) -> Encoder:
        """Make the encoder of this order. Blocking. BaseLost: the form's base, or a kept delta, is not here."""
        base: Base | None = None
        if facts.base_digest is not None and facts.kind == "composed":
            base = BaseChain.open(self._deltas, facts.base_digest, order.via, order.digest)
        elif facts.base_digest is not None:
            require(order.base_path is not None, "the order of a delta names no base")
            sums = self._sums.get(facts.base_digest)
            base = BaseCopy(self._run_dir / str(order.base_path), facts.base_digest, sums)
        keep = facts.kind == "delta" and not order.aside
        return Encoder(facts, self._run_dir / order.path, base, keep=keep)

    async def _encode_segments(
        self, order: EncodeVersion, facts: FormFacts, encoder: Encoder, started_at: float
    ) -> None:
        roots = RootWriter(facts)
        segments = encoder.segments()
        # Each segment is sent at once, so that peers receive it while the rest is encoded.
        while (segment := await asyncio.to_thread(_next, segments)) is not None:
            if not self._is_wanted(order):
                await asyncio.to_thread(segments.close)
                return
            roots.add(segment.table.digest)
            for root in roots.take():
                await self._receiver.holdings.accept_root(root)
            await self._hold(facts, segment)
            if not self._is_wanted(order):
                continue
            self._say(
                order.form, SegmentEncoded(order.form, segment.table.segment, segment.table.digest)
            )
            frames = [
                frame_id(segment.table.segment, index)
                for index in range(len(segment.table.frames) + 1)
            ]
            self._peer.put(relay_events.FramesFound(order.form, tuple(frames)))
            # Keep the delta after the segment was announced, so that peers do not wait for the delta's write.
            if encoder.kept is not None and not await self._keep(facts, encoder.kept.take()):
                encoder.kept = None
        if not self._is_wanted(order):
            return
        totals = encoder.totals()
        if totals.snapshot != order.digest:
            # A composed form is made without reading the files, so the kept deltas may be what is wrong.
            kind = IntegrityFault if facts.kind == "composed" else _Differs
            raise kind(f"{order.path} is not the snapshot that was published")
        if (sums := encoder.sums()) is not None:
            self._sums[totals.snapshot] = sums
            # Remember the chunk sums of 8 versions, more than are kept as bases. A version of 16 GB has 2,000 sums.
            keep_newest(self._sums, 8)
        encode_s = asyncio.get_running_loop().time() - started_at
        count = len(roots.segments)
        self._say(
            order.form,
            FormEncoded(
                order.form, totals.snapshot, count, totals.wire_bytes, totals.full_bytes, encode_s
            ),
        )
        for root in roots.take(totals):
            await self._receiver.holdings.accept_root(root)
        say(
            log,
            logging.INFO,
            "encoded",
            form=order.form,
            version=order.version,
            wire_bytes=totals.wire_bytes,
            seconds=f"{encode_s:.3f}",
        )
        if order.base_path is not None and not order.aside:
            # The next version for all peers has this version as its base, so the older base is not read again.
            # Its pages would take memory that these two need, and the kernel would keep them longer than
            # those of new files.
            await asyncio.to_thread(leave_page_cache, self._run_dir / order.base_path)
        if (kept := encoder.kept) is not None:
            await self._keep_whole(facts, kept.digests, encoder.manifest(), kept.wire_bytes)

    def _is_wanted(self, order: EncodeVersion) -> bool:
        """Whether this order is still valid. Its form may have been forgotten, and even ordered again."""
        return self._orders.get(order.form) is order

    async def _hold(self, facts: FormFacts, segment: Segment) -> None:
        holdings = self._receiver.holdings
        await holdings.put_table(facts.form, segment.table.segment, segment.table.encode())
        frames = [(span.frame, payload) for span, payload in segment.frames(facts.frame_bytes)]
        bad = await holdings.put_frames(facts.form, frames)
        assert not bad, "a table has the digests of its own frames"

    # --- deltas that are kept

    async def _keep(self, facts: FormFacts, segments: Sequence[Segment]) -> bool:
        """Keep these segments; returns whether that worked. A full disk is not a fault: kept deltas are optional."""
        try:
            for segment in segments:
                await asyncio.to_thread(self._deltas.put, facts, segment)
        except StoreFault as fault:
            log.warning("delta not kept form=%s reason=%s", facts.form, fault)
            return False
        return True

    async def _keep_whole(
        self, facts: FormFacts, segments: Sequence[Digest], manifest: Manifest, wire_bytes: int
    ) -> None:
        try:
            await asyncio.to_thread(self._deltas.finish, facts, segments, manifest, wire_bytes)
        except StoreFault as fault:
            log.warning("delta not kept form=%s reason=%s", facts.form, fault)
        self._control.send(DeltasKept(self._deltas.kept()))

    def _say(self, form: FormId, message: ToCoordinator) -> None:
        self._said.setdefault(form, []).append(message)
        self._control.send(message)

    # --- called by the receiver

    def fail(self, form: FormId, reason: str) -> None:
        if self._orders.pop(form, None) is not None:
            self._say(form, EncodeFailed(form, reason))

    def serving_version(self) -> None:
        """None, because a seed has no engine."""

    def base_of(self, form: FormId) -> BaseModel | None:
        """The snapshot from which damaged frames are encoded again. None: the form is not encoded yet."""
        order, said = self._orders.get(form), self._said.get(form, [])
        encoded = bool(said) and isinstance(said[-1], FormEncoded)
        return BaseModel(self._run_dir / order.path) if order is not None and encoded else None

    # --- called by the control link

    def hello(self) -> Hello:
        peer, forms = self._peer, self._receiver.holdings.whole_forms()
        return Hello(
            OURS, peer.identity.run_id, "seed", "seed", peer.boot_id, 0, peer.address, None, (), (), forms,
            uplink_limit=self._handover.uplink_limit,
        )  # fmt: skip

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(0)

    async def connected(self, welcome: Welcome) -> None:
        log.info("connected url=%s epoch=%d", self._handover.url, welcome.epoch)
        self._control.send(DeltasKept(self._deltas.kept()))

    async def disconnected(self, reason: str) -> None:
        log.info("disconnected reason=%s", reason)

    async def received(self, message: ToPeer) -> None:
        match message:
            case EncodeVersion():
                self._on_order(message)
            case PlanEdges():
                self._peer.put(relay_events.PlanReceived(message))
            case ForgetForm(form):
                self._forget(form)
            case _:
                log.warning("unexpected message %s", type(message).__name__)

    def _on_order(self, order: EncodeVersion) -> None:
        said = self._said.get(order.form, [])
        if order.form in self._orders and not (said and isinstance(said[-1], EncodeFailed)):
            # The coordinator repeats orders after a reconnection. Repeat the messages, too: some may be lost.
            for message in said:
                self._control.send(message)
            return
        # Remember at most 16 orders. The coordinator orders one form at a time, and lets the seed forget
        # it two versions later.
        if len(self._orders) >= 16:
            self._forget(next(iter(self._orders)))
        self._said.pop(order.form, None)
        self._orders.pop(order.form, None)
        self._orders[order.form] = order
        self._ordered[order.aside].set()

    def _forget(self, form: FormId) -> None:
        self._orders.pop(form, None)
        self._said.pop(form, None)
        self._peer.put(relay_events.FormForgotten(form))
        self._tasks.create_task(self._receiver.forget(form))


def _next(segments: Iterator[Segment]) -> Segment | None:
    return next(segments, None)


async def run_seed(handover: SeedHandover) -> None:
    """Serve until the coordinator ends this process."""
    seed = Seed(handover)
    collect_rarely()
    await seed.run()


if __name__ == "__main__":
    sys.exit(child_main(SeedHandover, run_seed))

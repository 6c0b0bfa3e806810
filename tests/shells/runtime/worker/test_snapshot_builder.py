"""The hashing of an apply: every result once, and frames only to find out why a result is wrong."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.core.base.canonical import Buffer, digest_of
from echo2d.core.base.ids import Digest
from echo2d.core.relay import events as relay_events
from echo2d.core.weights.form import FrameSpan
from echo2d.core.worker.events import ApplyCancelled, SnapshotReady
from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.runtime.worker.snapshot_builder import SnapshotBuilder
from echo2d.store import disk, frames, snapshots
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import write_at
from echo2d.store.frames import FrameStore
from echo2d.store.slots import slot_writer
from echo2d.store.slots.slot_store import SlotStore
from tests.support.encodings import BuiltForm, build_form, facts
from tests.support.holdings_owner import NotingOwner

OLD, NEW = (
    {"a.json": random.Random(seed).randbytes(150_000), "b.json": b"in both versions"}
    for seed in (1, 2)
)
NEAR = {
    **OLD,
    "a.json": bytes(each ^ (place % 997 == 0) for place, each in enumerate(OLD["a.json"])),
}
FIRST = build_form(facts(version=1, publish_seq=1), OLD)
SECOND = build_form(facts(version=2, publish_seq=2), NEW)


class Peer:
    """A worker's stores, without links and engines."""

    def __init__(self, path: Path) -> None:
        budget = DiskBudget(4 << 20)
        self.store = FrameStore(path / "frames", budget)
        self.events: asyncio.Queue[relay_events.RelayEvent] = asyncio.Queue()
        owner = NotingOwner()
        owner.emit = self.events.put_nowait  # type: ignore[method-assign,assignment]
        self.holdings = FrameHoldings(self.store, owner)
        self.applier = SnapshotBuilder(SlotStore(path / "slots", budget), self.store, self.holdings)

    async def receive(self, form: BuiltForm) -> None:
        for root in form.roots:
            await self.holdings.accept_root(root)
        for segment in form.segments:
            await self.holdings.put_table(
                form.facts.form, segment.table.segment, segment.table.encode()
            )
        await self.put(form, *(span for span, _ in form.segments[0].frames(form.facts.frame_bytes)))

    async def put(self, form: BuiltForm, *spans: FrameSpan) -> None:
        payloads = {
            span.frame: payload for span, payload in form.segments[0].frames(form.facts.frame_bytes)
        }
        bad = await self.holdings.put_frames(
            form.facts.form, [(span.frame, payloads[span.frame]) for span in spans]
        )
        assert not bad


@pytest.fixture
async def peer(tmp_path: Path) -> Peer:
    return await asyncio.to_thread(Peer, tmp_path)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Digest]:
    """What the stores hashed."""
    digests: list[Digest] = []

    def digest(data: Buffer) -> Digest:
        digests.append(digest_of(data))
        return digests[-1]

    for module in (frames, slot_writer):
        monkeypatch.setattr(module, "digest_of", digest)
    return digests


async def test_every_result_is_hashed_once_and_frames_are_not_hashed(
    peer: Peer, hashed: list[Digest]
) -> None:
    for form in (FIRST, SECOND):  # of the second, a chunk is copied
        await peer.receive(form)
        hashed.clear()
        assert isinstance(await peer.applier.apply(form.facts.form), SnapshotReady)
        assert sorted(hashed) == sorted(form.manifest.chunk_digests)


async def test_chunks_that_are_in_the_spare_slot_are_reused(peer: Peer, tmp_path: Path) -> None:
    paths = []
    for form in (FIRST, SECOND):
        await peer.receive(form)
        done = await peer.applier.apply(form.facts.form)
        assert isinstance(done, SnapshotReady)
        paths.append(done.path)
    again = build_form(facts(version=1, publish_seq=3), OLD)
    await peer.holdings.accept_root(again.roots[0])
    done = await peer.applier.apply(again.facts.form, again.manifest.digest)
    assert done == SnapshotReady(
        again.facts.form, again.facts.version, FIRST.manifest.digest, paths[0]
    )
    store = await asyncio.to_thread(SlotStore, tmp_path / "slots", DiskBudget(4 << 20))
    current = await asyncio.to_thread(store.current)
    assert current is not None
    assert current.manifest == FIRST.manifest
    last = build_form(
        facts(version=2, publish_seq=4), NEW
    )  # and the other slot is the spare one now
    await peer.receive(last)
    done = await peer.applier.apply(last.facts.form)
    assert isinstance(done, SnapshotReady)
    assert done.path == paths[1]


async def test_damaged_chunks_in_the_spare_slot_are_written_again(peer: Peer) -> None:
    paths = []
    for form in (FIRST, SECOND):
        await peer.receive(form)
        done = await peer.applier.apply(form.facts.form)
        assert isinstance(done, SnapshotReady)
        paths.append(done.path)
    await asyncio.to_thread(write_at, Path(paths[0]) / "a.json", b"rot", 5)
    again = build_form(facts(version=1, publish_seq=3), OLD)
    await peer.receive(again)
    done = await peer.applier.apply(again.facts.form, again.manifest.digest)
    assert isinstance(done, SnapshotReady)
    path = Path(done.path) / "a.json"
    assert await asyncio.to_thread(path.read_bytes) == OLD["a.json"]


@pytest.mark.parametrize("what", ["frames", "slots"])
async def test_a_chunk_that_is_read_wrongly_once_is_read_again(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The disk is right: a version that is not taken would not be tried again for long."""
    delta = build_form(
        replace(facts("delta", version=2, publish_seq=2), base_digest=FIRST.manifest.digest),
        NEAR,
        base=OLD,
    )
    await peer.receive(FIRST)
    assert isinstance(await peer.applier.apply(FIRST.facts.form), SnapshotReady)
    await peer.receive(delta)
    wrong = [what]
    read_at, read_into = disk.read_at, disk.read_into

    def is_wrong(path: Path, length: int) -> bool:
        now = (
            bool(wrong)
            and wrong[0] in path.parts
            and length > 100
            and path.suffix in (".frames", ".json")
        )
        if now:
            wrong.clear()
        return now

    def read_wrongly(path: Path, length: int, offset: int) -> bytes:
        data = read_at(path, length, offset)
        return bytes([data[0] ^ 1]) + data[1:] if is_wrong(path, length) else data

    def read_wrongly_into(path: Path, buffer: memoryview, offset: int) -> int:
        length = read_into(path, buffer, offset)
        if is_wrong(path, length):
            buffer[0] ^= 1
        return length

    monkeypatch.setattr(frames, "read_at", read_wrongly)
    monkeypatch.setattr(snapshots, "read_into", read_wrongly_into)
    assert isinstance(await peer.applier.apply(delta.facts.form), SnapshotReady)
    assert not wrong


async def test_a_cancel_ends_an_apply_that_waits_for_frames(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, changed = asyncio.Event(), peer.holdings.changed

    async def noted() -> None:
        waits.set()
        await changed()

    monkeypatch.setattr(peer.holdings, "changed", noted)
    for root in FIRST.roots:
        await peer.holdings.accept_root(root)
    segment = FIRST.segments[0].table
    await peer.holdings.put_table(FIRST.facts.form, segment.segment, segment.encode())
    applying = asyncio.create_task(peer.applier.apply(FIRST.facts.form))
    await waits.wait()
    peer.applier.cancel(FIRST.facts.form)
    async with asyncio.timeout(10):
        assert await applying == ApplyCancelled(FIRST.facts.form)


async def test_a_cancel_that_comes_too_late_changes_nothing(peer: Peer) -> None:
    await peer.receive(FIRST)
    assert isinstance(await peer.applier.apply(FIRST.facts.form), SnapshotReady)
    peer.applier.cancel(FIRST.facts.form)
    await peer.receive(SECOND)
    assert isinstance(await peer.applier.apply(SECOND.facts.form), SnapshotReady)
    assert isinstance(await peer.applier.apply(FIRST.facts.form), SnapshotReady)


async def test_a_rotten_frame_is_found_and_fetched_again(peer: Peer, tmp_path: Path) -> None:
    await peer.receive(FIRST)
    spans = [span for span, _ in FIRST.segments[0].frames(FIRST.facts.frame_bytes)]
    path = tmp_path / "frames" / FIRST.facts.form / "0000.frames"
    await asyncio.to_thread(write_at, path, b"rot", spans[1].offset_in_segment)
    async with asyncio.TaskGroup() as tasks:
        applying = tasks.create_task(peer.applier.apply(FIRST.facts.form))
        while not isinstance(event := await peer.events.get(), relay_events.FramesLost):
            pass
        assert event == relay_events.FramesLost(FIRST.facts.form, (spans[1].frame,))
        assert not applying.done()
        await peer.put(FIRST, spans[1])
    assert isinstance(applying.result(), SnapshotReady)

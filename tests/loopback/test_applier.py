"""What an apply hashes: every result once, and frames only to find out why a result is wrong."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from echo2d.core import relay_io
from echo2d.core.canonical import Buffer, digest_of
from echo2d.core.forms import FrameSpan
from echo2d.core.ids import Digest
from echo2d.core.worker_io import SnapshotReady
from echo2d.runtime.applier import Applier
from echo2d.runtime.holdings import Holdings
from echo2d.store import frames, slots
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import write_at
from echo2d.store.frames import FrameStore
from echo2d.store.slots import SlotStore
from tests.form_kit import BuiltForm, build_form, facts

OLD, NEW = ({"a.json": random.Random(seed).randbytes(150_000), "b.json": b"in both versions"} for seed in (1, 2))
FIRST = build_form(facts(version=1, publish_seq=1), OLD)
SECOND = build_form(facts(version=2, publish_seq=2), NEW)


class Peer:
    """A worker's stores, without links and engines."""

    def __init__(self, path: Path) -> None:
        budget = DiskBudget(4 << 20)
        self.store = FrameStore(path / "frames", budget)
        self.events: asyncio.Queue[relay_io.Event] = asyncio.Queue()
        nobody: dict[str, Any] = {name: lambda *_: None for name in ("ask", "fail", "serving", "base")}
        self.holdings = Holdings(self.store, emit=self.events.put_nowait, **nobody)
        self.applier = Applier(SlotStore(path / "slots", budget), self.store, self.holdings)

    async def receive(self, form: BuiltForm) -> None:
        for root in form.roots:
            await self.holdings.accept_root(root)
        for segment in form.segments:
            await self.holdings.put_table(form.facts.form, segment.table.segment, segment.table.encode())
        await self.put(form, *(span for span, _ in form.segments[0].frames(form.facts.frame_bytes)))

    async def put(self, form: BuiltForm, *spans: FrameSpan) -> None:
        payloads = {span.frame: payload for span, payload in form.segments[0].frames(form.facts.frame_bytes)}
        bad = await self.holdings.put_frames(form.facts.form, [(span.frame, payloads[span.frame]) for span in spans])
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

    for module in (frames, slots):
        monkeypatch.setattr(module, "digest_of", digest)
    return digests


async def test_every_result_is_hashed_once_and_no_frame(peer: Peer, hashed: list[Digest]) -> None:
    for form in (FIRST, SECOND):  # of the second, a chunk is copied
        await peer.receive(form)
        hashed.clear()
        assert isinstance(await peer.applier.apply(form.facts.form), SnapshotReady)
        assert sorted(hashed) == sorted(form.manifest.chunk_digests)


async def test_a_frame_that_rotted_is_found_and_comes_again(peer: Peer, tmp_path: Path) -> None:
    await peer.receive(FIRST)
    spans = [span for span, _ in FIRST.segments[0].frames(FIRST.facts.frame_bytes)]
    path = tmp_path / "frames" / FIRST.facts.form / "0000.frames"
    await asyncio.to_thread(write_at, path, b"rot", spans[1].offset_in_segment)
    async with asyncio.TaskGroup() as tasks:
        applying = tasks.create_task(peer.applier.apply(FIRST.facts.form))
        while not isinstance(event := await peer.events.get(), relay_io.FramesLost):
            pass
        assert event == relay_io.FramesLost(FIRST.facts.form, (spans[1].frame,))
        assert not applying.done()
        await peer.put(FIRST, spans[1])
    assert isinstance(applying.result(), SnapshotReady)

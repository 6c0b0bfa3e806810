"""The receive queue of a link: what it drops, what it waits for, and which side it tells."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from echo2d.core.base.ids import FrameId, PeerId, frame_id
from echo2d.core.protocol.peer_messages import FrameReceived
from echo2d.net.peer.links import PeerLinks
from echo2d.runtime.peer import receive_queue
from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.runtime.peer.receive_queue import ReceiveQueue
from echo2d.store.budget import DiskBudget
from echo2d.store.frames import FrameStore
from tests.support.encodings import build_form, facts
from tests.support.holdings_owner import NotingOwner

FORM = build_form(facts(), {"a.txt": os.urandom(70_000)})
SEGMENT = FORM.segments[0]
PAYLOADS = [(span.frame, payload) for span, payload in SEGMENT.frames(FORM.facts.frame_bytes)]


class QueueOfOneLink:
    """A queue over a real store. failed: the forms given up, with the reason."""

    def __init__(self, store: FrameStore) -> None:
        owner = NotingOwner()
        self.events, self.failed = owner.events, owner.failed
        self.holdings = FrameHoldings(store, owner)
        links = cast("PeerLinks", SimpleNamespace(pause=lambda _: None, resume=lambda _: None))
        self.queue = ReceiveQueue(PeerId("p"), links, self.holdings, emit=owner.emit)

    def take(self, stream: int, frame: FrameId, payload: bytes | memoryview) -> None:
        form, data = FORM.facts.form, memoryview(payload).toreadonly()
        self.queue.put(FrameReceived(stream, form, frame, 0, data), now=0.0)


@pytest.fixture
async def link(tmp_path: Path) -> QueueOfOneLink:
    return QueueOfOneLink(await asyncio.to_thread(FrameStore, tmp_path, DiskBudget(1 << 30)))


async def test_late_frames_of_an_ended_stream_do_not_keep_others_waiting(
    link: QueueOfOneLink,
) -> None:
    """A form given up drops its table; begun anew, it must not wait for that table."""
    for root in FORM.roots:
        await link.holdings.accept_root(root)
    late, again = 1, 3
    async with asyncio.TaskGroup() as tasks:
        link.take(late, *PAYLOADS[0])
        work = tasks.create_task(link.queue.run())
        link.take(again, frame_id(SEGMENT.table.segment, 0), SEGMENT.table.encode())
        for frame, payload in PAYLOADS:
            link.take(again, frame, payload)
        link.queue.end(late)
        async with asyncio.timeout(receive_queue.ROOT_WAIT_S / 2):
            while FORM.facts.form not in link.holdings.whole_forms():
                await link.holdings.changed()
        link.queue.close()
        await work
    assert link.failed == []


async def test_a_table_that_never_arrives_is_reported(
    link: QueueOfOneLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_queue, "ROOT_WAIT_S", 0.01)
    for root in FORM.roots:
        await link.holdings.accept_root(root)
    link.take(1, *PAYLOADS[0])
    link.queue.close()
    await link.queue.run()
    [(form, reason)] = link.failed
    assert form == FORM.facts.form
    assert "no table names frames" in reason


async def test_frames_of_an_unsigned_form_are_dropped(
    link: QueueOfOneLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_queue, "ROOT_WAIT_S", 0.01)
    link.take(1, *PAYLOADS[0])
    link.queue.close()
    await link.queue.run()
    assert link.failed == []
    assert link.holdings.dropped(FORM.facts.form)

"""The frames of one form that a peer accepts: no wrong one, and each right one once, also if the form begins again."""

import asyncio
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.store.budget import DiskBudget
from echo2d.store.frames import FramesDamaged, FrameStore
from tests.support.encodings import build_form, facts
from tests.support.holdings_owner import NotingOwner


def holdings_in(store: FrameStore) -> FrameHoldings:
    return FrameHoldings(store, NotingOwner())


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_wrong_frame_is_refused(tmp_path: Path, at_once: bool) -> None:
    form = build_form(facts(), {"a.txt": os.urandom(1 << 20)}, segment_bytes=2 << 20)
    name, segment = form.facts.form, form.segments[0]
    store = await asyncio.to_thread(FrameStore, tmp_path, DiskBudget(1 << 30))
    holdings = holdings_in(store)
    for root in form.roots:
        await holdings.accept_root(root)
    await holdings.put_table(name, segment.table.segment, segment.table.encode())
    held, rng = set(holdings.held(name)), random.Random(9)
    for span, payload in segment.frames(form.facts.frame_bytes):
        flipped = bytearray(payload)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        for data in (bytes(flipped), payload[:-1], bytes(payload) + b"\0", b""):
            wrong = memoryview(data)
            if at_once:
                assert holdings.takes_at_once(name, span.frame, len(wrong))
                assert not holdings.put_at_once(name, span.frame, wrong)
            else:
                assert await holdings.put_frames(name, [(span.frame, wrong)]) == {span.frame}
        assert set(holdings.held(name)) == set(store.held(name)) == held


async def test_a_write_that_ends_after_the_form_was_begun_again_is_counted_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = build_form(facts(), {f"f{i}.txt": os.urandom(70_000) for i in range(3)})
    name, segment = form.facts.form, form.segments[0]
    store = await asyncio.to_thread(FrameStore, tmp_path, DiskBudget(1 << 30))
    holdings = holdings_in(store)
    table = segment.table
    for root in form.roots:
        await holdings.accept_root(root)
    await holdings.put_table(name, table.segment, table.encode())
    frames = [(span.frame, payload) for span, payload in segment.frames(form.facts.frame_bytes)]
    begun, go_on, put = asyncio.Event(), threading.Event(), store.put_verified
    loop = asyncio.get_running_loop()

    def slow(*arguments: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        put(*arguments)

    monkeypatch.setattr(store, "put_verified", slow)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(holdings.put_frames(name, frames))
        await begun.wait()
        holdings.drop(name)
        for root in form.roots:
            await holdings.accept_root(root)
        go_on.set()
    every = sum(len(payload) for _, payload in frames)
    assert holdings.payload_bytes(name) == every  # the new index does not know these frames yet
    await holdings.put_table(name, table.segment, table.encode())
    holdings.lose(FramesDamaged(name, [frames[0][0]]))
    assert holdings.payload_bytes(name) == every - len(frames[0][1])

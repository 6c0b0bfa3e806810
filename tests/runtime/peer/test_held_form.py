"""What is counted of one form, also when it is given up and begun anew while frames are written."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.store.budget import DiskBudget
from echo2d.store.frames import FramesDamaged, FrameStore
from tests.support.encodings import build_form, facts


async def test_a_write_that_ends_after_the_form_was_begun_anew_is_counted_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = build_form(facts(), {f"f{i}.txt": os.urandom(70_000) for i in range(3)})
    name, segment = form.facts.form, form.segments[0]
    store = await asyncio.to_thread(FrameStore, tmp_path, DiskBudget(1 << 30))
    holdings = FrameHoldings(
        store,
        emit=lambda _: None,
        ask=lambda _: None,
        fail=lambda *_: None,
        serving=lambda: None,
        base=lambda _: None,
    )
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
        holdings.give_up(name)
        for root in form.roots:
            await holdings.accept_root(root)
        go_on.set()
    every = sum(len(payload) for _, payload in frames)
    assert holdings.payload_bytes(name) == every  # the new index does not know these frames yet
    await holdings.put_table(name, table.segment, table.encode())
    holdings.lose(FramesDamaged(name, [frames[0][0]]))
    assert holdings.payload_bytes(name) == every - len(frames[0][1])

"""A worker with a real server that it starts applies deltas in place: its slot is written over while it serves."""

import asyncio
from pathlib import Path

import pytest

from echo2d.engines.sglang.engine import SglangEngine
from tests.support.one_slot import check_one_slot
from tests.support.sglang_harness import SglangHarness
from tests.support.sglang_servers import launch

LOGPROB_ERROR_MAX = 1e-3


async def test_a_server_writes_with_the_old_version_while_its_slot_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = SglangHarness(tmp_path / "models", [])
    engine = SglangEngine(launch(tmp_path / "engine"), slots=8)
    assert not engine.reads_snapshots_later

    async def in_memory(snapshot: Path) -> None:
        assert await harness.in_memory(engine) == await asyncio.to_thread(
            harness.in_files, snapshot
        )

    await check_one_slot(
        tmp_path, engine, await asyncio.to_thread(harness.snapshot, 0), monkeypatch,
        logprob_error_max=LOGPROB_ERROR_MAX, in_memory=in_memory,
    )  # fmt: skip

"""Slots whose files change on the disk: an engine never loads them, and no version is made from them."""

import asyncio
import os
from pathlib import Path

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    RefitDone,
    RefitFailed,
    VersionKey,
    VersionVerified,
)
from echo2d.core.worker.events import EngineRefitFailed, EngineRefitted, RefitEngines
from echo2d.runtime.worker.engine_refit import EngineRefits
from echo2d.store.disk import write_at
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_seed, a_worker, spread


async def test_a_slot_that_rots_before_its_refit_is_never_loaded_and_written_again(
    double: CoordinatorDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refit, rotten = EngineRefits.refit, Version(1)

    async def rot_and_refit(
        self: EngineRefits, order: RefitEngines
    ) -> EngineRefitted | EngineRefitFailed:
        if order.version == rotten and not double.said(RefitFailed):
            path = Path(order.path) / "model-1.safetensors"
            await asyncio.to_thread(write_at, path, b"rot", 3000)
            await asyncio.to_thread(
                os.utime, path, (0, 0)
            )  # clocks of files may tick too slowly for a test
        return await refit(self, order)

    monkeypatch.setattr(EngineRefits, "refit", rot_and_refit)
    async with a_seed(double) as seed, a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        _, old = await spread(double, 0, names["seed"], names["one"])
        await double.until_said(RefitDone)
        facts, new = await spread(double, 1, names["seed"], names["one"])
        failed = await double.until_said(RefitFailed)
        assert (failed.serving, "is damaged" in failed.reason) == (
            VersionKey(Version(0), old),
            True,
        )
        assert f"refit failed version=1 {failed.reason}" in caplog.text
        sent = seed._receiver._sent[facts.form]
        done = await double.until_said(RefitDone, count=2)
        assert (done.version, done.digest, done.memory_ok) == (1, new, True)
        assert len(double.said(VersionVerified)) == 3
        assert seed._receiver._sent[facts.form] == sent


async def test_a_chunk_that_rots_in_the_current_slot_is_not_copied_into_the_next(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one") as one:
        names = await double.peers(2)
        await spread(double, 0, names["seed"], names["one"])
        await double.until_said(RefitDone)
        [path] = one._state._versions._snapshots._paths.values()
        await asyncio.to_thread(
            write_at, Path(path) / "config.json", b"rot", 0
        )  # the same in all versions
        _, digest = await spread(double, 1, names["seed"], names["one"])
        done = await double.until_said(RefitDone, count=2)
        assert (done.version, done.digest) == (1, digest)
        assert not double.said(ApplyFailed)

"""A worker on a disk that is really too small for a version: it says so, serves the old one, and takes the next one."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.core.messages import ApplyFailed, RefitDone, SampleFinished
from tests.coordinator_kit import CoordinatorDouble
from tests.peer_kit import a_seed, a_worker, spread, spread_striped

DISK_BYTES = 12 << 20  # frames and two slots of a version of 1 MiB, with room to spare


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of DISK_BYTES."""
    path = tmp_path / "one"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


async def test_a_version_that_does_not_fit_costs_only_itself(small_disk: Path, tmp_path: Path) -> None:
    async with CoordinatorDouble.serving(tmp_path / "run") as double:
        await asyncio.to_thread(double.token, small_disk / "worker.token", "one")
        async with a_seed(double), a_worker(double, small_disk):
            names = await double.peers(2)
            chain = (names["seed"], names["one"])
            await spread(double, 0, *chain)
            await double.until_said(RefitDone)
            facts, _ = await spread_striped(double, 1, chain, weight_bytes=16 << 20)
            failed = await double.until_said(ApplyFailed)
            assert failed.form == facts.form
            assert "No space left on device" in failed.reason
            double.send(chain[1], double.lease(1, samples=1))
            assert (await double.until_said(SampleFinished)).spans[0].version == 0
            await spread(double, 2, *chain)
            assert (await double.until_said(RefitDone, count=2)).version == 2

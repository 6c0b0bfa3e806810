"""A worker whose disk, or share of it, is too small for a version: it says so, serves the old one, takes the next."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.core.protocol.control_messages import ApplyFailed, RefitDone, SampleFinished
from echo2d.runtime.peer.state_dir import open_frames
from echo2d.store.budget import DiskBudget
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_seed, a_worker, spread, spread_striped

SHARE_BYTES = 4 << 20  # two slots and the frames of two versions of 1 MiB, but not of three
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


async def test_a_version_that_does_not_fit_costs_only_itself(
    small_disk: Path, tmp_path: Path
) -> None:
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


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


async def test_older_versions_make_room_within_the_share_of_the_disk(tmp_path: Path) -> None:
    async with CoordinatorDouble.serving(tmp_path / "run") as double:
        async with (
            a_seed(double),
            a_worker(double, tmp_path / "one", disk_bytes_max=SHARE_BYTES) as worker,
        ):
            names = await double.peers(2)
            chain = (names["seed"], names["one"])
            forms = []
            for version in range(4):
                forms.append((await spread(double, version, *chain))[0].form)
                assert (await double.until_said(RefitDone, count=version + 1)).version == version
            state = tmp_path / "one" / "state"
            assert await asyncio.to_thread(bytes_below, state) < SHARE_BYTES + (64 << 10)
            kept = worker._receiver.holdings
            assert [bool(kept.held(form)) for form in forms] == [False, False, True, True]
            large, _ = await spread_striped(double, 4, chain, weight_bytes=8 << 20)
            failed = await double.until_said(ApplyFailed)
            assert failed.form == large.form
            assert f"disk_bytes_max = {SHARE_BYTES}" in failed.reason
            assert kept.held(forms[3]), "the frames of the version being served stay"
            double.send(chain[1], double.lease(1, samples=1))
            assert (await double.until_said(SampleFinished)).spans[0].version == 3
            await spread(double, 5, *chain)
            assert (await double.until_said(RefitDone, count=5)).version == 5
        await double.until(lambda: len(double.connected) == 0)
        budget = DiskBudget(2 << 20)
        kept_forms = (await asyncio.to_thread(open_frames, state / "frames", budget)).forms()
        assert [facts.version for facts in kept_forms] == [3, 5], "both fit"
        budget = DiskBudget(1 << 20)
        kept_forms = (await asyncio.to_thread(open_frames, state / "frames", budget)).forms()
        assert [facts.version for facts in kept_forms] == [5]

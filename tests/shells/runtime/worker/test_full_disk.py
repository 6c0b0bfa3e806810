"""A worker whose disk, or share of it, is too small for a version reports it, serves the old one, takes the next."""

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echo2d.core.base.ids import FormId
from echo2d.core.protocol.control_messages import ApplyFailed, Heartbeat, RefitDone, SampleFinished
from echo2d.core.weights.form import FormFacts
from echo2d.errors import StoreFault
from echo2d.runtime.peer.state_dir import open_frames
from echo2d.store.budget import DiskBudget
from echo2d.store.frames import FrameStore
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_seed, a_worker, spread, spread_striped
from tests.support.polling import poll

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


async def test_a_version_without_room_is_skipped_and_the_next_one_is_served(
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
            # The double tells of a version once, and a peer without room for a form gives it up.
            frames = small_disk / "state" / "frames" / facts.form
            await asyncio.to_thread(poll, lambda: not frames.exists())
            await spread(double, 2, *chain)
            assert (await double.until_said(RefitDone, count=2)).version == 2


async def test_heartbeats_report_the_room_for_new_versions(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_worker(double, tmp_path / "one", disk_bytes_max=SHARE_BYTES):
        await double.until(lambda: any(beat.disk_free for beat in double.said(Heartbeat)))
        assert double.said(Heartbeat)[-1].disk_free == SHARE_BYTES


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
            free = await asyncio.to_thread(worker._state_dir.free_bytes)
            assert free == pytest.approx(2 << 20, rel=0.01), "the older slot, and the older frames"
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
        # What arrived of version 4 before it failed may fit, too.
        assert {3, 5} <= {facts.version for facts in kept_forms}, "both fit"
        budget = DiskBudget(1 << 20)
        kept_forms = (await asyncio.to_thread(open_frames, state / "frames", budget)).forms()
        kept_versions = {facts.version for facts in kept_forms}
        assert 3 not in kept_versions
        assert 5 in kept_versions


async def test_a_full_disk_is_reported_and_the_old_version_stays_served(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_after(version: int) -> Callable[..., None]:
        put = FrameStore.put_verified

        def put_verified(self: FrameStore, form: FormId, *frames: object) -> None:
            if "seed" not in str(self._root) and self._forms[form].facts.version == version:
                raise StoreFault(f"storing frames in {form} failed: No space left on device")
            put(self, form, *frames)  # type: ignore[arg-type]

        return put_verified

    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        one = names["one"]
        await spread(double, 0, names["seed"], one)
        await double.until_said(RefitDone, one)
        with monkeypatch.context() as patched:
            patched.setattr(FrameStore, "put_verified", full_after(1))
            facts, _ = await spread(double, 1, names["seed"], one)
            failed = await double.until_said(ApplyFailed, one)
            assert (failed.form, failed.reason.endswith("No space left on device")) == (
                facts.form,
                True,
            )
            double.send(one, double.lease(1, samples=1))
            result = await double.until_said(SampleFinished, one)
            assert result.spans[0].version == 0
        await spread(double, 2, names["seed"], one)
        done = await double.until_said(RefitDone, one, count=2)
        assert done.version == 2


async def test_a_form_that_cannot_even_begin_is_reported(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = FrameStore.begin

    def full(self: FrameStore, facts: FormFacts) -> None:
        if "seed" not in str(self._root):
            raise StoreFault("beginning a form failed: No space left on device")
        begin(self, facts)

    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        one = names["one"]
        with monkeypatch.context() as patched:
            patched.setattr(FrameStore, "begin", full)
            facts, _ = await spread(double, 0, names["seed"], one)
            failed = await double.until_said(ApplyFailed, one)
            assert (failed.form, failed.reason.endswith("No space left on device")) == (
                facts.form,
                True,
            )
            double.send(one, double.roots[-1])
            await double.until_said(ApplyFailed, one, count=2)
        for plan in range(
            2, 12
        ):  # told again, as a coordinator does, for one telling may meet the failure before it
            double.send(one, double.roots[-1])
            double.chains(facts.form, [(names["seed"], one)], plan=plan)
            with contextlib.suppress(TimeoutError):
                await double.until(lambda: bool(double.said(RefitDone, one)), timeout_s=1.0)
                break
        await double.until_said(RefitDone, one)

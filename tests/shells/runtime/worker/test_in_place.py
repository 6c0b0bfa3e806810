"""A worker with one slot: deltas are written over their base, and a refit that fails turns the slot back."""

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from echo2d.core.base.ids import Digest, PeerId, Version
from echo2d.core.protocol.control_messages import (
    RefitDone,
    RefitFailed,
    VersionKey,
    VersionVerified,
)
from echo2d.core.worker import versions
from echo2d.engines.fake import FakeEngine, RefitOutcome
from echo2d.engines.sglang.engine import SglangEngine
from echo2d.engines.torch_engine import TorchEngine
from echo2d.errors import OperatorFault
from echo2d.runtime.worker.engine_refit import EngineRefits, make_engines
from echo2d.runtime.worker.main import Worker, run_worker
from echo2d.store.disk import write_at
from echo2d.store.slots.current_slot import CurrentSlot
from echo2d.store.slots.slot_store import SlotStore
from echo2d.store.slots.undo_log import BASE, LOG
from echo2d.store.snapshots import damaged_chunks
from tests.support.engine_harness import TorchHarness, save_random_model, tiny_config
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.one_slot import check_one_slot, current_of, slot_names
from tests.support.peer import a_seed, a_worker, config_of, publish_delta, spread

PACE = 100.0  # tokens per second, so that a sample goes on until the test is over
LOGPROB_ERROR_MAX = 1e-3


async def publish_changed(
    double: CoordinatorDouble, version: int, base: Digest, *chain: PeerId, config: str = ""
) -> Digest:
    """Publish the version before it with a few other weights, as a delta. config: another config.json."""
    path = double.run.path / "versions" / str(version)
    await asyncio.to_thread(shutil.copytree, path.with_name(str(version - 1)), path)
    await asyncio.to_thread(
        write_at, path / "model-0.safetensors", bytes([version]) * 3, 2000 * version
    )
    if config:
        await asyncio.to_thread((path / "config.json").write_text, config)
    return await publish_delta(double, version, base, *chain)


async def serve_first(double: CoordinatorDouble) -> tuple[list[PeerId], Digest]:
    """Have the worker `one` serve version 0. Returns the chain from the seed to it, and the digest."""
    names = await double.peers(2)
    chain = [names["seed"], names["one"]]
    _, digest = await spread(double, 0, *chain)
    await double.until_said(RefitDone)
    return chain, digest


@asynccontextmanager
async def in_place(
    double: CoordinatorDouble, tmp_path: Path, *engines: FakeEngine
) -> AsyncIterator[tuple[Worker, list[PeerId], Digest]]:
    """A seed, and the worker `one` that serves version 0; also what `serve_first` returns."""
    one = a_worker(double, tmp_path / "one", *engines, apply_in_place=True)
    async with a_seed(double), one as worker:
        yield worker, *(await serve_first(double))


async def test_one_slot_holds_version_after_version(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with in_place(double, tmp_path) as (one, chain, digest):
        slot = (await current_of(one)).slot
        for version in (1, 2):
            digest = await publish_changed(double, version, digest, *chain)
            done = await double.until_said(RefitDone, count=version + 1)
            assert (done.digest, done.memory_ok) == (digest, True)
            assert await asyncio.to_thread(slot_names, one) == [slot]
            assert sorted(each.name for each in (await current_of(one)).directory.parent.iterdir()) == [
                "manifest", "model",
            ]  # fmt: skip


async def test_a_delta_with_a_longer_file_goes_to_the_other_slot(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with in_place(double, tmp_path) as (one, chain, digest):
        slot = (await current_of(one)).slot
        longer = '{"architectures": ["Qwen3ForCausalLM"], "x": 1}'
        await publish_changed(double, 1, digest, *chain, config=longer)
        await double.until_said(RefitDone, count=2)
        assert (await current_of(one)).slot != slot
        assert await asyncio.to_thread(slot_names, one) == [(await current_of(one)).slot], (
            "the other one is emptied"
        )


@pytest.mark.parametrize("outcome", ["fails", "doubtful"])
async def test_a_refit_that_fails_turns_the_slot_back(
    double: CoordinatorDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: RefitOutcome,
) -> None:
    """The old version is served meanwhile, or loaded again if the engine lost it; then the new one is tried again."""
    monkeypatch.setattr(versions, "REFIT_RETRY_S", 0.2)
    rolled_back = []
    roll_back = SlotStore.roll_back

    def look(self: SlotStore, directory: Path) -> CurrentSlot | None:
        old = roll_back(self, directory)
        if old is not None:
            assert not damaged_chunks(old.directory, old.manifest)
            assert not (old.directory.parent / BASE).exists()
            assert not (old.directory.parent / LOG).exists()
            rolled_back.append(old.version)
        return old

    monkeypatch.setattr(SlotStore, "roll_back", look)
    engine = FakeEngine(refit_outcomes=["done", outcome])
    async with in_place(double, tmp_path, engine) as (one, chain, old):
        new = await publish_changed(double, 1, old, *chain)
        failed = await double.until_said(RefitFailed)
        kept = VersionKey(Version(0), old)
        assert (failed.digest, failed.serving) == (new, kept if outcome == "fails" else None)
        count = 2 if outcome == "fails" else 3
        done = await double.until_said(RefitDone, count=count)
        assert (done.version, done.digest, done.memory_ok) == (1, new, True)
        served = [each.version for each in double.said(RefitDone)]
        assert served == ([0, 1] if outcome == "fails" else [0, 0, 1])
        assert rolled_back == [0]
        assert (await current_of(one)).version == 1
        assert len(double.said(VersionVerified)) >= 3, "applied again"


async def test_memory_that_is_not_the_snapshot_turns_the_slot_back(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "REFIT_RETRY_S", 0.2)
    engine, real = FakeEngine(), FakeEngine.tensor_digests

    async def wrong_once(self: FakeEngine) -> dict[str, bytes]:
        digests = dict(await real(self))
        if self.label is not None and self.label.startswith("1") and not double.said(RefitFailed):
            digests.popitem()
        return digests

    monkeypatch.setattr(FakeEngine, "tensor_digests", wrong_once)
    async with in_place(double, tmp_path, engine) as (one, chain, old):
        await publish_changed(double, 1, old, *chain)
        failed = await double.until_said(RefitFailed)
        assert (failed.version, failed.serving) == (1, None)
        done = await double.until_said(RefitDone, count=3)
        assert [each.version for each in double.said(RefitDone)] == [0, 0, 1]
        assert done.memory_ok
        assert (await current_of(one)).version == 1


@pytest.mark.parametrize("outcome", ["done", "fails"])
async def test_a_worker_that_is_killed_before_its_refit_goes_on_with_the_new_version(
    double: CoordinatorDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: RefitOutcome,
) -> None:
    """If its engine cannot load that, the next process turns the slot back and applies it again."""
    monkeypatch.setattr(versions, "REFIT_RETRY_S", 0.2)
    async with a_seed(double):
        async with a_worker(double, tmp_path / "one", apply_in_place=True) as one:
            chain, old = await serve_first(double)
            with monkeypatch.context() as patched:
                patched.setattr(EngineRefits, "refit", _never)
                new = await publish_changed(double, 1, old, *chain)
                await double.until_said(VersionVerified, count=2)
            slot = await current_of(one)
            assert (slot.version, slot.manifest.digest) == (1, new)
            assert await asyncio.to_thread((slot.directory.parent / BASE).exists), "not served yet"
        await double.until(lambda: chain[1] not in double.connected)
        engine = FakeEngine(refit_outcomes=[outcome])
        async with a_worker(double, tmp_path / "one", engine, apply_in_place=True) as one:
            done = await double.until_said(RefitDone, count=2)
            assert (done.version, done.digest, done.memory_ok) == (1, new, True)
            assert len(double.said(RefitFailed)) == (outcome == "fails")
            assert not await asyncio.to_thread((slot.directory.parent / BASE).exists)


async def _never(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.timeout(300)
async def test_torch_writes_with_the_old_version_while_its_slot_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are float32, because transformers may map what it need not convert."""
    model, harness = tmp_path / "model", TorchHarness(tmp_path)
    await asyncio.to_thread(
        save_random_model, model, tiny_config(), rng_seed=0, dtype=torch.float32
    )
    engine = TorchEngine(dtype="float32", threads=1, tokens_per_s_max=PACE)

    async def in_memory(snapshot: Path) -> None:
        assert await harness.in_memory(engine) == await asyncio.to_thread(
            harness.in_files, snapshot
        )

    await check_one_slot(
        tmp_path, engine, model, monkeypatch,
        logprob_error_max=LOGPROB_ERROR_MAX, in_memory=in_memory,
    )  # fmt: skip


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:1"])
async def test_servers_of_others_are_refused(
    double: CoordinatorDouble, tmp_path: Path, url: str
) -> None:
    config = dataclasses.replace(
        await config_of(double, tmp_path / "one"), engine="sglang", apply_in_place=True,
        engine_url=url, engine_python=None if url else tmp_path,
    )  # fmt: skip
    if not url:
        [engine] = await asyncio.to_thread(make_engines, config)
        assert isinstance(engine, SglangEngine)
        return
    with pytest.raises(OperatorFault, match=r"^worker.apply_in_place: .* at any time"):
        await run_worker(config)
    assert not double.connected
    config = dataclasses.replace(config, apply_in_place=False)
    assert await asyncio.to_thread(make_engines, config)


async def test_any_engine_that_reads_files_later_is_refused(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its kind, and also if it is one of several: the engine itself says whether it does."""
    maps = iter([False, True])
    monkeypatch.setattr(FakeEngine, "reads_snapshots_later", property(lambda _: next(maps)))
    config = dataclasses.replace(
        await config_of(double, tmp_path / "one"), engines=2, apply_in_place=True
    )
    with pytest.raises(OperatorFault, match=r"^worker.apply_in_place: .* at any time"):
        await asyncio.to_thread(make_engines, config)

"""LoRA adapters: published, loaded beside the right base model, and refused beside any other."""

import asyncio
import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.base.ids import Epoch, Version, version_label
from echo2d.core.protocol.control_messages import RefitDone, RefitFailed, SampleFinished
from echo2d.engines.base import AdapterBase, Engine
from echo2d.engines.torch_engine import TorchEngine
from echo2d.errors import EngineFault, OperatorFault
from echo2d.runtime.run_dir.version_files import VersionFiles
from echo2d.runtime.worker.lora_base import LoraBase
from echo2d.store.snapshots import build_manifest, scan_snapshot
from tests.support.engine_contract import SHORT, check_logprobs, generated
from tests.support.engine_harness import label
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.lora import NARROW, AdapterHarness, edited, make_base, write_adapter
from tests.support.peer import a_seed, a_worker

Spoil = Callable[[Path], object]


@pytest.fixture
def harness(tmp_path: Path) -> AdapterHarness:
    return AdapterHarness(tmp_path / "models")


@pytest.fixture
def base(harness: AdapterHarness) -> AdapterBase:
    return harness.base


@pytest.fixture
def adapter(harness: AdapterHarness) -> Path:
    return harness.snapshot(0)


@pytest.fixture
async def engine(harness: AdapterHarness) -> AsyncIterator[Engine]:
    engine = harness.engine()
    await engine.start()
    yield engine
    await engine.close()


# published


def test_an_adapter_directory_is_a_snapshot(adapter: Path) -> None:
    assert [file.path for file in scan_snapshot(adapter)] == [
        *("adapter_config.json", "adapter_model.safetensors", "base.json"),
    ]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda adapter: (adapter / "base.json").unlink(), "no base.json"),
        (
            lambda adapter: (adapter / "adapter_model.safetensors").unlink(),
            "no adapter_model.safetensors",
        ),
        (lambda adapter: (adapter / "config.json").write_text("{}"), "a model, or an adapter"),
        (
            lambda adapter: (adapter / "README.md").write_text("a card"),
            "forbidden file 'README.md'",
        ),
    ],
)
def test_half_an_adapter_is_refused(adapter: Path, spoil: Spoil, complaint: str) -> None:
    spoil(adapter)
    with pytest.raises(OperatorFault, match=complaint):
        scan_snapshot(adapter)


def test_a_run_takes_adapters_of_its_base_model_alone(
    tmp_path: Path, adapter: Path, base: AdapterBase
) -> None:
    run_dir, other = tmp_path / "run", make_base(tmp_path / "other", rng_seed=7)
    run_dir.mkdir()
    files = VersionFiles(run_dir, tmp_path, base_model=base.directory)
    files.prepare({})
    assert files.adopt(Epoch(1), Version(0), str(adapter)).digest == build_manifest(adapter).digest
    stranger = write_adapter(tmp_path / "stranger", other, rng_seed=0)
    with pytest.raises(
        OperatorFault, match=f"base model {other.digest[:12]}; run.base_model is {base.digest[:12]}"
    ):
        files.adopt(Epoch(1), Version(1), str(stranger))
    assert len(list((run_dir / "versions").iterdir())) == 1
    (adapter / "base.json").write_text("{}")
    with pytest.raises(OperatorFault, match=r"base\.json does not name"):
        files.adopt(Epoch(1), Version(1), str(adapter))


# its base


def test_a_base_is_verified_and_remembered(adapter: Path, base: AdapterBase) -> None:
    here = LoraBase(base.directory)
    assert here.of(base.directory) is None, "a whole model"
    assert here.of(adapter) == base
    assert here.of(adapter) is here.of(adapter)
    os.utime(base.directory / "config.json")
    assert here.of(adapter) == base


def test_an_adapter_of_another_base_or_without_one_is_a_fault(
    tmp_path: Path, adapter: Path, base: AdapterBase
) -> None:
    other = make_base(tmp_path / "other", rng_seed=7)
    with pytest.raises(EngineFault, match=f"base model {base.digest[:12]}; pass its directory"):
        LoraBase(None).of(adapter)
    with pytest.raises(EngineFault, match=f"--base-model is {other.digest[:12]}"):
        LoraBase(other.directory).of(adapter)
    here = LoraBase(base.directory)
    here.of(adapter)
    with edited(base.directory / "config.json") as config:
        config["rope_theta"] = 1.0
    with pytest.raises(EngineFault, match="--base-model is"):
        here.of(adapter)
    shutil.rmtree(base.directory)
    with pytest.raises(EngineFault, match="cannot be served"):
        here.of(adapter)


# in the engine


async def test_a_base_that_changed_after_its_check_is_not_served(
    engine: TorchEngine, adapter: Path, base: AdapterBase
) -> None:
    name = min(base.tensors)
    wrong = dataclasses.replace(base, tensors={**base.tensors, name: bytes(32)})
    with pytest.raises(EngineFault, match="not the one that was verified"):
        await engine.refit(adapter, label(0), base=wrong)
    assert engine.label is None


CHANGES: dict[str, dict[str, Any]] = {"another rank": {"r": 3}, "not plain": {"use_dora": True}}


@pytest.mark.parametrize("change", CHANGES)
async def test_an_adapter_that_does_not_fit_leaves_the_old_one(
    harness: AdapterHarness, engine: TorchEngine, change: str
) -> None:
    await engine.refit(harness.snapshot(0), label(0))
    with edited(harness.snapshot(1) / "adapter_config.json") as config:
        config.update(CHANGES[change])
    with pytest.raises(EngineFault):
        await engine.refit(harness.snapshot(1), label(1))
    assert engine.label == label(0)
    check_logprobs(harness, await generated(engine, SHORT))


@pytest.fixture
async def built_once(
    harness: AdapterHarness, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine serves adapter 0, and must not build another model."""
    await engine.refit(harness.snapshot(0), label(0))

    def built(*_: object, **__: object) -> None:
        raise AssertionError("a second model was built")

    monkeypatch.setattr("echo2d.engines.torch_engine.decoder.build", built)


@pytest.mark.usefixtures("built_once")
async def test_an_adapter_of_another_scale_rank_or_layers_has_the_same_model(
    harness: AdapterHarness, engine: TorchEngine
) -> None:
    with edited(harness.snapshot(1) / "adapter_config.json") as config:
        config["lora_alpha"] = 2.0
    for version in (1, NARROW, 2):
        await engine.refit(harness.snapshot(version), label(version))
        check_logprobs(harness, await generated(engine, SHORT))


@pytest.mark.usefixtures("built_once")
async def test_the_notes_of_another_process_of_the_trainer_do_not_build_another_model(
    harness: AdapterHarness, engine: TorchEngine
) -> None:
    with edited(harness.snapshot(1) / "adapter_config.json") as config:
        config["target_modules"].reverse()
        config.update(use_rslora=False, base_model_name_or_path="/elsewhere", peft_version="0.18")
    await engine.refit(harness.snapshot(1), label(1))
    check_logprobs(harness, await generated(engine, SHORT))


# through the swarm


async def test_a_worker_serves_the_adapter_that_its_base_belongs_to(
    tmp_path: Path, harness: AdapterHarness, base: AdapterBase
) -> None:
    other = await asyncio.to_thread(make_base, tmp_path / "other", rng_seed=7)
    engines = [TorchEngine(threads=1) for _ in range(2)]
    async with CoordinatorDouble.serving(tmp_path / "run") as double, a_seed(double):
        right = a_worker(double, tmp_path / "right", engines[0], base_model=base.directory)
        wrong = a_worker(double, tmp_path / "wrong", engines[1], base_model=other.directory)
        async with right, wrong:
            names = await double.peers(3)
            digests = []
            for version in range(2):
                path = double.run.path / "versions" / str(version)
                await asyncio.to_thread(shutil.copytree, harness.snapshot(version), path)
                digests.append((await asyncio.to_thread(build_manifest, path)).digest)
                facts = double.facts(version, version + 1)
                double.start_form(facts)
                double.chain(
                    facts.form, [names["seed"], names["right"], names["wrong"]], plan=version + 1
                )
                double.send(names["seed"], double.order(facts, digests[-1], path))
                done = await double.until_said(RefitDone, names["right"], count=version + 1)
                assert (done.digest, done.memory_ok) == (digests[-1], True)
            failed = await double.until_said(RefitFailed, names["wrong"])
            assert f"--base-model is {other.digest[:12]}" in failed.reason
            assert (failed.serving, engines[1].label) == (None, None)
            double.send(names["right"], double.lease(1, samples=1))
            await double.until_said(SampleFinished, names["right"])
            assert engines[0].label == version_label(Version(1), digests[1])
            assert {span.digest for span in double.said(SampleFinished)[0].spans} == {digests[1]}

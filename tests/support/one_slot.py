"""A worker that applies deltas in place while a real engine writes with the version in the slot.

The test checks three things. While the slot already holds the files of the new version, the engine still writes tokens
of the old one. Every token has the logprob that the version of its span gives it. There is never a second slot.
"""

import asyncio
import dataclasses
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2d.core.base.ids import Digest
from echo2d.core.protocol.control_messages import LeaseProgress, RefitDone
from echo2d.engines.base import Engine
from echo2d.runtime.worker.main import Worker
from echo2d.store.slots.current_slot import CurrentSlot
from echo2d.store.slots.slot_writer import SlotWriter
from echo2d.store.slots.undo_log import BASE
from echo2d.store.snapshots import damaged_chunks
from tests.support.engine_harness import CONTEXT_MAX, load_model, score
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_seed, a_worker, publish_delta, publish_full
from tests.support.polling import HANG_S, START_S
from tests.support.progress import ReportedSamples

VERSIONS = 4
BETWEEN = 8  # tokens of every sample, before, during and after each apply
SAMPLES = 2
REPORT_S = 0.1
CHANGED = 0.05  # of all weights, from one version to the next
PROMPT = [5, 6, 7]  # of the double's leases


def nudged(old: Path, new: Path, rng_seed: int) -> None:
    """Write the next version of a model: some weights are a good deal larger or smaller. Blocking."""
    shutil.copytree(old, new)
    chance = torch.Generator().manual_seed(rng_seed)
    tensors = load_file(old / "model.safetensors")
    for tensor in tensors.values():
        changes = torch.rand(tensor.shape, generator=chance) < CHANGED
        tensor[changes] *= 1.5
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})


def slot_names(worker: Worker) -> list[str]:
    """The slots that are on disk. Blocking."""
    root = worker._slots.directories()[0].parent.parent
    return sorted(each.name for each in root.iterdir() if each.is_dir())


async def current_of(worker: Worker) -> CurrentSlot:
    """The current version, every byte of which is on disk."""
    current = await asyncio.to_thread(worker._slots.current)
    assert current is not None
    assert await asyncio.to_thread(damaged_chunks, current.directory, current.manifest) == ()
    return current


class Overwritten:
    """Holds each apply in place when all chunks are written and the version is not committed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._reached, self._go_on = threading.Semaphore(0), threading.Semaphore(0)
        commit = SlotWriter.commit

        def held(writer: SlotWriter, *arguments: Any) -> CurrentSlot:
            if writer.unsure:
                self._reached.release()
                assert self._go_on.acquire(timeout=HANG_S)
            return commit(writer, *arguments)

        patch.setattr(SlotWriter, "commit", held)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.acquire, timeout=HANG_S)

    def go_on(self) -> None:
        self._go_on.release()


async def check_one_slot(
    folder: Path,
    engine: Engine,
    model: Path,
    patch: pytest.MonkeyPatch,
    *,
    logprob_error_max: float,
    in_memory: Callable[[Path], Awaitable[None]],
) -> None:
    """model: version 0. in_memory(snapshot): checks that the engine's memory is this snapshot."""
    async with CoordinatorDouble.serving(folder / "run") as double:
        versions = double.run.path / "versions"
        await asyncio.to_thread(write_versions, model, versions)
        held = Overwritten(patch)
        async with (
            a_seed(double),
            a_worker(double, folder / "one", engine, apply_in_place=True) as one,
        ):
            names = await double.peers(2)
            chain = names["seed"], names["one"]
            digest = await publish_full(double, 0, *chain)
            await until_refitted(double, 0, digest)
            slot = (await current_of(one)).slot
            lease = double.lease(1, samples=SAMPLES, tokens=CONTEXT_MAX - 100)
            double.send(names["one"], dataclasses.replace(lease, report_s=REPORT_S))
            await until_written(double, 0)
            for version in range(1, VERSIONS):
                snapshot = versions / str(version)
                digest = await publish_delta(double, version, digest, *chain)
                await held.reached()
                assert await asyncio.to_thread(slot_names, one) == [slot]
                assert await asyncio.to_thread(holds, one, slot, snapshot)
                await until_written(double, version - 1, more=True)
                held.go_on()
                await until_refitted(double, version, digest)
                await until_written(double, version)
                await in_memory(snapshot)
                current = await current_of(one)
                assert (current.slot, current.version) == (slot, version)
                assert await asyncio.to_thread(slot_names, one) == [slot]
                assert not await asyncio.to_thread((current.directory.parent / BASE).exists)
        await asyncio.to_thread(check_tokens, double, versions, logprob_error_max)


def write_versions(model: Path, versions: Path) -> None:
    """Version 0 is the model, with a tokenizer. Blocking."""
    shutil.copytree(model, versions / "0")
    (versions / "0" / "tokenizer.json").write_text("{}")
    for version in range(1, VERSIONS):
        nudged(versions / str(version - 1), versions / str(version), version)


def holds(worker: Worker, slot: str, snapshot: Path) -> bool:
    """Whether the files in this slot are those of the snapshot, byte by byte. Blocking."""
    (model,) = [path for path in worker._slots.directories() if path.parent.name == slot]
    names = [path.relative_to(snapshot) for path in snapshot.rglob("*") if path.is_file()]
    return all((model / name).read_bytes() == (snapshot / name).read_bytes() for name in names)


async def until_refitted(double: CoordinatorDouble, version: int, digest: Digest) -> None:
    wait_s = HANG_S if version else START_S  # the first one starts the engine
    done = await double.until_said(RefitDone, count=version + 1, timeout_s=wait_s)
    assert (done.version, done.digest) == (version, digest)
    assert done.memory_ok is not False


async def until_written(double: CoordinatorDouble, version: int, *, more: bool = False) -> None:
    """Wait until every sample has some tokens of this version; more: beyond those that it has."""
    before = written(double, version) if more else [0] * SAMPLES
    wanted = [count + BETWEEN for count in before]
    await double.until(
        lambda: all(now >= most for now, most in zip(written(double, version), wanted, strict=True))
    )


def written(double: CoordinatorDouble, version: int) -> list[int]:
    versions = told(double).versions
    return [versions[1, sample].count(version) for sample in range(SAMPLES)]


def told(double: CoordinatorDouble) -> ReportedSamples:
    return ReportedSamples(double.said(LeaseProgress))


def check_tokens(double: CoordinatorDouble, versions: Path, logprob_error_max: float) -> None:
    """Every token is as likely as the version of its span says, and not as the others say."""
    torch.set_num_threads(1)
    models = [load_model(versions / str(version)) for version in range(VERSIONS)]
    for key, output in told(double).tokens.items():
        logprobs, written_by = told(double).logprobs[key], told(double).versions[key]
        assert {*written_by} == {*range(VERSIONS)}
        assert written_by == sorted(written_by)
        for version, model in enumerate(models):
            truth = score(model, PROMPT, output, 1.0)
            errors = [abs(a - b) for a, b in zip(truth, logprobs, strict=True)]
            of = [error for error, by in zip(errors, written_by, strict=True) if by == version]
            others = [error for error, by in zip(errors, written_by, strict=True) if by != version]
            assert max(of) < logprob_error_max < max(others)

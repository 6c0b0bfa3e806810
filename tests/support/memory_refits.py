"""Versions written into the memory of real servers: what the tests of SGLang and vLLM share."""

import asyncio
import copy
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from echo2d.engines.server.engine import ServerEngine
from echo2d.engines.server.memory import ServerMemory
from echo2d.engines.server.weight_update import WeightUpdate
from echo2d.errors import EngineFault
from tests.support.engine_contract import ENDLESS, SHORT, generated, running
from tests.support.engine_harness import VOCAB_SIZE, label
from tests.support.model_shapes import FAMILIES

CHECKSUM_S_MAX = 60.0
# What servers compute on a CPU, with two KV heads, one for each of two ranks.
WIDTHS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32,
    "max_position_embeddings": 16_384, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# As GPT-OSS has it; vLLM knows no other for that family.
YARN = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def write_versions(folder: Path, family: str, count: int = 3) -> list[Path]:
    """Versions of a small model of this family in float32; in each, one in a hundred words differs from the one before.

    Blocking.
    """
    changes = WIDTHS | ({"rope_parameters": YARN} if family == "gpt-oss" else {})
    config = type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), **changes})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(copy.deepcopy(config)).save_pretrained(folder / "0")
    for version in range(1, count):
        words = load_file(folder / str(version - 1) / "model.safetensors")
        for each in words.values():
            flat = each.flatten().view(torch.int32)
            flat[torch.randperm(len(flat))[: len(flat) // 100 + 1]] += 1 << 18
            each.copy_(flat.view(torch.float32).view(each.shape))
        (folder / str(version)).mkdir()
        save_file(words, folder / str(version) / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(folder / "0" / "config.json", folder / str(version))
    return [folder / str(version) for version in range(count)]


def memory_of(engine: ServerEngine) -> ServerMemory:
    return engine._serving._memory


async def checksums(engine: ServerEngine, path: str) -> Mapping[str, Any]:
    """Of all that is in the server's memory."""
    assert engine.server is not None
    ask: Any = engine.server
    status, found = await ask.ask_admin("POST", path, {"action": "checksum"}, CHECKSUM_S_MAX)
    assert status == 200, found
    return dict(found)


async def require_as_from_disk(engine: ServerEngine, versions: list[Path], path: str) -> str:
    """A version in memory has the checksums of a load from disk. Returns why it is not written into memory, if so."""
    await engine.start()
    try:
        await engine.refit(versions[0], label(0))
        if why := memory_of(engine).off:
            return why
        for number, each in enumerate(versions[1:], 1):
            await engine.refit(each, label(number))
            written = await checksums(engine, path)
            with from_disk():
                await engine.refit(each, label(number))
            assert await checksums(engine, path) == written
            assert not memory_of(engine).off
        await generated(engine, SHORT)
        return ""
    finally:
        await engine.close()


@contextmanager
def from_disk() -> Iterator[None]:
    """Refits load from disk meanwhile."""

    async def no(_: ServerMemory, __: WeightUpdate) -> bool:
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerMemory, "prepare", no)
        yield


async def require_recovery(
    engine: ServerEngine, versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing mixed is served after spoiled files, without the module, or from a killed server, and it goes on."""
    await engine.start()
    try:
        await engine.refit(versions[0], label(0))
        (socket,) = memory_of(engine)._sockets
        await _spoiled(engine, versions, monkeypatch)
        (socket,) = memory_of(engine)._sockets
        await asyncio.to_thread(socket.unlink)
        await engine.refit(versions[1], label(1))  # from disk
        await _served(engine, 1)
        assert not memory_of(engine).off
        await _killed(engine, versions, monkeypatch)
    finally:
        await engine.close()


async def _spoiled(
    engine: ServerEngine, versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files change after they were staged."""
    whole = versions[1] / "model.safetensors"
    content = await asyncio.to_thread(whole.read_bytes)
    prepare = ServerMemory.prepare

    async def rotten(self: ServerMemory, order: WeightUpdate) -> bool:
        staged = await prepare(self, order)
        await asyncio.to_thread(whole.write_bytes, content[:-64] + bytes(64))
        return staged

    async with running(engine, ENDLESS) as (output,):
        with monkeypatch.context() as patch:
            patch.setattr(ServerMemory, "prepare", rotten)
            with pytest.raises(EngineFault):
                await engine.refit(versions[1], label(1))
        assert engine.label is None
        await output.until(lambda sample: sample.finish == "abort")
    assert {name for sample in output.samples for name in sample.labels} == {label(0)}
    await asyncio.to_thread(whole.write_bytes, content)
    await engine.refit(versions[0], label(0))
    await _served(engine, 0)


async def _killed(
    engine: ServerEngine, versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that holds the weights dies while it writes."""
    assert engine.process is not None
    await engine.process.stop()
    await engine.refit(versions[1], label(1))
    (socket,) = memory_of(engine)._sockets
    call: Callable[..., Any] = type(engine).kind.updates.call_inside

    async def killed(server: Any, order: WeightUpdate | None = None) -> int:
        asyncio.get_running_loop().call_later(0.003, os.kill, int(socket.stem), signal.SIGKILL)
        return int(await call(server, order))

    async with running(engine, ENDLESS) as (output,):
        with monkeypatch.context() as patch:
            patch.setattr(type(engine).kind.updates, "call_inside", killed)
            with pytest.raises(EngineFault):
                await engine.refit(versions[2], label(2))
        assert engine.label is None
        await output.until(lambda sample: sample.finish == "abort")
    assert {name for sample in output.samples for name in sample.labels} == {label(1)}
    await engine.refit(versions[2], label(2))
    await _served(engine, 2)
    assert memory_of(engine).off, "it failed twice in a row"


async def _served(engine: ServerEngine, version: int) -> None:
    output = await generated(engine, SHORT)
    assert {name for sample in output.samples for name in sample.labels} == {label(version)}

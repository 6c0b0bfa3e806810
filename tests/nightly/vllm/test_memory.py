"""Versions written into the memory of a real vLLM server."""

import asyncio
import re
from pathlib import Path

import pytest

from echo2d.engines.server.http_client import Lost
from echo2d.engines.server.launch import Running
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.vllm.client import VllmClient
from echo2d.engines.vllm.engine import VllmEngine
from echo2d.errors import EngineFault
from tests.support.memory_refits import require_as_from_disk, require_recovery, write_versions
from tests.support.vllm_servers import launch

CHECKSUMS = "/weight_checker"
# On a CPU it packs the weights of experts when they are loaded.
PACKED = r"model\.layers\.0\.mlp\.experts\..* in memory is not that of the files"
FAMILIES = {
    "qwen3": "",
    "llama": "",
    "gemma3 with windows and a soft cap": "",
    "qwen3 moe": PACKED,
    "gpt-oss": PACKED,
}


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_version_in_memory_is_as_from_disk_bit_for_bit_or_refused(
    family: str, tmp_path: Path
) -> None:
    versions = await asyncio.to_thread(write_versions, tmp_path / "versions", family)
    engine = VllmEngine(launch(tmp_path / "server"))
    assert re.fullmatch(FAMILIES[family], await require_as_from_disk(engine, versions, CHECKSUMS))


async def test_both_ranks_of_a_split_model_are_as_from_disk(tmp_path: Path) -> None:
    versions = await asyncio.to_thread(write_versions, tmp_path / "versions", "qwen3")
    engine = VllmEngine(launch(tmp_path / "server", "--tensor-parallel-size", "2"))
    assert await require_as_from_disk(engine, versions, CHECKSUMS) == ""


async def test_nothing_mixed_is_served_after_any_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = await asyncio.to_thread(write_versions, tmp_path / "versions", "qwen3")
    await require_recovery(VllmEngine(launch(tmp_path / "server")), versions, monkeypatch)


async def test_a_server_of_ones_own_whose_load_failed_halfway_takes_no_other_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers still wait for the rest of that load, and would take words of two versions."""
    versions = await asyncio.to_thread(write_versions, tmp_path / "versions", "qwen3")
    process = ServerProcess(launch(tmp_path / "server"))
    await process.start(versions[0], "start")
    try:
        engine = VllmEngine(Running(process.url, tmp_path / "adapters", process.api_key))
        await engine.start()
        await until_served(engine, versions[0], "0-a")
        load = VllmClient.load_weights

        async def halfway(
            self: VllmClient, directory: Path, files: list[str], **limit: float
        ) -> None:
            await load(self, directory, [*files, "missing.safetensors"], **limit)

        with monkeypatch.context() as patch:
            patch.setattr(VllmClient, "load_weights", halfway)
            with pytest.raises(EngineFault, match="echo2d_load: 500"):
                await engine.refit(versions[1], "1-a")
        assert engine.label is None
        with pytest.raises(EngineFault, match="echo2d_load: 500"):
            await engine.refit(versions[1], "1-a")
        assert engine.label is None
        await engine.close()
    finally:
        await process.stop()


async def until_served(engine: VllmEngine, snapshot: Path, name: str) -> None:
    """Refit the engine once its server takes requests."""
    async with asyncio.timeout(900.0):
        while engine.label is None:
            try:
                await engine.refit(snapshot, name)
            except Lost:
                await asyncio.sleep(0.5)

"""Versions written into the memory of a real vLLM server."""

import asyncio
import re
from pathlib import Path

import pytest

from echo2d.engines.vllm.engine import VllmEngine
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

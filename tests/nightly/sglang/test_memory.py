"""Versions written into the memory of a real SGLang server."""

import asyncio
from pathlib import Path

import pytest

from echo2d.engines.sglang.engine import SglangEngine
from tests.support.memory_refits import require_as_from_disk, require_recovery, write_versions
from tests.support.sglang_servers import launch

CHECKSUMS = "/weights_checker"
# It does not run GPT-OSS on a CPU.
WRITTEN = ("qwen3", "llama", "gemma3 with windows and a soft cap", "qwen3 moe")


@pytest.mark.parametrize("family", WRITTEN)
async def test_a_version_in_memory_is_as_from_disk_bit_for_bit(family: str, tmp_path: Path) -> None:
    versions = await asyncio.to_thread(write_versions, tmp_path / "versions", family)
    assert (
        await require_as_from_disk(SglangEngine(launch(tmp_path / "server")), versions, CHECKSUMS)
        == ""
    )


async def test_both_ranks_of_a_split_model_are_as_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    versions = await asyncio.to_thread(write_versions, tmp_path / "versions", "qwen3")
    engine = SglangEngine(launch(tmp_path / "server", "--tp", "2"))
    assert await require_as_from_disk(engine, versions, CHECKSUMS) == ""


async def test_nothing_mixed_is_served_after_any_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = await asyncio.to_thread(write_versions, tmp_path / "versions", "qwen3")
    await require_recovery(SglangEngine(launch(tmp_path / "server")), versions, monkeypatch)

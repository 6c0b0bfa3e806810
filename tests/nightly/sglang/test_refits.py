"""Refits of a real server under load: every token was written by the version that is reported for it.

The time of a refit in which nothing is generated is printed (`-s`) and not judged, because it depends on the machine's
other work.
"""

import asyncio
import json
import os
import signal
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2d.engines.base import GenerateRequest
from echo2d.engines.server.launch import Running
from echo2d.engines.server.memory import ServerMemory
from echo2d.engines.server.weight_update import WeightUpdate
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.engine import SglangEngine
from echo2d.errors import EngineFault
from tests.support.engine_contract import (
    BREAKS,
    ENDLESS,
    SHORT,
    Collected,
    check_logprobs,
    generated,
    running,
)
from tests.support.engine_harness import VOCAB_SIZE, label
from tests.support.polling import HANG_S
from tests.support.processes import children, is_running
from tests.support.sglang_harness import SglangHarness
from tests.support.sglang_servers import launch

REFITS, REQUESTS = 20, 64
TOKENS = 4000  # of each request at most: none ends before the last refit
BETWEEN = 12  # tokens of every request between two refits, at least
LOGPROB_ERROR_MAX = 1e-3


@pytest.fixture
def harness(tmp_path: Path, servers: list[Running]) -> SglangHarness:
    return SglangHarness(tmp_path, servers)


async def test_tokens_keep_their_version_over_twenty_refits_with_64_long_requests(
    harness: SglangHarness, tmp_path: Path
) -> None:
    engine = harness.engine(slots=REQUESTS)
    await engine.start()
    await engine.refit(harness.snapshot(0), label(0))
    for version in range(1, REFITS + 1):
        await asyncio.to_thread(harness.snapshot, version)
    requests = [
        GenerateRequest(
            f"{number:02}", [(number * 7 + place) % VOCAB_SIZE for place in range(8)], 1, TOKENS
        )
        for number in range(REQUESTS)
    ]
    pauses: list[float] = []
    async with running(engine, *requests) as outputs:
        for version in range(1, REFITS + 1):
            pauses.append((await engine.refit(harness.snapshot(version), label(version))).pause_s)
            for output in outputs:
                await output.until(
                    lambda sample, version=version: sample.labels.count(label(version)) >= BETWEEN  # type: ignore[misc]
                )
    assert all(output.finishes() == ["abort"] for output in outputs), (
        "none was lost before it was told to end"
    )
    tokens, worst = await asyncio.to_thread(score_all, harness, outputs)
    size = (harness.snapshot(0) / "model.safetensors").stat().st_size
    ordered = sorted(pauses)
    facts = {
        "refits": REFITS, "requests": REQUESTS, "tokens": tokens, "logprob_error_max": worst, "bytes": size,
        "pause_s_median": statistics.median(ordered), "pause_s_p95": ordered[18], "pause_s_max": ordered[-1],
        "load": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(facts))  # noqa: T201 - the figures of docs/measurements/sglang.md
    assert worst < LOGPROB_ERROR_MAX
    await engine.close()


def score_all(harness: SglangHarness, outputs: list[Collected]) -> tuple[int, float]:
    """Every token under the version of its span, by one forward pass of transformers per version and output."""
    tokens, worst = 0, 0.0
    torch.set_num_threads(1)
    for output in outputs:
        (sample,) = output.samples
        assert sample.labels == sorted(sample.labels, key=lambda name: int(name.partition("-")[0]))
        for version in range(REFITS + 1):
            truth = harness.logprobs(version, output.request.prompt, sample.tokens, 1.0)
            for said, true, by in zip(sample.logprobs, truth, sample.labels, strict=True):
                if by == label(version):
                    tokens, worst = tokens + 1, max(worst, abs(said - true))
        assert {*sample.labels} == {label(version) for version in range(REFITS + 1)}
    return tokens, worst


@pytest.fixture
async def managed(tmp_path: Path) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(launch(tmp_path / "engine"), slots=8)
    await engine.start()
    yield engine
    await engine.close()


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


async def all_gone(pids: set[int]) -> None:
    """A killed server gives its memory back before it is gone, and it has gigabytes."""
    async with asyncio.timeout(HANG_S):
        while any(map(is_running, pids)):  # noqa: ASYNC110 - they are not our children: no event
            await asyncio.sleep(0.05)


async def never(_: ServerMemory, __: WeightUpdate) -> bool:
    return False


async def test_a_server_killed_in_a_refit_and_a_corrupt_file_serve_no_wrong_token(
    harness: SglangHarness, managed: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is served until a whole version is loaded from disk, whatever the server makes of it.

    Also: it is started with keys of its own, keeps a log without them, and leaves no process behind.
    """
    monkeypatch.setattr(ServerMemory, "prepare", never)
    await managed.refit(harness.snapshot(0), label(0))
    process = managed.process
    assert process is not None
    assert process._guard is not None
    pids = children(process._guard.pid)
    commands = {pid: command(pid) for pid in pids}
    server = next(pid for pid, words in commands.items() if "launch_cpu" in words)
    assert not any(
        key in words for words in commands.values() for key in (process.api_key, process.admin_key)
    )
    stranger = SglangClient(process.url)
    with pytest.raises(EngineFault, match="401"):
        await stranger.model()
    await stranger.close()
    update = SglangClient.update

    async def killed(self: SglangClient, body: Any, *, timeout_s: float) -> tuple[bool, str]:
        asyncio.get_running_loop().call_later(0.003, os.kill, server, signal.SIGKILL)
        return await update(self, body, timeout_s=timeout_s)

    async with running(managed, ENDLESS) as (output,):
        with monkeypatch.context() as patch:
            patch.setattr(SglangClient, "update", killed)
            with pytest.raises(EngineFault):
                await managed.refit(harness.snapshot(1), label(1))
        assert managed.label is None
        await output.until(lambda sample: sample.finish == "abort")
    check_logprobs(harness, output)
    assert {name for sample in output.samples for name in sample.labels} == {label(0)}
    await all_gone(pids)
    with pytest.raises(EngineFault):
        await generated(managed, SHORT)
    log = process.log.read_text()
    assert process.api_key not in log
    assert process.admin_key not in log
    await managed.refit(harness.snapshot(1), label(1))
    assert await harness.in_memory(managed) == harness.in_files(harness.snapshot(1))
    check_logprobs(harness, await generated(managed, SHORT))
    assert process.log.with_suffix(".log.1").exists(), "the log of the one before is kept"

    whole = harness.snapshot(2) / "model.safetensors"
    content = await asyncio.to_thread(whole.read_bytes)

    async def rotten(self: SglangClient, body: Any, *, timeout_s: float) -> tuple[bool, str]:
        await asyncio.to_thread(BREAKS["truncated"], harness.snapshot(2))
        return await update(self, body, timeout_s=timeout_s)

    async with running(managed, ENDLESS) as (output,):
        with monkeypatch.context() as patch:
            patch.setattr(SglangClient, "update", rotten)
            with pytest.raises(EngineFault):
                await managed.refit(harness.snapshot(2), label(2))
        assert managed.label is None
        await output.until(lambda sample: sample.finish == "abort")
    check_logprobs(harness, output)
    await asyncio.to_thread(whole.write_bytes, content)
    await managed.refit(harness.snapshot(2), label(2))
    assert await harness.in_memory(managed) == harness.in_files(harness.snapshot(2))
    check_logprobs(harness, await generated(managed, SHORT))


async def test_samples_of_one_request_share_their_prefix(harness: SglangHarness) -> None:
    engine = harness.engine()
    await engine.start()
    await engine.refit(harness.snapshot(0), label(0))
    prompt = [(place * 5) % VOCAB_SIZE for place in range(256)]
    async with running(engine, GenerateRequest("shared", prompt, 8, TOKENS)):
        call = engine._calls["shared"]
    assert call.cached_tokens >= 7 * 255
    await engine.close()

"""SGLang starts with what the learner exports, and says what transformers says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang.client import SglangClient
from echo2d.learner.__main__ import main
from tests.support.learner import config_in, learn, make_base, write_config
from tests.support.lora import OnBase
from tests.support.scripted_coordinator import ScriptedCoordinator
from tests.support.sglang_servers import launch, until_ready

PROMPT, TOKENS = [3, 1, 2, 5, 4, 9], 8


def exported(folder: Path, *, merged: bool) -> tuple[Path, Path]:
    """The base of a short run, and the export of its last step."""
    base = make_base(folder / "models", layers=2)
    (folder / "snapshots").mkdir()
    changes: dict[str, Any] = {"lora_rank": 4} if merged else {}
    config = config_in(folder, base, steps=2, lr=1e-2, warmup_steps=0, **changes)
    taken = folder / "taken"
    learn(config, OnBase(taken, base) if merged else ScriptedCoordinator(taken))
    command = ["--config", str(write_config(folder / "run.toml", config)), "--export", "last"]
    assert main([*command, str(folder / "export"), *["--merge"] * merged]) == 0
    return base, folder / "export"


async def answered(model: Path, folder: Path) -> list[tuple[float, int]]:
    """Logprobs and tokens that a server starting with this model draws greedily."""
    process = ServerProcess(launch(folder))
    await process.start(model, "start")
    try:
        await until_ready(process)
        server = SglangClient(process.url, api_key=process.api_key, admin_key=process.admin_key)
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        chunks = [chunk async for chunk in server.generate({**body, "stream": True})]
        await server.close()
    finally:
        await process.stop()
    # A chunk has the tokens since the one before.
    found = [each for chunk in chunks for each in chunk["meta_info"]["output_token_logprobs"]]
    return [(logprob, token) for logprob, token, _ in found]


def logprobs(model: Path, tokens: list[int]) -> list[float]:
    """The logprobs of the answer's tokens by transformers."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        found = loaded(torch.tensor([PROMPT + tokens])).logits[0].log_softmax(-1)
    return [float(found[len(PROMPT) - 1 + place, token]) for place, token in enumerate(tokens)]


@pytest.mark.parametrize("merged", [False, True])
async def test_a_server_starts_with_an_export(tmp_path: Path, merged: bool) -> None:
    base, export = await asyncio.to_thread(exported, tmp_path, merged=merged)
    answer = await answered(export, tmp_path / "server")
    tokens = [token for _, token in answer]
    assert len(tokens) == TOKENS
    expected = await asyncio.to_thread(logprobs, export, tokens)
    assert [logprob for logprob, _ in answer] == pytest.approx(expected, abs=1e-3)
    assert expected != pytest.approx(await asyncio.to_thread(logprobs, base, tokens), abs=1e-2)

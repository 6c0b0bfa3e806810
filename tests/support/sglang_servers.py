"""Real SGLang servers on the CPU, as tests start them."""

import asyncio
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.engine import SglangLaunch
from tests.support.paths import REPO

PYTHON = REPO / "tools" / "sglang_cpu" / "python"
# Servers that tests share would otherwise poll for requests without a pause, one core each.
FLAGS = (
    "--dtype", "float32", "--max-total-tokens", "400000", "--max-running-requests", "64", "--sleep-on-idle",
)  # fmt: skip
# A server starts in half a minute on a quiet machine; only one that hangs takes this long.
START_S_MAX = 900.0
PROMPT, TOKENS = [3, 1, 2, 5, 4, 9], 8


def launch(folder: Path, *flags: str) -> SglangLaunch:
    return SglangLaunch(PYTHON, (*FLAGS, *flags), folder, dict(os.environ))


async def until_ready(process: ServerProcess) -> None:
    server = SglangClient(process.url, api_key=process.api_key, admin_key=process.admin_key)
    try:
        async with asyncio.timeout(START_S_MAX):
            while not await server.ready():
                assert not process.ended, process.log.read_text()
                await asyncio.sleep(0.5)
    finally:
        await server.close()


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

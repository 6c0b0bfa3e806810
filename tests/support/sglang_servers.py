"""Real SGLang servers on the CPU, as tests start them."""

import asyncio
import os
from pathlib import Path

from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.launch import Launch
from tests.support.paths import REPO

PYTHON = REPO / "tools" / "sglang_cpu" / "python"
# Servers that tests share would otherwise poll for requests without a pause, one core each.
FLAGS = (
    "--dtype", "float32", "--max-total-tokens", "400000", "--max-running-requests", "64", "--sleep-on-idle",
)  # fmt: skip
# A server starts in half a minute on a quiet machine; only one that hangs takes this long.
START_S_MAX = 900.0


def launch(folder: Path, *flags: str) -> Launch:
    return Launch(PYTHON, (*FLAGS, *flags), folder, dict(os.environ))


async def until_ready(process: ServerProcess) -> None:
    server = SglangClient(process.url, api_key=process.api_key, admin_key=process.admin_key)
    try:
        async with asyncio.timeout(START_S_MAX):
            while not await server.ready():
                assert not process.ended, process.log.read_text()
                await asyncio.sleep(0.5)
    finally:
        await server.close()

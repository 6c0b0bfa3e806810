"""Starts a SGLang server on the CPU for a measurement."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from echo2d.engines.server.launch import Running
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.engine import SglangLaunch
from echo2d.errors import EngineFault

FLAGS = ("--dtype", "float32", "--max-total-tokens", "100000", "--max-running-requests", "64")
START_S_MAX = 900.0


@asynccontextmanager
async def cpu_server(python: Path, folder: Path, model: Path) -> AsyncIterator[Running]:
    """Start the server. python: the interpreter of `tools/sglang_cpu`. EngineFault: the server does not start."""
    process = ServerProcess(SglangLaunch(python, FLAGS, folder, dict(os.environ)))
    await process.start(model, "start")
    try:
        client = SglangClient(process.url, api_key=process.api_key, admin_key=process.admin_key)
        async with asyncio.timeout(START_S_MAX):
            while not await client.ready():
                if process.ended:
                    raise EngineFault(f"the server ended while it started: {process.last_words()}")
                await asyncio.sleep(0.5)
        await client.close()
        yield Running(process.url, folder, process.api_key, process.admin_key)
    finally:
        await process.stop()

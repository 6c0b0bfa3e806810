"""The SGLang engine also keeps the engine contract on a GPU, with the SGLang that is installed beside echo2d."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from echo2d.engines.base import Engine
from echo2d.engines.server.launch import Running
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang.engine import SglangLaunch
from tests.support.engine_contract import EngineContract
from tests.support.engine_harness import Harness, save_random_model, tiny_config
from tests.support.sglang_harness import SglangHarness
from tests.support.sglang_servers import FLAGS, until_ready

# The head size of the tiny model is too small for the fast kernels; float32 is what its truth is computed in.
CUDA_FLAGS = (
    *FLAGS,
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--disable-cuda-graph",
)


class CudaHarness(SglangHarness):
    """A GPU's memory is hashed by a kernel of SGLang's own, which files are not: here the logprobs alone tell."""

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        await super().in_memory(engine)
        return {}

    def in_files(self, snapshot: Path) -> Mapping[str, object]:
        return {}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cuda_servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Running]]:
    folder = tmp_path_factory.mktemp("servers")
    await asyncio.to_thread(
        save_random_model, folder / "model", tiny_config(intermediate_size=64), rng_seed=99
    )
    shares = ("--mem-fraction-static", "0.2")  # two servers on one GPU
    processes = [
        ServerProcess(
            SglangLaunch(
                Path(sys.executable), (*CUDA_FLAGS, *shares), folder / str(number), dict(os.environ)
            )
        )
        for number in range(2)
    ]
    try:
        for process in processes:
            await process.start(folder / "model", "start")
            await until_ready(process)
        yield [
            Running(each.url, folder / "adapters", each.api_key, each.admin_key)
            for each in processes
        ]
    finally:
        for process in processes:
            await process.stop()


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang with CUDA")
class TestSglangEngineOnCuda(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path, cuda_servers: list[Running]) -> Harness:
        return CudaHarness(tmp_path, cuda_servers)

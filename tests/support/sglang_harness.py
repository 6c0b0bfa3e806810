"""SGLang in the contract suite: doubles over HTTP, or real servers that are attached to by URL."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors.torch import load_file

from echo2d.adapters import base_digest
from echo2d.engines.base import AdapterBase, Engine
from echo2d.engines.fake import FakeEngine
from echo2d.engines.layout import file_tensor_digests
from echo2d.engines.server.http_client import CALL_S_MAX, Lost
from echo2d.engines.server.launch import Running
from echo2d.engines.server.weight_update import RefitMode
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.engine import SglangEngine
from echo2d.errors import EngineFault
from tests.support.engine_harness import FakeHarness, TorchHarness, save_random_model, tiny_config
from tests.support.lora import ALL_TARGETS, AdapterHarness, never_doubtful, write_adapters
from tests.support.sglang_double import SglangDouble

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class DoubleHarness(FakeHarness):
    """Each engine gets the next double, in turn."""

    def __init__(
        self, folder: Path, doubles: Sequence[SglangDouble], *, refit_mode: RefitMode = "retract"
    ) -> None:
        super().__init__(folder)
        self._next = cycle(doubles)
        self._of: dict[int, SglangDouble] = {}
        self._mode: RefitMode = refit_mode

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> SglangEngine:  # type: ignore[override]
        double = next(self._next)
        engine = SglangEngine(
            Running(double.url, self._folder / double.url.rpartition(":")[2]),
            slots=slots,
            rng_seed=rng_seed,
            refit_mode=self._mode,
        )
        self._of[id(engine)] = double
        return engine

    def snapshot(self, version: int) -> Path:
        folder = super().snapshot(version)
        (folder / "config.json").write_text(CONFIG)
        return folder

    @contextmanager
    def doubtful_refits(self, engine: Engine) -> Iterator[None]:
        self._of[id(engine)].traps.append("refuse")
        yield

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        if engine.label is None:
            raise EngineFault("nothing is served")
        return self._of[id(engine)].digests

    async def check(self, engine: Engine) -> None:
        assert isinstance(engine, SglangEngine)
        await engine.check()


class AdapterDoubleHarness(DoubleHarness):
    """Versions are the adapters that `fake_adapters` made."""

    def __init__(self, folder: Path, doubles: Sequence[SglangDouble], base: AdapterBase) -> None:
        super().__init__(folder, doubles)
        self.base = base

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> SglangEngine:  # type: ignore[override]
        engine = super().engine(slots=slots, rng_seed=rng_seed)
        engine.refit = partial(engine.refit, base=self.base)  # type: ignore[method-assign]
        return engine

    def snapshot(self, version: int) -> Path:
        return self._folder / str(version)

    def doubtful_refits(self, engine: Engine) -> NoReturn:
        never_doubtful()

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        if engine.label is None:
            raise EngineFault("nothing is served")
        return self._of[id(engine)].adapters[engine.label]


class FakeAdapterHarness(FakeHarness):
    """Versions are the adapters that `fake_adapters` made."""

    def __init__(self, folder: Path, base: AdapterBase) -> None:
        super().__init__(folder)
        self.base = base

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> FakeEngine:
        engine = super().engine(slots=slots, rng_seed=rng_seed)
        engine.refit = partial(engine.refit, base=self.base)  # type: ignore[method-assign]
        return engine

    def snapshot(self, version: int) -> Path:
        return self._folder / str(version)


def fake_adapters(
    versions: Path, targets: Sequence[str] = ("q_proj", "v_proj", "down_proj")
) -> AdapterBase:
    """Write six adapters on one base, whose layers these are. Blocking."""
    folder = versions / "base"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG)
    (folder / "tokenizer.json").write_text("{}")
    weights = {f"model.layers.0.{name}.weight": np.ones((8, 4), np.float32) for name in targets}
    save_file(weights, folder / "model.safetensors")
    base = AdapterBase(folder, base_digest(folder), file_tensor_digests(folder))
    kinds = [name.rpartition(".")[2] for name in targets]
    write_adapters(versions, base, 6, kinds)
    return base


CONFIG = '{"model_type": "fake", "vocab_size": 64, "max_position_embeddings": 16384}'


class SglangHarness(TorchHarness):
    """Real servers in float32; the weights in their memory are compared with those that transformers reads."""

    repeats = False
    logprob_error_max = 1e-3

    def __init__(
        self, folder: Path, servers: Sequence[Running], *, refit_mode: RefitMode = "retract"
    ) -> None:
        super().__init__(folder)
        self._next = cycle(servers)
        self._mode: RefitMode = refit_mode

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> SglangEngine:  # type: ignore[override]
        return SglangEngine(next(self._next), slots=slots, rng_seed=rng_seed, refit_mode=self._mode)

    def snapshot(self, version: int) -> Path:
        """A snapshot with a width that SGLang does not pad on a CPU."""
        folder = self._folder / str(version)
        if not folder.exists():
            save_random_model(folder, tiny_config(intermediate_size=64), rng_seed=version)
        return folder

    @contextmanager
    def doubtful_refits(self, engine: Engine) -> Iterator[None]:
        """The next update is done, but its answer is lost."""
        update, inside = SglangClient.update, SglangClient.call_inside

        async def lost(
            server: SglangClient, body: Mapping[str, Any], *, timeout_s: float
        ) -> tuple[bool, str]:
            await update(server, body, timeout_s=timeout_s)
            raise Lost("told to be")

        async def lost_inside(
            server: SglangClient, body: Mapping[str, Any], *, timeout_s: float
        ) -> int:
            await inside(server, body, timeout_s=timeout_s)
            raise Lost("told to be")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SglangClient, "update", lost)
            patch.setattr(SglangClient, "call_inside", lost_inside)
            yield

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        """Checksums of the first rank, with SGLang's own names and hash."""
        assert isinstance(engine, SglangEngine)
        if engine.label is None or engine.server is None:
            raise EngineFault("nothing is served")
        ask = ("POST", "/weights_checker", {"action": "checksum"}, CALL_S_MAX)
        assert isinstance(engine.server, SglangClient)
        status, answer = await engine.server.ask_admin(*ask)
        assert status == HTTPStatus.OK, answer
        return dict(answer["ranks"][0]["checksums"])

    def in_files(self, snapshot: Path) -> Mapping[str, object]:
        """SGLang's checksums of float32 tensors on a CPU. Tensors of a layer that it computes together are joined."""
        tensors = load_file(snapshot / "model.safetensors")
        joined: dict[str, list[np.ndarray[Any, Any]]] = {}
        for name in sorted(tensors, key=_place):
            fused = next(
                (whole for whole, parts in FUSED.items() for part in parts if f".{part}." in name),
                None,
            )
            part = name.split(".")[-2]
            joined.setdefault(name.replace(part, fused) if fused else name, []).append(
                tensors[name].float().numpy()
            )
        return {
            name: sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]
            for name, parts in joined.items()
        }

    async def check(self, engine: Engine) -> None:
        assert isinstance(engine, SglangEngine)
        await engine.check()


class SglangAdapterHarness(AdapterHarness):
    """Adapters on real servers, which do not give their weights back."""

    repeats = False

    def __init__(self, folder: Path, servers: Sequence[Running], **changes: Any) -> None:
        super().__init__(folder, ALL_TARGETS, **changes)
        self._next = cycle(servers)

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> SglangEngine:  # type: ignore[override]
        engine = SglangEngine(next(self._next), slots=slots, rng_seed=rng_seed)
        engine.refit = partial(engine.refit, base=self.base)  # type: ignore[method-assign]
        return engine

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        return {"of": await served_version(engine)}

    def in_files(self, snapshot: Path) -> Mapping[str, object]:
        return {"of": snapshot.name}

    async def check(self, engine: Engine) -> None:
        assert isinstance(engine, SglangEngine)
        await engine.check()


async def served_version(engine: Engine) -> str:
    """The version of the label, for servers that do not give their weights back. EngineFault: nothing is served."""
    assert await engine.tensor_digests() is None
    assert engine.label is not None
    return engine.label.partition("-")[0]


def _place(name: str) -> tuple[str, int]:
    """Parts of a joined tensor in SGLang's order."""
    parts = [part for parts in FUSED.values() for part in parts]
    return name.rpartition(".self_attn")[0], next(
        (parts.index(part) for part in parts if f".{part}." in name), -1
    )

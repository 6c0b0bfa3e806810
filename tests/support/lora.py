"""LoRA adapters on the tiny models of the engine harness, and the truth about them: base and adapter merged."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2d.adapters import base_digest, pin_base
from echo2d.engines.base import AdapterBase, Engine
from echo2d.engines.layout import file_tensor_digests
from echo2d.engines.torch_engine import TorchEngine
from echo2d.learner.model.load import load_model as load_float32
from tests.support.engine_harness import TorchHarness, load_model, save_random_model, tiny_config
from tests.support.scripted_coordinator import ScriptedCoordinator

RANK, ALPHA = 4, 8.0
NARROW, NARROW_RANK = (
    4,
    2,
)  # the version that has another rank, and not the last of the layers' kinds
TARGETS = ("q_proj", "down_proj")
# With TARGETS, SGLang 0.5.23 would lack v_proj.
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
BASE_SEED = 1000


def make_base(folder: Path, *, rng_seed: int = BASE_SEED, **changes: Any) -> AdapterBase:
    save_random_model(folder, tiny_config(**changes), rng_seed=rng_seed)
    return AdapterBase(folder, base_digest(folder), file_tensor_digests(folder))


def write_adapter(
    folder: Path,
    base: AdapterBase,
    *,
    rng_seed: int,
    targets: Sequence[str] = TARGETS,
    rank: int = RANK,
    **changes: Any,
) -> Path:
    """Write a random adapter that changes the model strongly. targets: of its layers. changes: of its configuration."""
    folder.mkdir(parents=True)
    torch.manual_seed(rng_seed)
    tensors = {}
    for name, weight in load_file(base.directory / "model.safetensors").items():
        if name.split(".")[-2] in targets:
            layer = PREFIX + name.removesuffix(".weight")
            tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, weight.shape[1]).bfloat16() * 0.3
            tensors[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], rank).bfloat16() * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": list(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    pin_base(folder, base.digest)
    return folder


def write_adapters(
    folder: Path, base: AdapterBase, count: int, targets: Sequence[str] = TARGETS
) -> None:
    """Write adapters 0 to `count` - 1, each into a directory of its own."""
    for version in range(count):
        own = {"targets": targets, "rank": RANK}
        if version == NARROW:
            own = {"targets": targets[:-1] or targets, "rank": NARROW_RANK}
        write_adapter(folder / str(version), base, rng_seed=version, **own)  # type: ignore[arg-type]


def merge(model: Any, adapter: Path) -> Any:
    """The model with W + alpha / r * B A in place of W."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        share = tensors[f"{layer}.lora_B.weight"].float() @ tensors[name].float()
        model.get_submodule(layer.removeprefix(PREFIX)).weight.data += (
            config["lora_alpha"] / config["r"] * share
        )
    return model


class OnBase(ScriptedCoordinator):
    """Its policy is the base merged with the adapter that was published."""

    def __init__(self, root: Path, base: Path) -> None:
        super().__init__(root)
        self._base = base

    def load(self, directory: Path) -> Any:
        return merge(load_float32(self._base), directory)


class AdapterHarness(TorchHarness):
    """Versions 0 to NARROW are adapters on one base, made in advance, because the code that pins it may not block."""

    def __init__(self, folder: Path, targets: Sequence[str] = TARGETS, **changes: Any) -> None:
        """changes: of the base's configuration."""
        super().__init__(folder)
        self.base = make_base(folder / "base", **changes)
        write_adapters(folder, self.base, NARROW + 1, targets)

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> TorchEngine:
        engine = super().engine(slots=slots, rng_seed=rng_seed)
        engine.refit = partial(engine.refit, base=self.base)  # type: ignore[method-assign]
        return engine

    def snapshot(self, version: int) -> Path:
        return self._folder / str(version)

    def doubtful_refits(self, engine: Engine) -> NoReturn:
        never_doubtful()

    def _truth(self, version: int) -> Any:
        return merge(load_model(self.base.directory), self.snapshot(version))


def never_doubtful() -> NoReturn:
    """Skip the row of the contract about refits that leave the weights in doubt, for servers with adapters."""
    pytest.skip("an adapter that is not loaded leaves the one before it served")


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """The content of a JSON file, which is written back at the end."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))

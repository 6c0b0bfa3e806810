"""What the contract suite needs around an engine: snapshots of several versions, and the truth about each token.

A new engine adds one `Harness` here and one subclass of `EngineContract` beside the others.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from echo2d.engines.base import Engine
from echo2d.engines.fake import FakeEngine, FakePolicy, fake_logprob
from echo2d.engines.layout import SnapshotLayout, file_tensor_digests
from echo2d.engines.torch_engine import TorchEngine
from echo2d.engines.torch_engine.policy import InferencePolicy

VOCAB_SIZE = 64
CONTEXT_MAX = 16_384  # so long that a request goes on until the test ends it


class Harness(Protocol):
    """Version n has the name `label(n)` and the folder `snapshot(n)`; no version ends a sample by itself.

    repeats: the same seed gives the same tokens to an engine that does nothing else.
    logprob_error_max: how far its logprobs may be from the truth.
    """

    repeats: bool
    logprob_error_max: float

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> Engine: ...

    def snapshot(self, version: int) -> Path: ...

    def logprobs(
        self, version: int, prompt: Sequence[int], output: Sequence[int], temperature: float
    ) -> list[float]:
        """The logprob of each output token if this version had written all of them."""

    def doubtful_refits(self, engine: Engine) -> AbstractContextManager[None]:
        """The next refit in this context fails, and the engine cannot know which weights it has."""

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        """The weights in the engine's memory, comparable with `in_files`. EngineFault: it has none."""

    def in_files(self, snapshot: Path) -> Mapping[str, object]:
        """The weights that an engine has in memory when it has loaded these files."""

    async def check(self, engine: Engine) -> None:
        """Assert what the engine can assert about itself."""


class _Digests:
    """The part of a harness for an engine that reads its memory back."""

    repeats = True
    logprob_error_max = 1e-3

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        digests = await engine.tensor_digests()
        assert digests is not None
        return digests

    def in_files(self, snapshot: Path) -> Mapping[str, object]:
        return file_tensor_digests(snapshot)


def label(version: int) -> str:
    return f"{version}-{version:012x}"


class FakeHarness(_Digests):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> FakeEngine:
        endless = (CONTEXT_MAX, CONTEXT_MAX)
        return FakeEngine(
            FakePolicy(
                rng_seed=rng_seed,
                vocab_size=VOCAB_SIZE,
                eos_token_id=VOCAB_SIZE,
                answer_tokens=endless,
            ),
            slots=slots,
        )

    def snapshot(self, version: int) -> Path:
        folder = self._folder / str(version)
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps({"model_type": "fake"}))
            numbers = np.random.default_rng(version)
            tensors = {
                name: numbers.random((8, 4), dtype=np.float32)
                for name in ("embed.weight", "norm.weight")
            }
            save_file(tensors, folder / "model.safetensors")
        return folder

    def logprobs(
        self, version: int, prompt: Sequence[int], output: Sequence[int], temperature: float
    ) -> list[float]:
        context = [*prompt, *output]
        places = range(len(prompt), len(context))
        return [fake_logprob(label(version), context[:place], context[place]) for place in places]

    @contextmanager
    def doubtful_refits(self, engine: Engine) -> Iterator[None]:
        assert isinstance(engine, FakeEngine)
        engine._outcomes.append("doubtful")
        yield

    async def check(self, engine: Engine) -> None:
        """Check nothing: its requests are consistent by construction."""


class TorchHarness(_Digests):
    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        self._folder = folder
        self._device = device
        self._models: dict[int, Any] = {}

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> TorchEngine:
        return TorchEngine(device=self._device, slots_max=slots, rng_seed=rng_seed, threads=1)

    def snapshot(self, version: int) -> Path:
        folder = self._folder / str(version)
        if not folder.exists():
            save_random_model(folder, tiny_config(), rng_seed=version)
        return folder

    def logprobs(
        self, version: int, prompt: Sequence[int], output: Sequence[int], temperature: float
    ) -> list[float]:
        if version not in self._models:
            self._models[version] = self._truth(version)
        return score(self._models[version], prompt, output, temperature)

    def _truth(self, version: int) -> Any:
        return load_model(self.snapshot(version))

    @contextmanager
    def doubtful_refits(self, engine: Engine) -> Iterator[None]:
        """The device is lost when half of the weights have been written."""

        def half(
            policy: InferencePolicy, tensors: Mapping[str, Tensor], layout: SnapshotLayout
        ) -> None:
            names = sorted(tensors)
            for name in names[: len(names) // 2]:
                policy._state[name].copy_(tensors[name])
            raise RuntimeError("device lost")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InferencePolicy, "copy", half)
            yield

    async def check(self, engine: Engine) -> None:
        assert isinstance(engine, TorchEngine)
        await engine.check()


class Int8Harness(TorchHarness):
    """The torch engine in int8. Memory and files are compared as the numbers that the layers hold.

    Errors of float32 decide to which of two levels an activation half-way between them is rounded.
    """

    logprob_error_max = 0.2

    def engine(self, *, slots: int = 64, rng_seed: int = 0) -> TorchEngine:
        return TorchEngine(slots_max=slots, rng_seed=rng_seed, threads=1, quantization="int8")

    def _truth(self, version: int) -> Any:
        model = super()._truth(version)
        for path, layer in list(model.named_modules()):
            if isinstance(layer, torch.nn.Linear):
                model.set_submodule(path, RoundedLinear(layer.weight))
        return model

    async def in_memory(self, engine: Engine) -> Mapping[str, object]:
        assert isinstance(engine, TorchEngine)
        assert engine._decoder is not None
        assert await engine.tensor_digests() is None, "the files' numbers are not in memory"
        policy = engine._decoder.policy
        assert policy is not None
        return {
            name: (layer.weight.float() * layer.scales[:, None]).tolist()
            for name, layers in policy._int8.items()
            for layer in layers
        }

    def in_files(self, snapshot: Path) -> Mapping[str, object]:
        model = load_model(snapshot)
        held = {
            f"{path}.weight": rounded_rows(layer.weight.detach()).tolist()
            for path, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear)
        }
        # The output layer's weight is the embedding's.
        return {**held, "model.embed_tokens.weight": held["lm_head.weight"]}


class RoundedLinear(torch.nn.Module):
    """What an int8 layer computes, in float64 and without integers."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._rounded = rounded_rows(weight.detach()).double()

    def forward(self, states: Tensor) -> Tensor:
        return (rounded_rows(states).double() @ self._rounded.T).to(states.dtype)


def rounded_rows(rows: Tensor) -> Tensor:
    """The rows with each number rounded to one of 255 levels, the highest of which is the row's largest number."""
    step = rows.float().abs().amax(dim=-1, keepdim=True) / 127
    return (rows.float() / step).round() * step


def tiny_config(**changes: object) -> Any:
    """A random Qwen3 whose versions differ strongly; it has no end token."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT_MAX,
        "tie_word_embeddings": True, "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    return Qwen3Config(**settings | changes)


def save_random_model(
    folder: Path, config: Any, *, rng_seed: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rng_seed)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def load_model(snapshot: Path) -> Any:
    """As transformers itself loads it, in float32 on the CPU."""
    return AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32).eval()


@torch.no_grad()
def score(
    model: Any, prompt: Sequence[int], output: Sequence[int], temperature: float
) -> list[float]:
    """Logprob of each output token by one full forward pass; temperature 0 is scored at 1."""
    logits = model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)[len(prompt) - 1 : -1]
    chosen: list[float] = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
    return chosen

"""Small mixtures of experts, and what an engine writes with them."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from echo2d.core.protocol.columns import join_columns
from echo2d.core.protocol.experts import EXPERTS
from echo2d.engines.base import GenerateRequest
from echo2d.engines.torch_engine import TorchEngine
from tests.support.engine_contract import generated
from tests.support.engine_harness import label
from tests.support.model_shapes import FAMILIES

# As many experts as Qwen3-30B-A3B has.
MANY: dict[str, Any] = {"num_local_experts": 128, "num_experts_per_tok": 8}
FEW: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}


def mixture(directory: Path, family: str, tokenizer: Path, **changes: Any) -> Path:
    """A model whose layers matter beside what passes them by: its matrices are 8 times as large as at the start."""
    facts = {**FAMILIES[family].to_dict(), "vocab_size": 17, "num_hidden_layers": 4, **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        type(FAMILIES[family])(**{**facts, "layer_types": None, "norm_topk_prob": True})
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.ndim > 1 else 1.0)
    model.to(torch.bfloat16).save_pretrained(directory)
    shutil.copy(tokenizer / "tokenizer.json", directory)
    return directory


async def written(
    model: Path, dtype: str, prompt: Sequence[int], samples: int, tokens: int
) -> list[tuple[Any, ...]]:
    """The tokens, the logprobs and the experts of samples that an engine writes."""
    engine = TorchEngine(device="cpu", slots_max=samples, rng_seed=0, threads=1, dtype=dtype)
    await engine.start()
    try:
        await engine.refit(model, label(7))
        request = GenerateRequest(
            "r", prompt, samples, tokens, rng_seeds=range(samples), columns=[EXPERTS]
        )
        found = await generated(engine, request)
    finally:
        await engine.close()
    return [
        (sample.tokens, sample.logprobs, *(each.array for each in join_columns(sample.columns)))
        for sample in found.samples
    ]

"""Small models with random weights, one of each family that the learner can train, and answers for them."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from echo2d.learner.batch.packing import PackedAnswer

PROMPT = 7
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Models that can read answers in pieces, by name.
SHAPES = {
    "qwen3": Qwen3Config(**SMALL),
    "llama": LlamaConfig(**SMALL),
    "mistral with a window": MistralConfig(**SMALL, sliding_window=5),
    "gemma3 with windows and a soft cap": Gemma3TextConfig(
        **SMALL,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=3.0,
    ),
    "granite with scaled logits": GraniteConfig(**SMALL, logits_scaling=7.0),
    "cohere with scaled logits": CohereConfig(**SMALL, logit_scale=0.3),
    "qwen3 moe": Qwen3MoeConfig(**SMALL, **MOE, num_experts=4),
    "mixtral": MixtralConfig(**SMALL, num_experts_per_tok=2, num_local_experts=4),
}


GPT_OSS = GptOssConfig(
    **{**SMALL, "num_hidden_layers": 2},
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=4,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
FAMILIES = {**SHAPES, "gpt-oss": GPT_OSS}
# Widths that SGLang does not pad on a CPU, and no end token.
FOR_SGLANG: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


def made(config: Any) -> Any:
    torch.manual_seed(0)
    # A model keeps its config, and a test may change it.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0)  # so that the output depends strongly on the prompt
    return model


def answers(vocabulary: int) -> list[PackedAnswer]:
    """Six answers to two prompts."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocabulary, PROMPT, dtype=np.int32) for _ in range(2)]
    return [
        PackedAnswer(
            index % 2,
            index,
            np.concatenate(
                [prompts[index % 2], rng.integers(0, vocabulary, length, dtype=np.int32)]
            ),
            np.arange(PROMPT + length) >= PROMPT,
            np.zeros(length, dtype=np.float32),
            np.zeros(length, dtype=np.int64),
            np.float32(index),
            temperature=0.7,
            prompt=PROMPT,
        )
        for index, length in enumerate((9, 4, 1, 7, 12, 5))
    ]


def saved(directory: Path, family: str, tokenizer: Path, **changes: Any) -> Path:
    """A model of this family with the demo's vocabulary, in bfloat16, as transformers saves it.

    changes: of its configuration.
    """
    config = type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), "vocab_size": 17, **changes})
    made(config).to(torch.bfloat16).save_pretrained(directory)
    shutil.copy(tokenizer / "tokenizer.json", directory)
    return directory

"""A small model directory with real bf16 safetensors, for tests of stores."""

import json
from pathlib import Path

import numpy as np


def write_snapshot(
    directory: Path, *, weight_bytes: int = 1 << 16, rng_seed: int = 0, shards: int = 2
) -> Path:
    """config.json, tokenizer.json, a chat template in a folder, and `shards` safetensors of normal bf16 weights."""
    (directory / "extra").mkdir(parents=True)
    (directory / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "extra" / "chat_template.jinja").write_text("{{ messages }}")
    rng = np.random.default_rng(rng_seed)
    for shard in range(shards):
        words = weight_bytes // shards // 2
        values = rng.standard_normal(words, dtype=np.float32) * np.float32(0.02)
        data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        tensor = {"dtype": "BF16", "shape": [words], "data_offsets": [0, len(data)]}
        header = json.dumps({f"layer.{shard}": tensor}).encode()
        (directory / f"model-{shard}.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + data
        )
    return directory

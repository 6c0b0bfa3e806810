"""Writes the directory of a model with any weights."""

import json
from collections.abc import Iterable
from pathlib import Path


def write_model(directory: Path, shards: Iterable[bytes | memoryview]) -> Path:
    """Write config.json, tokenizer.json, and a file with one bf16 tensor for each shard."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    for shard, data in enumerate(shards):
        size = memoryview(data).nbytes
        tensor = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
        header = json.dumps({f"layer.{shard}": tensor}).encode()
        with (directory / f"model-{shard}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.write(data)
    return directory

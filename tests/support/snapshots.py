"""A small model directory with real bf16 safetensors, for tests of stores."""

from pathlib import Path

import numpy as np

from echo2d.testing.snapshots import write_model


def write_snapshot(
    directory: Path, *, weight_bytes: int = 1 << 16, rng_seed: int = 0, shards: int = 2
) -> Path:
    """config.json, tokenizer.json, a chat template in a folder, and `shards` safetensors of normal bf16 weights."""
    rng = np.random.default_rng(rng_seed)
    words = weight_bytes // shards // 2
    normal = (rng.standard_normal(words, dtype=np.float32) for _ in range(shards))
    write_model(
        directory,
        (
            ((values * np.float32(0.02)).view(np.uint32) >> 16).astype("<u2").tobytes()
            for values in normal
        ),
    )
    (directory / "extra").mkdir()
    (directory / "extra" / "chat_template.jinja").write_text("{{ messages }}")
    return directory

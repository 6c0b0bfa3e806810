"""A small model directory with real bf16 safetensors, for tests of stores."""

import os
from pathlib import Path

import numpy as np

from echo2d.store.disk import opened
from echo2d_lab.standins.snapshots import write_model


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


def in_page_cache(path: Path) -> bool:
    """Whether the first byte can be read without the disk; False too if the kernel does not tell."""
    with opened(path, os.O_RDONLY) as fd:
        try:
            return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except OSError:
            return False

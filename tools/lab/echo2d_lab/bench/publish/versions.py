"""Versions of a synthetic model, of any size, that change as training with AdamW changes bf16 weights.

The master weights are float32, and each step moves all of them by the same amount, up or down. Only a few
bf16 words change: those of small weights. The amount is chosen so that the wanted share of all words
changes. The weights of one block are repeated until the snapshot has its size; no chunk is encoded with
the help of another one. The functions block.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo2d.client import build_manifest

# A block is larger than the CPU caches, and can be drawn quickly.
BLOCK_WORDS = 16 << 20
FILE_BYTES_MAX = 2 << 30
SPREAD = 0.02  # standard deviation, as in trained models

Floats = NDArray[np.float32]


class MadeUpVersions:
    """Consecutive versions; size: bytes of the weights. changed: the share of the words that change."""

    def __init__(self, size: int, changed: float, rng_seed: int) -> None:
        self._rng = np.random.default_rng(rng_seed)
        self._size = size // 2 * 2
        block = min(BLOCK_WORDS, self._size // 2)
        drawn = self._rng.standard_normal(block, dtype=np.float32) * np.float32(SPREAD)
        # A master weight may be anywhere in the interval that is rounded to its bf16 value.
        self._master = drawn
        self._step = self._step_for(changed)

    def write(self, directory: Path) -> bytes:
        """Write the next version into a new directory. Returns its manifest."""
        self._master = self._moved(self._step)
        directory.mkdir(parents=True)
        (directory / "config.json").write_bytes(_CONFIG)
        (directory / "tokenizer.json").write_bytes(_TOKENIZER)
        words = _bf16(self._master)
        for index, start in enumerate(range(0, self._size, FILE_BYTES_MAX)):
            size = min(FILE_BYTES_MAX, self._size - start)
            tensor = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
            text = json.dumps({f"layer.{index}": tensor}).encode()
            with (directory / f"model-{index:05}.safetensors").open("wb") as file:
                file.writelines([len(text).to_bytes(8, "little"), text, *_repeated(words, size)])
        return build_manifest(directory).encode()

    def _moved(self, step: float) -> Floats:
        signs = self._rng.integers(0, 2, self._master.size, dtype=np.int8) * 2 - 1
        moved: Floats = self._master + signs * np.float32(step)
        return moved

    def _step_for(self, changed: float) -> float:
        """The step with which the wanted share of words changes, by bisection: larger steps change more words."""
        low, high, before = 0.0, SPREAD, _bf16(self._master)
        for _ in range(20):
            middle = (low + high) / 2
            share = np.count_nonzero(_bf16(self._moved(middle)) != before) / before.size
            low, high = (middle, high) if share < changed else (low, middle)
        return high


def _bf16(master: Floats) -> NDArray[np.uint16]:
    """The weights in bf16, rounded to nearest, ties to even."""
    bits = master.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def _repeated(words: NDArray[np.uint16], size: int) -> Iterator[memoryview]:
    block = words.view(np.uint8).data
    for start in range(0, size, len(block)):
        yield block[: size - start]


_CONFIG = b'{"architectures": ["Qwen3ForCausalLM"]}'
_TOKENIZER = b'{"version": "1.0"}'

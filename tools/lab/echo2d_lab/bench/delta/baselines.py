"""Encodings of a chunk against its base in other projects, for comparison: one zstd frame each, no digests.

name          what is compressed
xor           new XOR base (slime, SkyRL)
index-value   the distances from one changed word to the next, and the new words (grail)
zstd          the new chunk alone
"""

from collections.abc import Callable, Mapping

import numpy as np

from echo2d.core.base.zstd import compress


def _xor(new: bytes, base: bytes) -> bytes:
    return compress((_array(new, "u1") ^ _array(base, "u1")).data)


def _index_value(new: bytes, base: bytes) -> bytes:
    """A distance of 65,535 or more makes all distances 32 bits wide; an odd last byte is appended."""
    whole = len(new) // 2 * 2
    words = _array(new[:whole], "<u2")
    changed = np.flatnonzero(words != _array(base[:whole], "<u2"))
    gaps = np.diff(changed, prepend=-1) - 1
    width = np.uint16 if gaps.max(initial=0) < 1 << 16 else np.uint32
    return compress(gaps.astype(width).tobytes() + words[changed].tobytes() + new[whole:])


def _zstd(new: bytes, base: bytes) -> bytes:  # noqa: ARG001 - called like the others
    return compress(new)


def _array(data: bytes, kind: str) -> np.ndarray:
    return np.frombuffer(data, dtype=kind)


RIVALS: Mapping[str, Callable[[bytes, bytes], bytes]] = {
    "xor": _xor,
    "index-value": _index_value,
    "zstd": _zstd,
}

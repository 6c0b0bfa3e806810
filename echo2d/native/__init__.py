"""The loops of the delta codec in C (`words.c`), if they could be compiled.

    avx512, avx2, plain    the same C for different CPUs; the best one that this CPU can run is chosen
    numpy                  the code in `core/weights`, which gives the same bytes; used without C

The choice holds for the whole process. Tests and benchmarks change it with `using`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

try:
    from echo2d.native import _words
except ImportError:  # installed without a compiler
    if not TYPE_CHECKING:
        _words = None

BytesLike = bytes | bytearray | memoryview
CodecName = Literal["numpy", "plain", "avx2", "avx512"]
CODECS: tuple[CodecName, ...] = ("numpy", "plain", "avx2", "avx512")  # the slowest first


@dataclass(frozen=True, slots=True)
class Loops:
    """The compiled loops at one level. A method that decodes returns None, or why the payload is wrong."""

    level: int

    def encode_sparse(
        self, new: BytesLike, base: BytesLike, changes_max: int, *, split: bool
    ) -> tuple[tuple[bytes, bytes, bytes, bytes], bytes] | None:
        """Return the columns gaps, codes, small and large, and the payload of mode split, which is empty
        unless `split`. None: more than changes_max words changed.
        """
        return _words.encode_sparse(new, base, changes_max, split, self.level)

    def encode_dense(self, new: BytesLike, base: BytesLike) -> tuple[bytes, bytes, bytes]:
        """Return the columns codes, small and large."""
        return _words.encode_dense(new, base)

    def count_escaped(self, codes: BytesLike, count: int) -> int:
        """Return how many of the first `count` codes are 3."""
        return _words.count_escaped(codes, count)

    def decode_sparse(
        self,
        chunk: BytesLike,
        gaps: BytesLike,
        codes: BytesLike,
        small: BytesLike,
        large: BytesLike,
    ) -> str | None:
        """Apply a sparse chunk to its base, in place."""
        return _words.decode_sparse(chunk, gaps, codes, small, large)

    def decode_dense(
        self, chunk: BytesLike, codes: BytesLike, small: BytesLike, large: BytesLike
    ) -> str | None:
        """Apply a dense chunk to its base, in place."""
        return _words.decode_dense(chunk, codes, small, large)

    def decode_split(self, chunk: BytesLike, payload: BytesLike, changes_max: int) -> str | None:
        """Apply a split chunk to its base, in place. payload: without an odd last byte."""
        return _words.decode_split(chunk, payload, changes_max, self.level)

    def part_planes(self, new: BytesLike, high: BytesLike, low: BytesLike) -> None:
        """Write the planes of mode full."""
        _words.part_planes(new, high, low, self.level)

    def join_planes(self, new: BytesLike, high: BytesLike, low: BytesLike) -> None:
        """Write the chunk that has these planes."""
        _words.join_planes(new, high, low, self.level)


def available() -> tuple[CodecName, ...]:
    """The codecs that this installation and this CPU have, the slowest first."""
    return CODECS[:1] if _words is None else CODECS[: _words.best_level() + 2]


_chosen: CodecName = available()[-1]


def codec() -> CodecName:
    """The codec in use."""
    return _chosen


def loops() -> Loops | None:
    """The compiled loops in use; None: numpy is used."""
    return None if _chosen == "numpy" else Loops(CODECS.index(_chosen) - 1)


def free_memory() -> None:
    """Free the memory that the loops keep for their next call: a few megabytes a thread."""
    if _words is not None:
        _words.free_memory()


@contextmanager
def using(wanted: CodecName) -> Iterator[None]:
    """Use another of the available codecs, in all threads."""
    global _chosen
    assert wanted in available()
    before, _chosen = _chosen, wanted
    try:
        yield
    finally:
        _chosen = before

"""The random numbers that decide which tokens a sample gets.

The coordinator chooses one seed per sample: a keyed hash, so that no worker can predict it before
the lease is granted. The seed is the same for every attempt, after a handover and after a restart.
Token i of an answer is drawn with `uniforms(seed, i)` alone. i counts from the answer's first
token, across all leases of the sample. So a prompt has one right answer under given weights, and
anyone with the seed and the weights can check it.
"""

from collections.abc import Iterable

import numpy as np
from blake3 import blake3
from numpy.typing import ArrayLike, NDArray

from echo2d.core.base.ids import GroupId

SEED_BITS = 63  # what a message carries as an integer
SGLANG_SEED_MASK = 0x7FFFFFFF  # SGLang 0.5.19 takes 31 bits of a seed
SEED_KEY_BYTES = 32

# The constants of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
# OOPSLA 2014; the finalizer is Stafford's mix 13).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = (np.uint64(bits) for bits in (30, 27, 31, 11))


def seed_key(run_key: bytes) -> bytes:
    """The key of a run's seeds, derived from the run's private key, which it does not reveal."""
    return blake3(run_key, derive_key_context="echo2d 2026-11 seeds of samples").digest(
        SEED_KEY_BYTES
    )


def sample_seeds(key: bytes, group: GroupId, samples: Iterable[int]) -> tuple[int, ...]:
    """The seeds of these samples of a group: SEED_BITS bits each."""
    seeds = []
    for sample in samples:
        digest = blake3(b"%d %d" % (group, sample), key=key).digest(8)
        seeds.append(int.from_bytes(digest, "little") >> (64 - SEED_BITS))
    return tuple(seeds)


def episode_seed(key: bytes, group: GroupId, sample: int) -> int:
    """The seed of a sample's environment: SEED_BITS bits, which the sample's own seed does not reveal."""
    digest = blake3(b"episode %d %d" % (group, sample), key=key).digest(8)
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def uniforms(seeds: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each seed and position: both [n], or one of them a number."""
    # Arrays wrap around at 2^64 silently, as this needs; scalars would warn.
    begun = _mixed(np.atleast_1d(np.asarray(seeds, dtype=np.uint64)))
    steps = (np.atleast_1d(np.asarray(positions, dtype=np.uint64)) + np.uint64(1)) * _STEP
    numbers: NDArray[np.float64] = (_mixed(begun + steps) >> _S11) * np.float64(2.0**-53)
    return numbers


class Uniforms:
    """Draws the numbers of one seed in order, from a position on."""

    __slots__ = ("_block", "_next", "_seed")

    def __init__(self, seed: int, position: int = 0) -> None:
        self._seed = seed
        self._next = position
        self._block: list[float] = []

    def draw(self) -> float:
        if not self._block:
            # 64 numbers are computed at once: one alone takes as long as fifty.
            end = self._next + 64
            self._block = uniforms(self._seed, np.arange(self._next, end)).tolist()[::-1]
            self._next = end
        return self._block.pop()


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> _S30)) * _FIRST
    words = (words ^ (words >> _S27)) * _SECOND
    return words ^ (words >> _S31)

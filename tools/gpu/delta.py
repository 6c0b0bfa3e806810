"""Time a sparse delta between two versions of an 8B model that is applied on the GPU, in place.

A delta has, for each tensor, the distances between its changed words (int16) and a word for each of them: the new word
(overwrite), or the bits that change (xor). At a learning rate of 1e-6 a train step changes 0.34 % of an 8B model's
words. A checksum is the sum of all words in groups of four, as integers of 64 bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.gpu.rows import Row, device, on_gpu, seconds

CHANGED = 0.0034
# The shapes of Qwen3-8B: 36 layers of projections and norms, embedding, head and the last norm.
LAYER = (
    [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(12_288, 4096)] * 3 + [(128,)] * 2 + [(4096,)] * 2
)
OTHERS = [(151_936, 4096)] * 2 + [(4096,)]


@dataclass(frozen=True, slots=True)
class SparseDelta:
    """The changed words of all tensors, one tensor after the other."""

    distances: Tensor  # [n] int16, each from the changed word before it, or from the tensor's begin
    bits: Tensor  # [n] int16
    counts: list[int]  # of each tensor

    def on(self, place: torch.device) -> "SparseDelta":
        """The delta in the memory of a device."""
        distances, bits = (
            each.to(place, non_blocking=True) for each in (self.distances, self.bits)
        )
        return SparseDelta(distances, bits, self.counts)

    def tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the places of the changed words of each tensor, and their bits."""
        distances, bits = (torch.split(each, self.counts) for each in (self.distances, self.bits))
        for distance, bit in zip(distances, bits, strict=True):
            yield distance.cumsum(0) - 1, bit


def apply_delta(words: Sequence[Tensor], delta: SparseDelta, *, xor: bool) -> None:
    """Change flat tensors of int16 in place. The delta may still be on the host."""
    for each, (places, bits) in zip(words, delta.on(words[0].device).tensors(), strict=True):
        each.index_copy_(0, places, each.index_select(0, places) ^ bits if xor else bits)


def checksum(words: Sequence[Tensor]) -> Tensor:
    """The sum of all words, four at a time."""
    return torch.stack([each.view(torch.int64).sum() for each in words]).sum()


def deltas(*, small: bool) -> Iterator[Row]:
    """Section E."""
    shapes = (LAYER * (1 if small else 36)) + OTHERS
    # Tensors of a multiple of four words.
    sizes = [max(64, torch.Size(shape).numel() // (1024 if small else 1)) for shape in shapes]
    dice = torch.Generator(device()).manual_seed(0)
    words = [torch.zeros(size, dtype=torch.int16, device=device()) for size in sizes]
    for each in words:
        each.random_(generator=dice)
    delta = _delta(sizes, dice)
    size, changed = delta.distances.nbytes + delta.bits.nbytes, len(delta.bits)
    copied_ms = seconds(lambda: delta.on(device())) * 1e3
    summed_ms = seconds(lambda: checksum(words)) * 1e3
    copy = "copy over the pinned bus, ms" if on_gpu() else "copy, ms"
    yield Row(
        f"a delta of {changed / sum(sizes):.2%} of {sum(sizes) / 1e6:,.0f} million words, {len(sizes)} tensors",
        {"MB": size / 1e6, copy: copied_ms, "checksum of all words, ms": summed_ms},
    )
    for xor in (False, True):
        before = checksum(words)
        taken = seconds(lambda xor=xor: apply_delta(words, delta, xor=xor))  # type: ignore[misc]
        # `seconds` applies the delta four times, so that xor restores the words.
        right = bool(checksum(words) == before) if xor else _holds(words, delta)
        how = "xor" if xor else "overwrite"
        found = {"ms": taken * 1e3, "times the copy alone": taken * 1e3 / copied_ms}
        yield Row(
            f"copied and applied by {how}",
            {
                **found,
                "ms with checksum": taken * 1e3 + summed_ms,
                "right": "yes" if right else "no",
            },
            {"right": ("is", "yes")},
        )


def _delta(sizes: Sequence[int], dice: torch.Generator) -> SparseDelta:
    """A random delta for tensors of these numbers of words."""
    distances = []
    for size in sizes:
        drawn = torch.empty(int(size * CHANGED * 1.2) + 1, device=device())
        drawn = drawn.geometric_(CHANGED, generator=dice).clamp_(1, 2**15 - 1).short()
        distances.append(drawn[drawn.cumsum(0) <= size])
    whole = torch.cat(distances)
    bits = torch.empty_like(whole).random_(generator=dice)
    host = [each.pin_memory() if on_gpu() else each for each in (whole.cpu(), bits.cpu())]
    return SparseDelta(host[0], host[1], [len(each) for each in distances])


def _holds(words: Sequence[Tensor], delta: SparseDelta) -> bool:
    """Whether the words that the delta names are those that it wrote."""
    written = delta.on(words[0].device).tensors()
    return all(
        torch.equal(each.index_select(0, places), bits)
        for each, (places, bits) in zip(words, written, strict=True)
    )

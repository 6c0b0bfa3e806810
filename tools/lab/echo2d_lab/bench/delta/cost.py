"""Measures what a delta costs besides its broadcast: encoding it, as the seed does, and applying it, as each worker
does.

The measurement is apart from the broadcast, on a machine that does nothing else.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from echo2d.core.weights.encoder import Segment
from echo2d.core.weights.form import base_sum
from echo2d.core.weights.manifest import Chunk, chunk_layout
from echo2d.runtime.seed.delta_bases import BaseCopy
from echo2d.runtime.seed.encoder import Encoder
from echo2d.store.snapshots import read_chunk, scan_snapshot
from echo2d_lab.bench.delta.run import MeasuredChunk, delta_facts, make_files, new_scratch


@dataclass(frozen=True, slots=True)
class DeltaCosts:
    """encode_s: until the whole form is encoded, on all cores that it uses, with reading both versions (page cache).

    decode_cpu_s: of one thread, for decoding, verifying and writing, as in `bench delta`. wire_fraction: of the
    snapshot's bytes, with segment tables. changed_fraction: of the 16-bit words.
    """

    changed_fraction: float
    wire_bytes: int
    wire_fraction: float
    encode_s: float
    decode_cpu_s: float


def delta_costs(old: Path, new: Path, out: Path) -> DeltaCosts:
    """Measure. out: the folder in which NEW is rebuilt; it is overwritten."""
    base = _base(old)
    began = time.monotonic()
    encoder = Encoder(delta_facts(), new, base)
    segments = [*encoder.segments()]
    encode_s = time.monotonic() - began
    layout, in_base = chunk_layout(scan_snapshot(new)), frozenset(chunk_layout(scan_snapshot(old)))
    make_files(out, scan_snapshot(new))
    scratch, changed, words = new_scratch(), 0, 0
    decode_cpu_s = 0.0
    for each in _chunks(segments, layout, in_base, old, new):
        decode_cpu_s += each.decode_into(out, scratch)
        changed, words = changed + each.changed_words, words + each.words
    totals = encoder.totals()
    return DeltaCosts(
        changed_fraction=changed / words,
        wire_bytes=totals.wire_bytes,
        wire_fraction=totals.wire_bytes / totals.full_bytes,
        encode_s=encode_s,
        decode_cpu_s=decode_cpu_s,
    )


def _base(old: Path) -> BaseCopy:
    """The base with its checksums, which the seed knows because it has encoded that version itself."""
    facts, sums = (
        delta_facts(),
        {each: base_sum(read_chunk(old, each)) for each in chunk_layout(scan_snapshot(old))},
    )
    assert facts.base_digest is not None
    return BaseCopy(old, facts.base_digest, sums)


def _chunks(
    segments: list[Segment],
    layout: tuple[Chunk, ...],
    in_base: frozenset[Chunk],
    old: Path,
    new: Path,
) -> Iterator[MeasuredChunk]:
    for segment in segments:
        for record, payload in zip(segment.table.records, segment.payloads, strict=True):
            place = layout[record.chunk]
            base = read_chunk(old, place) if place in in_base else None
            yield MeasuredChunk(place, read_chunk(new, place), base, record, payload)

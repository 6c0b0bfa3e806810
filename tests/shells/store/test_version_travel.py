"""A version's whole way: directory -> form -> frames in any order -> another peer's store -> spare slot -> current.

The snapshot has 20 MB of real bf16 values; the arrived version is compared byte by byte, and by its snapshot digest.
"""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from echo2d.core.base.ids import ChunkId, Digest, Epoch, PublishSeq, RunId, SegmentId, Version
from echo2d.core.weights.encoder import FormBuilder, RootWriter
from echo2d.core.weights.form import (
    FormFacts,
    FrameSpan,
    decode_record,
    encode_record,
    require_base,
)
from echo2d.core.weights.kept_deltas import FormKind
from echo2d.core.weights.manifest import Manifest, chunk_layout
from echo2d.core.weights.signed_index import Root
from echo2d.core.weights.verifier import FormIndex
from echo2d.errors import IntegrityFault
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import write_at
from echo2d.store.frames import FrameStore
from echo2d.store.slots.current_slot import CurrentSlot
from echo2d.store.slots.slot_store import SlotStore
from echo2d.store.snapshots import build_manifest, damaged_chunks, read_chunk, scan_snapshot
from tests.support.snapshots import write_snapshot

FRAME_BYTES = 256 << 10
ROOM = 1 << 30


def form_facts(version: int, kind: FormKind, base: Digest | None = None) -> FormFacts:
    return FormFacts(
        RunId("run"), Epoch(1), Version(version), PublishSeq(version + 1), kind, base, FRAME_BYTES
    )


def encode(
    model: Path, facts: FormFacts, store: FrameStore, base: Path | None = None
) -> list[Root]:
    """What a seed does: every chunk encoded, every finished segment stored and named by a root."""
    files = scan_snapshot(model)
    builder, writer, roots = FormBuilder(facts, files, segment_bytes=6 << 20), RootWriter(facts), []
    store.begin(facts)
    segments = []
    for position, chunk in enumerate(chunk_layout(files)):
        old = None if base is None else read_chunk(base, chunk)
        full = builder.add(*encode_record(ChunkId(position), read_chunk(model, chunk), old))
        segments += [] if full is None else [full]
    for segment in (*segments, builder.finish()):
        store.put_table(facts.form, segment.table.segment, segment.table.encode())
        for span, payload in segment.frames(facts.frame_bytes):
            store.put_verified(facts.form, [(span, payload)])
        writer.add(segment.table.digest)
        roots += writer.take()
    return [*roots, *writer.take(builder.totals())]


def learn(roots: Iterable[Root], source: FrameStore) -> FormIndex:
    """The index of a peer that has heard all roots and received all tables from `source`."""
    first, *others = roots
    index = FormIndex(first)
    for root in others:
        index.accept_root(root)
    for number in map(SegmentId, range(index.segment_count)):
        index.accept_table(number, source.get_table(first.form, number))
        index.check()
    return index


def spans_of(index: FormIndex) -> list[FrameSpan]:
    return [
        span for number in range(index.segment_count) for span in index.spans(SegmentId(number))
    ]


def receive(
    index: FormIndex, spans: Sequence[FrameSpan], source: FrameStore, target: FrameStore
) -> None:
    form = index.facts.form
    target.begin(index.facts)
    for number in map(SegmentId, range(index.segment_count)):
        target.put_table(form, number, source.get_table(form, number))
    for span in spans:
        target.put_verified(form, [(span, source.get_frame(form, span))])


def apply(index: FormIndex, frames: FrameStore, slots: SlotStore) -> CurrentSlot:
    """What a worker does with a complete form: decode every chunk against the current slot, into the spare one."""
    manifest, current = index.manifest(), slots.current()
    writer = slots.begin(manifest.files)
    tables = [index.table(segment) for segment in map(SegmentId, range(index.segment_count))]
    records = [record for table in tables if table is not None for record in table.records]
    for record, chunk in zip(records, manifest.chunks, strict=True):
        payload = frames.read_encoded_chunk(index.facts.form, index.chunk_spans(record.chunk))
        base = (
            None
            if index.facts.kind == "full" or current is None
            else read_chunk(current.directory, chunk)
        )
        try:
            data = decode_record(record, payload, chunk.length, base)
            writer.write_chunk(record.chunk, data, record.result)
        except IntegrityFault:
            require_base(record, base)
            raise
    return writer.commit(manifest, index.facts.epoch, index.facts.version)


def assert_same_files(left: Path, right: Path, manifest: Manifest) -> None:
    for file in manifest.files:
        assert (left / file.path).read_bytes() == (right / file.path).read_bytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_snapshot(tmp_path / "model", weight_bytes=20 << 20)


def test_a_version_arrives_whole_across_a_restart(model: Path, tmp_path: Path) -> None:
    seed, slots = (
        FrameStore(tmp_path / "seed", DiskBudget(ROOM)),
        SlotStore(tmp_path / "slots", DiskBudget(ROOM)),
    )
    roots = encode(model, form_facts(0, "full"), seed)
    index = learn(roots, seed)
    spans = spans_of(index)
    random.Random(5).shuffle(spans)
    assert len(roots) == len({root.segment_count for root in roots}) + 1 > 3
    assert index.totals is not None
    assert index.totals.wire_bytes < 0.7 * index.totals.full_bytes

    half = len(spans) // 2
    receive(index, spans[:half], seed, FrameStore(tmp_path / "worker", DiskBudget(ROOM)))
    restarted = FrameStore(tmp_path / "worker", DiskBudget(ROOM))
    held = restarted.recover(index.facts.form)
    assert {span.frame for span in spans[:half]} == {
        span.frame for span in spans if span.frame in held
    }
    receive(index, [span for span in spans if span.frame not in held], seed, restarted)

    current = apply(index, restarted, slots)
    assert slots.current() == current
    assert current.manifest.digest == build_manifest(model).digest == index.totals.snapshot
    assert damaged_chunks(current.directory, current.manifest) == ()
    assert_same_files(model, current.directory, current.manifest)


def test_a_delta_sends_only_what_changed(tmp_path: Path) -> None:
    seed, slots = (
        FrameStore(tmp_path / "seed", DiskBudget(ROOM)),
        SlotStore(tmp_path / "slots", DiskBudget(ROOM)),
    )
    base = write_snapshot(tmp_path / "base", weight_bytes=1 << 20)
    index = learn(encode(base, form_facts(0, "full"), seed), seed)
    first = apply(index, seed, slots)

    model = write_snapshot(tmp_path / "model", weight_bytes=1 << 20)
    write_at(model / "model-1.safetensors", b"changed!", 4000)
    index = learn(encode(model, form_facts(1, "delta", first.manifest.digest), seed, base), seed)
    assert index.totals is not None
    assert index.totals.wire_bytes < 0.4 * index.totals.full_bytes, "one shard of two"
    second = apply(index, seed, slots)
    assert second.version == 1
    assert second.manifest.digest == build_manifest(model).digest
    assert_same_files(model, second.directory, second.manifest)


def test_a_delta_on_the_wrong_base_does_not_change_the_old_version(tmp_path: Path) -> None:
    seed, slots = (
        FrameStore(tmp_path / "seed", DiskBudget(ROOM)),
        SlotStore(tmp_path / "slots", DiskBudget(ROOM)),
    )
    base = write_snapshot(tmp_path / "base", rng_seed=1)
    other = write_snapshot(tmp_path / "other", rng_seed=2)
    before = apply(learn(encode(other, form_facts(0, "full"), seed), seed), seed, slots)
    facts = form_facts(1, "delta", build_manifest(base).digest)
    index = learn(encode(base, facts, seed, base), seed)
    with pytest.raises(IntegrityFault, match="base"):
        apply(index, seed, slots)
    assert slots.current() == before
    assert damaged_chunks(before.directory, before.manifest) == ()

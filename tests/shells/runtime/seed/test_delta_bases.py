"""The bases of deltas: a checked copy, or kept deltas, over real files; and damaged ones."""

import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest, Version
from echo2d.core.weights.delta import ChunkMode
from echo2d.core.weights.encoder import Segment
from echo2d.core.weights.form import FormFacts, decode_record
from echo2d.core.weights.kept_deltas import FormKind
from echo2d.core.weights.manifest import chunk_layout
from echo2d.errors import StoreFault
from echo2d.runtime.seed.delta_bases import BaseChain, BaseCopy, BaseLost
from echo2d.runtime.seed.encoder import Encoder
from echo2d.store import deltas as deltas_module
from echo2d.store.deltas import DeltaStore
from echo2d.store.disk import write_at
from echo2d.store.snapshots import build_manifest, read_chunk, scan_snapshot
from tests.support.encodings import facts
from tests.support.snapshots import write_snapshot

WEIGHTS = 300_000
ROOM = 1 << 30


def next_version(old: Path, new: Path, rng_seed: int) -> Path:
    """A few weights moved to their neighbours."""
    write_snapshot(new, weight_bytes=WEIGHTS, rng_seed=1)
    rng = np.random.default_rng(rng_seed)
    for shard in old.glob("*.safetensors"):
        data = shard.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        words = np.frombuffer(data, "<u2", offset=start).copy()
        moved = rng.integers(0, words.size, 50)
        words[moved] += rng.choice([1, 0xFFFF], moved.size).astype(np.uint16)
        (new / shard.name).write_bytes(data[:start] + words.tobytes())
    return new


@pytest.fixture
def run(tmp_path: Path) -> list[Path]:
    """Five versions, one train step after the other."""
    versions = [write_snapshot(tmp_path / "0", weight_bytes=WEIGHTS, rng_seed=1)]
    for step in range(1, 5):
        versions.append(next_version(versions[-1], tmp_path / str(step), step))
    return versions


def digest(path: Path) -> Digest:
    return build_manifest(path).digest


def facts_of(new: Path, base: Path, kind: FormKind = "delta") -> FormFacts:
    version = int(new.name)
    return replace(
        facts("delta", version=version, publish_seq=version + 1),
        kind=kind,
        base_digest=digest(base),
    )


def encoded(encoder: Encoder) -> list[Segment]:
    return list(encoder.segments())


def wire_bytes(segments: list[Segment]) -> int:
    return sum(segment.table.wire_bytes for segment in segments)


def delta(new: Path, old: Path) -> tuple[FormFacts, Encoder]:
    form = facts_of(new, old)
    return form, Encoder(form, new, BaseCopy(old, digest(old), None))


def keep(store: DeltaStore, new: Path, old: Path) -> FormFacts:
    form = facts_of(new, old)
    encoder = Encoder(form, new, BaseCopy(old, digest(old), None), keep=True)
    assert encoded(encoder)
    kept = encoder.kept
    assert kept is not None
    for segment in kept.take():
        store.put(form, segment)
    assert kept.take() == []
    store.finish(form, kept.digests, encoder.manifest(), kept.wire_bytes)
    store.check()
    return form


def keep_all(store: DeltaStore, run: list[Path]) -> None:
    for old, new in pairwise(run):
        keep(store, new, old)


def composed(store: DeltaStore, run: list[Path]) -> Encoder:
    """Of the deltas from the first version to the last, without a copy of the first."""
    base = BaseChain.open(
        store, digest(run[0]), [digest(each) for each in run[1:-1]], digest(run[-1])
    )
    return Encoder(facts_of(run[-1], run[0], "composed"), run[-1], base)


def decoded(segments: list[Segment], base: Path, new: Path) -> None:
    """What they make of the base is the new version, every byte."""
    layout, theirs = chunk_layout(scan_snapshot(new)), set(chunk_layout(scan_snapshot(base)))
    chunks = [
        each for part in segments for each in zip(part.table.records, part.payloads, strict=True)
    ]
    assert len(chunks) == len(layout)
    for (record, payload), place in zip(chunks, layout, strict=True):
        old = read_chunk(base, place) if place in theirs else None
        data = decode_record(record, payload, place.length, old)
        assert data == read_chunk(new, place)
        assert digest_of(data) == record.result


def test_kept_deltas_compose_to_the_delta_that_the_base_would_give(
    run: list[Path], tmp_path: Path
) -> None:
    store = DeltaStore(tmp_path / "deltas", ROOM)
    keep_all(store, run)
    assert [(kept.base, kept.made) for kept in store.kept()] == [
        (digest(old), digest(new)) for old, new in pairwise(run)
    ]
    encoder = composed(store, run)
    segments = encoded(encoder)
    decoded(segments, run[0], run[-1])
    assert encoder.totals().snapshot == digest(run[-1])
    direct = Encoder(
        facts_of(run[-1], run[0]), run[-1], BaseCopy(run[0], digest(run[0]), None), keep=True
    )
    sent = encoded(direct)
    assert direct.kept is not None
    assert [segment.payloads for segment in segments] == [
        segment.payloads for segment in direct.kept.take()
    ]
    assert wire_bytes(sent) <= wire_bytes(segments)
    assert wire_bytes(segments) < sum(kept.wire_bytes for kept in store.kept())


def test_finished_kept_deltas_survive_a_restart_and_unfinished_ones_do_not(
    run: list[Path], tmp_path: Path
) -> None:
    before = DeltaStore(tmp_path / "deltas", ROOM)
    keep_all(before, run[:4])
    form, encoder = delta(run[4], run[3])
    for segment in encoder.segments():
        before.put(form, segment)
    assert len(list((tmp_path / "deltas" / "frames").iterdir())) == 4
    keep(before, run[2], run[0])
    assert not list((tmp_path / "deltas" / "frames").glob(f"{form.form}*")), (
        "it will not be finished any more"
    )
    for segment in delta(run[4], run[3])[1].segments():
        before.put(form, segment)
    after = DeltaStore(tmp_path / "deltas", ROOM)
    assert set(after.kept()) == set(before.kept())
    decoded(encoded(composed(after, run[:4])), run[0], run[3])
    with pytest.raises(BaseLost, match="not kept any more"):
        composed(after, run)
    assert not list((tmp_path / "deltas" / "frames").glob(f"{form.form}*"))


@pytest.mark.parametrize("what", ["frames", "table", "list"])
def test_a_damaged_kept_delta_is_not_used(
    run: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    store = DeltaStore(tmp_path / "deltas", ROOM)
    keep_all(store, run)
    form = facts_of(run[2], run[1]).form
    folder = tmp_path / "deltas"
    path = folder / form if what == "list" else folder / "frames" / form / f"0000.{what}"
    write_at(path, b"rotten", path.stat().st_size // 2)
    if what != "frames":
        with pytest.raises(BaseLost):
            composed(store, run)
        assert len(DeltaStore(folder, ROOM).kept()) == 3
        return
    with caplog.at_level(logging.WARNING):
        segments = encoded(composed(store, run))
    decoded(segments, run[0], run[-1])
    modes = [record.mode for segment in segments for record in segment.table.records]
    assert ChunkMode.FULL in modes
    assert ChunkMode.SPARSE in modes, "the rest still as delta"
    assert (
        len([record for record in caplog.records if "a kept delta is damaged" in record.message])
        == 1
    )


def test_the_oldest_kept_deltas_make_room(
    run: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DeltaStore(tmp_path / "deltas", ROOM)
    keep(store, run[1], run[0])
    room = int(2.5 * store.kept()[0].wire_bytes)
    small = DeltaStore(tmp_path / "small", room)
    keep_all(small, run)
    assert 0 < len(small.kept()) < 4
    assert small.kept()[-1].made == digest(run[-1])
    tiny = DeltaStore(tmp_path / "tiny", 100)
    form, encoder = delta(run[1], run[0])
    with pytest.raises(StoreFault, match="disk_bytes_max"):
        tiny.put(form, next(iter(encoder.segments())))
    assert tiny.kept() == ()
    tiny.check()
    monkeypatch.setattr(deltas_module, "DELTAS_KEPT_MAX", 2)
    keep_all(store, run)
    assert [kept.made for kept in store.kept()] == [digest(run[3]), digest(run[4])]


def test_a_chunk_without_a_partner_in_the_base_is_encoded_in_full(
    run: list[Path], tmp_path: Path
) -> None:
    """Another header: the chunks behind it lie elsewhere; and a new file."""
    header = run[1] / "model-0.safetensors"
    data = header.read_bytes()
    text = data[8 : 8 + int.from_bytes(data[:8], "little")].replace(b"layer.0", b"layers.00")
    header.write_bytes(
        len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]
    )
    (run[1] / "added.json").write_text("{}")
    for step in (2, 3, 4):
        (run[step] / "added.json").write_text("{}")
        (run[step] / header.name).write_bytes(header.read_bytes())
    store = DeltaStore(tmp_path / "deltas", ROOM)
    keep_all(store, run)
    segments = encoded(composed(store, run))
    decoded(segments, run[0], run[-1])
    places = chunk_layout(scan_snapshot(run[-1]))
    modes = {
        place: record.mode
        for place, record in zip(
            places,
            [record for segment in segments for record in segment.table.records],
            strict=True,
        )
    }
    assert {mode for place, mode in modes.items() if place.path == header.name} <= {
        ChunkMode.RAW,
        ChunkMode.FULL,
    }
    assert ChunkMode.SPARSE in modes.values(), "the other file as a delta"


@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_base_is_found_before_any_peer_gets_its_delta(
    run: list[Path], caplog: pytest.LogCaptureFixture, *, known: bool
) -> None:
    """A delta from wrong bytes is one that nobody can decode."""
    manifest, base = build_manifest(run[0]), run[0]
    before = Encoder(replace(facts(), version=Version(0)), base, None)
    assert encoded(before)
    shard = base / "model-1.safetensors"
    write_at(shard, b"rot", 1000)
    if not known:
        with pytest.raises(BaseLost, match="is not the base that was published"):
            BaseCopy(base, manifest.digest, None)
        return
    form = replace(facts_of(run[1], run[0]), base_digest=manifest.digest)
    with caplog.at_level(logging.WARNING):
        segments = encoded(Encoder(form, run[1], BaseCopy(base, manifest.digest, before.sums())))
    records = [record for segment in segments for record in segment.table.records]
    places = chunk_layout(scan_snapshot(run[1]))
    spoilt = [
        record for record, place in zip(records, places, strict=True) if place.path == shard.name
    ]
    assert [record.mode for record in spoilt if record.mode != ChunkMode.SAME] == [ChunkMode.FULL]
    assert {ChunkMode.SPARSE, ChunkMode.SPLIT} & {record.mode for record in records}
    assert (
        len(
            [
                record
                for record in caplog.records
                if "is damaged, chunks go in full" in record.message
            ]
        )
        == 1
    )
    shard.unlink()
    assert encoded(Encoder(form, run[1], BaseCopy(base, manifest.digest, before.sums())))
    with pytest.raises(BaseLost):
        BaseCopy(base.with_name("none"), manifest.digest, None)

"""Two slots: a committed version is whole, a damaged one is not current, wrong bytes never reach a slot."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import ChunkId, Epoch, Version
from echo2d.core.weights.manifest import Manifest
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import write_at
from echo2d.store.slots import proofs
from echo2d.store.slots.current_slot import CurrentSlot
from echo2d.store.slots.slot_store import SlotStore
from echo2d.store.slots.slot_writer import SlotWriter
from echo2d.store.snapshots import build_manifest, damaged_chunks, read_chunk
from tests.support.snapshots import write_snapshot

Published = tuple[Path, Manifest]
ROOM = 1 << 20


@pytest.fixture
def old(tmp_path: Path) -> Published:
    model = write_snapshot(tmp_path / "old", weight_bytes=4096, rng_seed=1)
    return model, build_manifest(model)


@pytest.fixture
def new(tmp_path: Path) -> Published:
    model = write_snapshot(tmp_path / "new", weight_bytes=4096, rng_seed=2)
    return model, build_manifest(model)


def fill(writer: SlotWriter, published: Published) -> None:
    model, manifest = published
    for position, chunk in enumerate(manifest.chunks):
        writer.write_chunk(
            ChunkId(position), read_chunk(model, chunk), manifest.chunk_digests[position]
        )
        writer.check()


def put(store: SlotStore, published: Published, version: int) -> CurrentSlot:
    writer = store.begin(published[1].files)
    fill(writer, published)
    return writer.commit(published[1], Epoch(1), Version(version))


def standing(root: Path) -> int | None:
    """The version a restarted store finds, after hashing all of it."""
    current = SlotStore(root, DiskBudget(ROOM)).current()
    if current is None:
        return None
    assert damaged_chunks(current.directory, current.manifest) == ()
    return current.version


def test_versions_are_written_to_the_two_slots_in_turn(
    tmp_path: Path, old: Published, new: Published
) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    assert store.current() is None
    first, second, third = put(store, old, 1), put(store, new, 2), put(store, old, 3)
    assert first.directory == third.directory != second.directory
    assert store.current() == third
    assert standing(tmp_path / "slots") == 3
    assert sorted(path.name for path in third.directory.rglob("*.*")) == sorted(
        path.name for path in old[0].rglob("*.*")
    )


def test_wrong_bytes_never_reach_the_slot(tmp_path: Path, new: Published) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    model, manifest = new
    writer = store.begin(manifest.files)
    data = read_chunk(model, manifest.chunks[0])
    for wrong in (data[:-1], data + b"\0", bytes([data[0] ^ 1]) + data[1:]):
        with pytest.raises(IntegrityFault, match="promised"):
            writer.write_chunk(ChunkId(0), wrong, manifest.chunk_digests[0])
    with pytest.raises(IntegrityFault, match="promised"):
        writer.write_chunk(ChunkId(0), data + b"\0", digest_of(data + b"\0"))
    assert writer._standing == {}


def test_a_commit_needs_every_chunk_of_its_manifest(
    tmp_path: Path, old: Published, new: Published
) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    writer = store.begin(new[1].files)
    with pytest.raises(IntegrityFault, match="not those"):
        writer.commit(new[1], Epoch(1), Version(2))
    fill(writer, new)
    with pytest.raises(IntegrityFault, match="not those"):
        writer.commit(old[1], Epoch(1), Version(2))
    assert writer.commit(new[1], Epoch(1), Version(2)).manifest == new[1]


def test_a_writer_ends_with_its_commit_or_with_the_next_begin(
    tmp_path: Path, old: Published, new: Published
) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    stale = store.begin(old[1].files)
    done = store.begin(new[1].files)
    fill(done, new)
    done.commit(new[1], Epoch(1), Version(2))
    for writer in (stale, done):
        with pytest.raises(StoreFault, match="ended"):
            fill(writer, old)
        with pytest.raises(StoreFault, match="ended"):
            writer.commit(new[1], Epoch(1), Version(3))
    assert standing(tmp_path / "slots") == 2


def test_files_of_another_model_are_deleted(tmp_path: Path, old: Published, new: Published) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    put(store, old, 1)
    put(store, new, 2)
    small = write_snapshot(tmp_path / "small", weight_bytes=4096, shards=1)
    current = put(store, (small, build_manifest(small)), 3)
    assert sorted(path.name for path in current.directory.iterdir()) == [
        "config.json", "extra", "model-0.safetensors", "tokenizer.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [
        lambda root: (root / "current.json").write_bytes(b"\0\0"),
        lambda root: (root / "current.json").write_text("[]"),
        lambda root: (root / "current.json").write_text(
            json.dumps({"slot": "../x", "epoch": 1, "version": 1})
        ),
        lambda root: (root / "a/manifest").write_bytes(b""),
        lambda root: (root / "a/manifest").unlink(),
        lambda root: (root / "a/model/config.json").unlink(),
        lambda root: os.truncate(root / "a/model/config.json", 1),
        lambda root: shutil.rmtree(root / "a"),
    ],
)
def test_a_damaged_slot_is_not_current(
    tmp_path: Path, old: Published, damage: Callable[[Path], object]
) -> None:
    put(SlotStore(tmp_path / "slots", DiskBudget(ROOM)), old, 1)
    damage(tmp_path / "slots")
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    assert store.current() is None
    put(store, old, 2)
    assert standing(tmp_path / "slots") == 2


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """How many chunks each check of a slot hashed; None: all."""
    found: list[int | None] = []

    def look(
        directory: Path, manifest: Manifest, among: Sequence[ChunkId] | None = None
    ) -> tuple[ChunkId, ...]:
        found.append(None if among is None else len(among))
        return damaged_chunks(directory, manifest, among)

    monkeypatch.setattr(proofs, "damaged_chunks", look)
    return found


def rot(current: CurrentSlot) -> None:
    path = current.directory / "model-1.safetensors"
    write_at(path, b"rot", 1000)
    os.utime(path, (0, 0))  # clocks of files may tick too slowly for a test


def test_a_rotten_version_is_replaced_by_the_one_before_and_written_again(
    tmp_path: Path, old: Published, new: Published
) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    put(store, old, 1)
    damaged = put(store, new, 2)
    store.require_intact(damaged.directory, damaged.manifest.digest)
    rot(damaged)
    with pytest.raises(IntegrityFault, match="damaged"):
        store.require_intact(damaged.directory, damaged.manifest.digest)
    assert standing(tmp_path / "slots") == 1
    again = put(store, new, 2)
    assert again.directory == damaged.directory
    store.require_intact(again.directory, again.manifest.digest)
    assert standing(tmp_path / "slots") == 2


def test_a_slot_that_did_not_change_after_its_write_is_not_hashed_again(
    tmp_path: Path, old: Published, new: Published, looks: list[int | None]
) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    first, second = put(store, old, 1), put(store, new, 2)
    for current in (first, second, second):
        store.require_intact(current.directory, current.manifest.digest)
    assert looks == []
    (second.directory / "config.json").touch()
    for _ in range(2):
        store.require_intact(second.directory, second.manifest.digest)
    assert looks == [None], "touched, hashed once, and known again"
    SlotStore(tmp_path / "slots", DiskBudget(ROOM)).require_intact(
        second.directory, second.manifest.digest
    )
    assert len(looks) == 2, "another process knows nothing"
    third = put(store, old, 3)
    with pytest.raises(IntegrityFault, match="damaged"):
        store.require_intact(third.directory, new[1].digest)


def test_a_proof_of_a_chunk_counts_from_the_time_of_its_write(
    tmp_path: Path, new: Published, looks: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("echo2d.store.slots.proofs.time.monotonic", lambda: now)
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    model, manifest = new
    writer = store.begin(manifest.files)
    for position, chunk in enumerate(manifest.chunks):
        now += 50.0 if position == 2 else 0.0
        data = read_chunk(model, chunk)
        writer.write_chunk(ChunkId(position), data, manifest.chunk_digests[position])
    current = writer.commit(manifest, Epoch(1), Version(1))
    store.require_intact(current.directory, manifest.digest)
    assert looks == []
    now += 20.0
    for _ in range(2):
        store.require_intact(current.directory, manifest.digest)
    assert looks == [2], "the first two chunks were written long ago, and are hashed once"
    now += 50.0
    store.require_intact(current.directory, manifest.digest)
    assert looks == [2, len(manifest.chunks) - 2]


def test_a_version_that_rots_while_the_next_is_written_leaves_no_version(
    tmp_path: Path, old: Published, new: Published
) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    damaged = put(store, old, 1)
    writer = store.begin(new[1].files)
    rot(damaged)
    with pytest.raises(IntegrityFault, match="damaged"):
        store.require_intact(damaged.directory, damaged.manifest.digest)
    assert standing(tmp_path / "slots") is None
    with pytest.raises(StoreFault, match="ended"):
        fill(writer, new)
    put(store, new, 2)
    assert standing(tmp_path / "slots") == 2


@pytest.mark.parametrize("file", ["manifest", "model"])
def test_a_slot_with_missing_files_counts_as_damaged(
    tmp_path: Path, new: Published, file: str
) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))
    current = put(store, new, 1)
    lost = current.directory.parent / file
    lost.rename(tmp_path / "elsewhere")
    with pytest.raises(IntegrityFault, match="damaged"):
        store.require_intact(current.directory, current.manifest.digest)
    assert standing(tmp_path / "slots") is None


def test_a_full_disk_frees_the_spare_slot(
    tmp_path: Path, new: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlotStore(tmp_path / "slots", DiskBudget(ROOM))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            StoreFault, match=r"preparing the slot .* failed: No space left on device"
        ):
            store.begin(new[1].files)
    assert list((tmp_path / "slots").iterdir()) == []
    put(store, new, 2)
    assert standing(tmp_path / "slots") == 2

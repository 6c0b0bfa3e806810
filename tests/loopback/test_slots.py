"""Two slots: what is committed is whole; a fault or a kill at any step leaves exactly the old or exactly the new."""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.canonical import digest_of
from echo2d.core.ids import ChunkId, Epoch, Version
from echo2d.core.manifest import Manifest
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.slots import CurrentSlot, SlotStore, SlotWriter
from echo2d.store.snapshots import build_manifest, damaged_chunks, read_chunk
from tests.snapshot_kit import write_snapshot

Published = tuple[Path, Manifest]


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
        writer.write_chunk(ChunkId(position), read_chunk(model, chunk), manifest.chunk_digests[position])
        writer.check()


def put(store: SlotStore, published: Published, version: int) -> CurrentSlot:
    writer = store.begin(published[1].files)
    fill(writer, published)
    return writer.commit(published[1], Epoch(1), Version(version))


def standing(root: Path) -> int | None:
    """The version a restarted store finds, after hashing all of it."""
    current = SlotStore(root).current()
    if current is None:
        return None
    assert damaged_chunks(current.directory, current.manifest) == ()
    return current.version


def test_versions_take_turns(tmp_path: Path, old: Published, new: Published) -> None:
    store = SlotStore(tmp_path / "slots")
    assert store.current() is None
    first, second, third = put(store, old, 1), put(store, new, 2), put(store, old, 3)
    assert first.directory == third.directory != second.directory
    assert store.current() == third
    assert standing(tmp_path / "slots") == 3
    assert sorted(path.name for path in third.directory.rglob("*.*")) == sorted(
        path.name for path in old[0].rglob("*.*")
    )


def test_wrong_bytes_never_reach_the_slot(tmp_path: Path, new: Published) -> None:
    store = SlotStore(tmp_path / "slots")
    model, manifest = new
    writer = store.begin(manifest.files)
    data = read_chunk(model, manifest.chunks[0])
    for wrong in (data[:-1], data + b"\0", bytes([data[0] ^ 1]) + data[1:]):
        with pytest.raises(IntegrityFault, match="promised"):
            writer.write_chunk(ChunkId(0), wrong, manifest.chunk_digests[0])
    with pytest.raises(IntegrityFault, match="promised"):
        writer.write_chunk(ChunkId(0), data + b"\0", digest_of(data + b"\0"))
    assert writer.standing == {}


def test_a_commit_needs_every_chunk_of_its_manifest(tmp_path: Path, old: Published, new: Published) -> None:
    store = SlotStore(tmp_path / "slots")
    writer = store.begin(new[1].files)
    with pytest.raises(IntegrityFault, match="not those"):
        writer.commit(new[1], Epoch(1), Version(2))
    fill(writer, new)
    with pytest.raises(IntegrityFault, match="not those"):
        writer.commit(old[1], Epoch(1), Version(2))
    assert writer.commit(new[1], Epoch(1), Version(2)).manifest == new[1]


def test_a_writer_ends_with_its_commit_or_with_the_next_begin(tmp_path: Path, old: Published, new: Published) -> None:
    store = SlotStore(tmp_path / "slots")
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


def test_files_of_another_model_do_not_stay(tmp_path: Path, old: Published, new: Published) -> None:
    store = SlotStore(tmp_path / "slots")
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
        lambda root: (root / "current.json").write_text(json.dumps({"slot": "../x", "epoch": 1, "version": 1})),
        lambda root: (root / "a/manifest").write_bytes(b""),
        lambda root: (root / "a/manifest").unlink(),
        lambda root: (root / "a/model/config.json").unlink(),
        lambda root: os.truncate(root / "a/model/config.json", 1),
        lambda root: shutil.rmtree(root / "a"),
    ],
)
def test_a_damaged_slot_is_not_current(tmp_path: Path, old: Published, damage: Callable[[Path], object]) -> None:
    put(SlotStore(tmp_path / "slots"), old, 1)
    damage(tmp_path / "slots")
    store = SlotStore(tmp_path / "slots")
    assert store.current() is None
    put(store, old, 2)
    assert standing(tmp_path / "slots") == 2


# --- faults at every step


class Killed(BaseException):
    """Stands for kill -9: nothing that comes after it reaches the disk."""


class FailingDisk:
    """Lets `steps` changes of the disk pass, then fails one of them (OSError) or it and all that follow (Killed)."""

    CALLS = ("open", "pwrite", "ftruncate", "posix_fallocate", "fsync", "replace", "unlink", "mkdir", "rmdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int, fault: BaseException) -> None:
        self.steps, self.fault, self.struck = steps, fault, False
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.steps -= 1
            if self.steps == -1 or (self.struck and isinstance(self.fault, Killed)):
                self.struck = True
                raise self.fault
            return real(*args, **kwargs)

        return call


FAULTS = [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error"), Killed()]


def publish_with_a_fault(root: Path, published: Published, steps: int, fault: BaseException) -> tuple[bool, bool]:
    """Put version 2 into the slots; whether the fault struck, and whether it was reported."""
    with pytest.MonkeyPatch.context() as patched:
        disk = FailingDisk(patched, steps, fault)
        try:
            put(SlotStore(root), published, 2)
        except (StoreFault, Killed):
            return disk.struck, True
        return disk.struck, False


@pytest.mark.parametrize("fault", FAULTS, ids=["ENOSPC", "EIO", "kill"])
def test_a_fault_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, old: Published, new: Published, fault: BaseException
) -> None:
    pristine = tmp_path / "pristine"
    put(SlotStore(pristine), old, 1)
    after_reports = []
    for steps in itertools.count():
        root = tmp_path / f"slots-{steps}"
        shutil.copytree(pristine, root)
        struck, reported = publish_with_a_fault(root, new, steps, fault)
        if not struck:
            break
        after = standing(root)
        assert after == 2 or reported
        after_reports += [after] if reported else []
        put(SlotStore(root), new, 2)
        assert standing(root) == 2
    assert len(after_reports) > 40
    assert after_reports == [1] * (len(after_reports) - 2) + [2] * 2, "all but the last sync of the flip: the old one"


def test_a_full_disk_frees_the_spare_slot(tmp_path: Path, new: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SlotStore(tmp_path / "slots")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreFault, match=r"preparing the slot .* failed: No space left on device"):
            store.begin(new[1].files)
    assert list((tmp_path / "slots").iterdir()) == []
    put(store, new, 2)
    assert standing(tmp_path / "slots") == 2

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from echo2d.core.base.ids import Epoch, Version
from echo2d.core.weights.manifest import Manifest
from echo2d.errors import OperatorFault, StoreFault
from echo2d.runtime.run_dir import synced_copies, version_files
from echo2d.runtime.run_dir.version_files import VersionFiles
from echo2d.store.snapshots import build_manifest
from tests.support.descriptors import no_descriptor_left

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def make_snapshot(path: Path) -> Path:
    path.mkdir(parents=True)
    save_file({"w": np.arange(8, dtype=np.float32)}, path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def files(run_dir: Path, root: Path) -> VersionFiles:
    made = VersionFiles(run_dir, root)
    made.prepare({})
    return made


async def parts(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def test_each_publish_has_its_own_directory_with_the_same_digest(
    files: VersionFiles, root: Path, run_dir: Path
) -> None:
    source = make_snapshot(root / "a" / "b")
    first, second = (files.adopt(Epoch(1), Version(3), str(source)) for _ in range(2))
    assert first.path != second.path
    assert (first.digest, first.full_bytes) == (second.digest, second.full_bytes)
    assert first.full_bytes == sum(file.stat().st_size for file in source.iterdir())
    files.delete(first.path)
    assert [path.name for path in (run_dir / "versions").iterdir()] == [
        second.path.removeprefix("versions/")
    ]


def test_only_directories_inside_the_root_are_accepted(
    files: VersionFiles, root: Path, tmp_path: Path
) -> None:
    source = make_snapshot(root / "0")
    outside = make_snapshot(tmp_path / "elsewhere")
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root)
    for path in (
        outside,
        root,
        Path("0"),
        root / "0" / ".." / "0",
        root / "link",
        root / "inner" / "0",
    ):
        with pytest.raises(OperatorFault, match=r"inside the snapshot root|symbolic link"):
            files.adopt(Epoch(1), Version(0), str(path))
    with pytest.raises(OperatorFault, match="File name too long"):
        files.adopt(Epoch(1), Version(0), str(root / ("x" * 5000)))
    for path in (root / "none", root / "0" / "config.json"):
        with pytest.raises(OperatorFault, match="not a directory"):
            files.adopt(Epoch(1), Version(0), str(path))
    assert files.adopt(Epoch(1), Version(0), str(source)).full_bytes > 0


def test_a_starting_coordinator_deletes_files_that_no_version_needs(
    files: VersionFiles, root: Path, run_dir: Path
) -> None:
    source = str(make_snapshot(root / "0"))
    kept, left = (files.adopt(Epoch(1), Version(0), source) for _ in range(2))
    (run_dir / "versions" / "0-half.new").mkdir()
    VersionFiles(run_dir, root).prepare({kept.path: kept.digest})
    assert (run_dir / kept.path).is_dir()
    assert not (run_dir / left.path).exists()
    assert len(list((run_dir / "versions").iterdir())) == 1


def start_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: str) -> None:
    (tmp_path / "boot_id").write_text(start)
    monkeypatch.setattr(synced_copies, "_BOOT_ID", tmp_path / "boot_id")


def test_damaged_copies_are_deleted_after_a_power_failure(
    root: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_anew(monkeypatch, tmp_path, "monday")
    files = VersionFiles(run_dir, root)
    files.prepare({})
    adopted = [
        files.adopt(Epoch(1), Version(number), str(make_snapshot(root / str(number))))
        for number in range(4)
    ]
    kept = {each.path: each.digest for each in adopted}
    whole, synced, damaged, torn = adopted
    files.sync(synced.path, synced.digest)
    (run_dir / damaged.path / "config.json").write_text("{ ")
    (run_dir / torn.path / "model.safetensors").write_bytes(b"")
    hashed: list[Path] = []

    def hash_it(directory: Path) -> Manifest:
        hashed.append(directory)
        return build_manifest(directory)

    monkeypatch.setattr(version_files, "build_manifest", hash_it)
    assert VersionFiles(run_dir, root).prepare(kept) == frozenset()
    assert hashed == [], "the machine was up all the time: the page cache has what was written"
    # What cannot be deleted is no copy.
    (run_dir / "versions" / ".nfs0001").touch()
    start_anew(monkeypatch, tmp_path, "tuesday")
    restarted = VersionFiles(run_dir, root)
    assert restarted.prepare(kept) == {damaged.path, torn.path}
    assert {path.name for path in hashed} == {
        Path(each.path).name for each in (whole, damaged, torn)
    }
    there = {f"versions/{path.name}" for path in (run_dir / "versions").glob("[0-9]*")}
    assert there == {whole.path, synced.path}
    assert VersionFiles(run_dir, root).prepare(kept) == {damaged.path, torn.path}
    assert len(hashed) == 3, "hashed once a start of the machine"
    restarted.delete(synced.path)
    assert not restarted.sync(synced.path, synced.digest), "too late, and no fault"
    assert [path.name for path in (run_dir / "synced").iterdir()] == [".boot"]


def test_a_copy_that_was_never_read_is_hashed_before_it_is_kept(
    files: VersionFiles, root: Path, run_dir: Path
) -> None:
    source = make_snapshot(root / "0")
    right = build_manifest(source)
    claimed = replace(right, chunk_digests=tuple(reversed(right.chunk_digests)))
    wrong = files.adopt(Epoch(1), Version(0), str(source), claimed)
    assert not files.sync(wrong.path, wrong.digest)
    assert not (run_dir / wrong.path).exists()
    kept = files.adopt(Epoch(1), Version(1), str(source), right)
    for _ in range(2):
        assert files.sync(kept.path, kept.digest)
    assert (run_dir / "synced" / Path(kept.path).name).exists()


def test_a_copy_whose_sync_failed_once_is_hashed_after_a_power_failure(
    files: VersionFiles, root: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have given up what it could not write, and the next sync says nothing of that."""
    kept = files.adopt(Epoch(1), Version(0), str(make_snapshot(root / "0")))
    with monkeypatch.context() as failing:
        failing.setattr(synced_copies, "sync_snapshot", fails)
        assert files.sync(kept.path, kept.digest)
    assert files.sync(kept.path, kept.digest)
    assert not (run_dir / "synced" / Path(kept.path).name).exists()


def fails(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def cut(file: Path) -> None:
    os.truncate(file, 20)


def spoil_header(file: Path) -> None:
    file.write_bytes(b"\xff" + file.read_bytes()[1:])


@pytest.mark.parametrize("spoil", [cut, spoil_header, Path.unlink])
def test_a_copy_that_is_no_longer_a_model_is_deleted(
    files: VersionFiles, root: Path, run_dir: Path, spoil: Callable[[Path], None]
) -> None:
    source = make_snapshot(root / "0")
    kept = files.adopt(Epoch(1), Version(0), str(source), build_manifest(source))
    spoil(next((run_dir / kept.path).glob("*.safetensors")))
    assert not files.sync(kept.path, kept.digest)
    assert not (run_dir / kept.path).exists()


def test_a_copy_that_cannot_be_read_for_now_is_kept(
    files: VersionFiles, root: Path, run_dir: Path
) -> None:
    source = make_snapshot(root / "0")
    kept = files.adopt(Epoch(1), Version(0), str(source), build_manifest(source))
    with no_descriptor_left():
        assert files.sync(kept.path, kept.digest)
    assert files.sync(kept.path, kept.digest)
    assert build_manifest(run_dir / kept.path).digest == kept.digest


def test_digests_of_a_manifest_are_trusted_but_its_files_must_match(
    files: VersionFiles, root: Path
) -> None:
    source = make_snapshot(root / "0")
    right = build_manifest(source)
    claimed = replace(right, chunk_digests=tuple(reversed(right.chunk_digests)))
    adopted = files.adopt(Epoch(1), Version(0), str(source), claimed)
    assert adopted.digest == claimed.digest
    (source / "config.json").write_text("{ }")
    with pytest.raises(OperatorFault, match="version 1: the manifest has other files than"):
        files.adopt(Epoch(1), Version(1), str(source), right)


async def test_uploaded_files_become_a_version(
    files: VersionFiles, root: Path, run_dir: Path
) -> None:
    source = make_snapshot(root / "0")
    for name in FILES:
        data = await asyncio.to_thread((source / name).read_bytes)
        for content in (b"an earlier try", data):
            assert await files.upload(Epoch(2), Version(5), name, parts(content)) == len(content)
    uploaded = await asyncio.to_thread(files.adopt, Epoch(2), Version(5), None)
    assert (
        uploaded.digest
        == (await asyncio.to_thread(files.adopt, Epoch(2), Version(5), str(source))).digest
    )
    assert list((run_dir / "uploads").iterdir()) == []
    with pytest.raises(OperatorFault):
        await asyncio.to_thread(files.adopt, Epoch(2), Version(5), None)


@pytest.mark.parametrize(
    "name", ["../x.json", "/x.json", "a/b/c.json", "model.bin", ".json", "a/../x.json", ""]
)
async def test_forbidden_names_of_files_are_refused(
    files: VersionFiles, run_dir: Path, name: str
) -> None:
    with pytest.raises(OperatorFault, match="forbidden file"):
        await files.upload(Epoch(1), Version(0), name, parts(b"x"))
    assert list((run_dir / "uploads").iterdir()) == []


async def test_finished_uploads_survive_a_restart_and_half_written_ones_do_not(
    files: VersionFiles, root: Path, run_dir: Path
) -> None:
    await files.upload(Epoch(1), Version(0), "config.json", parts(b"{}"))
    (run_dir / "uploads" / "1-0" / ".0123").write_bytes(b"{")
    await asyncio.to_thread(VersionFiles(run_dir, root).prepare, {})
    assert [path.name for path in (run_dir / "uploads" / "1-0").iterdir()] == ["config.json"]


async def test_the_size_of_uploads_is_limited(
    files: VersionFiles, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_files, "UPLOAD_BYTES_MAX", 2500)
    await files.upload(Epoch(1), Version(0), "a.json", parts(bytes(2000)))
    with pytest.raises(OperatorFault, match="at most 2500 bytes"):
        await files.upload(Epoch(1), Version(0), "b.json", parts(bytes(2000)))
    await files.upload(Epoch(1), Version(0), "sub/b.json", parts(bytes(500)))
    assert sorted(path.name for path in (run_dir / "uploads" / "1-0").iterdir()) == [
        "a.json",
        "sub",
    ]
    for version in range(1, 10):
        await files.upload(Epoch(1), Version(version), "a.json", parts(b"x"))
    assert len(list((run_dir / "uploads").iterdir())) == version_files.UPLOADS_MAX
    await files.upload(Epoch(10), Version(0), "a.json", parts(b"x"))
    for version in range(20, 30):
        await files.upload(Epoch(2), Version(version), "a.json", parts(b"x"))
    folders = {path.name for path in (run_dir / "uploads").iterdir()}
    assert "10-0" in folders  # an older epoch's go first
    assert len(folders) == version_files.UPLOADS_MAX


def test_versions_and_uploads_share_a_limit_of_disk_space(root: Path, run_dir: Path) -> None:
    source = make_snapshot(root / "a")
    size = sum(file.stat().st_size for file in source.iterdir())
    files = VersionFiles(run_dir, root, disk_bytes_max=2 * size + 10)
    files.prepare({})
    first, _ = (files.adopt(Epoch(1), Version(number), str(source)) for number in (1, 2))
    with pytest.raises(
        StoreFault,
        match=rf"disk_bytes_max = {2 * size + 10}: {2 * size} bytes are used, {size} more",
    ):
        files.adopt(Epoch(1), Version(3), str(source))
    with pytest.raises(StoreFault, match="10 bytes are left"):
        asyncio.run(files.upload(Epoch(1), Version(3), "config.json", parts(bytes(11))))
    assert len(list((run_dir / "versions").iterdir())) == 2
    files.delete(first.path)
    for path in source.iterdir():
        asyncio.run(files.upload(Epoch(1), Version(3), path.name, parts(path.read_bytes())))
    files.adopt(Epoch(1), Version(3), None)
    restarted = VersionFiles(run_dir, root, disk_bytes_max=2 * size + 10)
    there = (f"versions/{path.name}" for path in (run_dir / "versions").iterdir())
    restarted.prepare(dict.fromkeys(there, first.digest))
    with pytest.raises(StoreFault, match="disk_bytes_max"):
        restarted.adopt(Epoch(1), Version(4), str(source))


def test_a_version_with_another_tokenizer_is_refused_by_name(
    files: VersionFiles, root: Path, tmp_path: Path
) -> None:
    files.pin_texts(make_snapshot(tmp_path / "base"))
    files.adopt(Epoch(1), Version(0), str(make_snapshot(root / "0")))
    (make_snapshot(root / "2") / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(
        OperatorFault, match=r"version 2 has another tokenizer\.json than run\.base"
    ):
        files.adopt(Epoch(1), Version(2), str(root / "2"))

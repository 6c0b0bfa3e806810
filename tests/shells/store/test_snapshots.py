"""Model directories: which are accepted, which are refused in one line, and how they are adopted."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import ChunkId
from echo2d.core.weights.manifest import Chunk
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault
from echo2d.store.disk import sync, write_at
from echo2d.store.snapshots import (
    adopt_snapshot,
    build_manifest,
    damaged_chunks,
    leave_page_cache,
    read_chunk,
    scan_snapshot,
)
from tests.support.descriptors import no_descriptor_left
from tests.support.snapshots import in_page_cache, write_snapshot


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_snapshot(tmp_path / "model")


def test_a_snapshot_holds_the_files_of_its_model(model: Path) -> None:
    files = scan_snapshot(model)
    assert [file.path for file in files] == [
        "config.json", "extra/chat_template.jinja", "model-0.safetensors", "model-1.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert sum(file.size for file in files) == sum(
        path.stat().st_size for path in model.rglob("*.*")
    )
    assert [bool(file.header_bytes) for file in files] == [False, False, True, True, False]


def test_the_manifest_covers_every_byte(model: Path) -> None:
    told: list[int] = []
    manifest = build_manifest(model, told.append)
    assert told[-1] == manifest.full_bytes
    assert len(told) == len(manifest.chunks) == 7
    assert damaged_chunks(model, manifest) == ()
    assert build_manifest(model).digest == manifest.digest
    write_at(model / "model-1.safetensors", b"\xff\xff", 2000)
    assert damaged_chunks(model, manifest) == (ChunkId(5),)
    os.truncate(model / "tokenizer.json", 3)
    (model / "config.json").unlink()
    assert damaged_chunks(model, manifest) == (ChunkId(0), ChunkId(5), ChunkId(6))


def test_a_missing_chunk_is_a_fault(model: Path) -> None:
    assert digest_of(read_chunk(model, Chunk("config.json", 1, 4))) == digest_of(b'"arc')
    with pytest.raises(IntegrityFault, match="shorter"):
        read_chunk(model, Chunk("config.json", 0, 4096))
    with pytest.raises(StoreFault, match="No such file"):
        read_chunk(model, Chunk("konfig.json", 0, 1))


def test_pages_that_are_on_the_disk_leave_the_page_cache(model: Path) -> None:
    weights = model / "model-0.safetensors"
    before = weights.read_bytes()
    sync(weights)
    if not in_page_cache(weights):
        pytest.skip("this file system does not tell what is in the page cache")
    leave_page_cache(model)
    assert not in_page_cache(weights)
    assert weights.read_bytes() == before
    leave_page_cache(model / "is not there")


def lie_about_the_header(model: Path) -> None:
    write_at(model / "model-0.safetensors", (100 << 20).to_bytes(8, "little"), 0)


def lie_about_the_size(model: Path) -> None:
    path = model / "model-0.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")


def nest(model: Path) -> None:
    (model / "extra" / "deeper").mkdir()


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda model: (model / "modeling.py").touch(), "forbidden file 'modeling.py'"),
        (lambda model: (model / "extra" / "x.bin").touch(), "forbidden file 'extra/x.bin'"),
        (lambda model: (model / ".hidden.json").touch(), "forbidden file name"),
        (lambda model: (model / "a b.json").touch(), "forbidden file name"),
        (lambda model: (model / "link.json").symlink_to(model / "config.json"), "symbolic link"),
        (lambda model: (model / "folder").symlink_to("/etc"), "symbolic link"),
        (lambda model: os.mkfifo(model / "pipe.json"), "neither"),
        (nest, "neither"),
        (
            lie_about_the_header,
            r"model-0.safetensors: its safetensors header claims 104857600 bytes; at most",
        ),
        (lie_about_the_size, "model-0.safetensors: its header describes"),
        (lambda model: (model / "model-0.safetensors").write_bytes(b""), "too short"),
        (lambda model: (model / "config.json").unlink(), "no config.json"),
        (lambda model: (model / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda model: [path.unlink() for path in model.glob("*.safetensors")], "no .safetensors"),
        (shutil.rmtree, "No such file"),
    ],
)
def test_a_bad_model_directory_is_refused_in_one_line(
    model: Path, spoil: Callable[[Path], object], complaint: str
) -> None:
    spoil(model)
    with pytest.raises(OperatorFault, match=complaint) as caught:
        scan_snapshot(model)
    assert "\n" not in str(caught.value)


def test_a_lack_of_descriptors_is_no_fault_of_the_caller(model: Path) -> None:
    with no_descriptor_left(), pytest.raises(StoreFault, match="Too many open files"):
        scan_snapshot(model)


def test_an_adopted_snapshot_has_links_to_the_files(model: Path, tmp_path: Path) -> None:
    files = adopt_snapshot(model, tmp_path / "published")
    assert files == scan_snapshot(model) == scan_snapshot(tmp_path / "published")
    assert (tmp_path / "published/config.json").samefile(model / "config.json")
    shutil.rmtree(model)
    assert scan_snapshot(tmp_path / "published") == files


def test_an_adopted_snapshot_has_copies_if_links_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    files = adopt_snapshot(model, tmp_path / "published")
    assert scan_snapshot(tmp_path / "published") == files
    assert not (tmp_path / "published/config.json").samefile(model / "config.json")


def test_a_failed_adoption_leaves_nothing(model: Path, tmp_path: Path) -> None:
    adopt_snapshot(model, tmp_path / "published")
    with pytest.raises(StoreFault, match="exists already"):
        adopt_snapshot(model, tmp_path / "published")
    (model / "evil.py").touch()
    with pytest.raises(OperatorFault):
        adopt_snapshot(model, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "published"]


def test_an_adoption_on_a_full_disk_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(StoreFault, match="No space left"):
        adopt_snapshot(model, tmp_path / "published")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

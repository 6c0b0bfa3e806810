"""The file operations under the stores."""

import os
from pathlib import Path

import pytest

from echo2d.errors import StoreFault
from echo2d.store.disk import allocate, read_at, replace_file, store_faults, write_at


def test_short_writes_and_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pwrite, pread = tmp_path / "file", os.pwrite, os.pread
    allocate(path, 12)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 5), offset))
    write_at(path, b"0123456789", 1)
    assert read_at(path, 12, 0) == b"\x000123456789\x00"
    assert read_at(path, 99, 10) == b"9\x00"
    assert read_at(path, 5, 50) == b""


def test_allocating_space_keeps_the_bytes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    allocate(path, 3)
    allocate(path, 5, sparse=True)
    allocate(tmp_path / "empty", 0)
    assert path.read_bytes() == b"abc\0\0"


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    (tmp_path / "file.new").write_bytes(b"left over from a crash, and longer")
    for data in (b"first", b"", b"second"):
        replace_file(path, data, durable=durable)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with (
        pytest.raises(StoreFault, match=r"writing .*link failed: Too many levels"),
        store_faults("writing", tmp_path / "link"),
    ):
        write_at(tmp_path / "link", b"x", 0)
    assert (tmp_path / "target").read_bytes() == b"precious"

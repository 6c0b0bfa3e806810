"""Files that are written past the page cache: their bytes, digests and failures."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from echo2d.client import StoreFault
from echo2d.learner.saving import direct
from echo2d.learner.saving.direct import DIRECT_BLOCK_BYTES, DirectFile, DirectFileSystem
from echo2d.learner.saving.files import store_faults
from tests.support.full_disk import files_up_to


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BUFFER_BYTES", 2 * DIRECT_BLOCK_BYTES)


def written(path: Path, parts: list[bytes]) -> str:
    """The digest of a file that is written part by part."""
    size = 0
    with DirectFile(path) as file:
        for part in parts:
            assert file.write(part) == len(part)
            size += len(part)
            assert file.tell() == size
    file.close()
    return file.digest


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [1],
        [DIRECT_BLOCK_BYTES],
        [2 * DIRECT_BLOCK_BYTES],
        [3, 2 * DIRECT_BLOCK_BYTES, 5],
        [7 * DIRECT_BLOCK_BYTES + 11, 1],
        [100] * 500,
    ],
)
def test_a_file_has_the_written_bytes_and_their_digest(tmp_path: Path, sizes: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    digest = written(tmp_path / "file", parts)
    data = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == data
    assert digest == blake3(data).hexdigest()


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_is_written_on_a_file_system_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The file system refuses them when the file is opened, or at the first write."""
    opened, write, calls = os.open, os.write, []

    def open_otherwise(path: Path, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT and refused == "open":
            calls.append("open")
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode, **more)

    def write_otherwise(file: int, part: memoryview) -> int:
        if refused == "write" and not calls:
            calls.append("write")
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(file, part)

    monkeypatch.setattr(os, "open", open_otherwise)
    monkeypatch.setattr(os, "write", write_otherwise)
    data = os.urandom(5 * DIRECT_BLOCK_BYTES + 1)
    assert written(tmp_path / "file", [data]) == blake3(data).hexdigest()
    assert (tmp_path / "file").read_bytes() == data
    assert calls == [refused]


@pytest.mark.parametrize("room", [0, DIRECT_BLOCK_BYTES, 3 * DIRECT_BLOCK_BYTES])
def test_a_full_disk_is_reported(tmp_path: Path, room: int) -> None:
    with (
        files_up_to(room),
        pytest.raises(StoreFault, match="File too large"),
        store_faults("cannot write", tmp_path / "file"),
    ):
        written(tmp_path / "file", [os.urandom(5 * DIRECT_BLOCK_BYTES)])


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    written(tmp_path / "file", [b"x"])
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")


def test_only_files_with_tensors_are_written_past_the_page_cache(tmp_path: Path) -> None:
    files = DirectFileSystem()
    for name in ("__0_0.distcp", ".metadata"):
        with files.create_stream(tmp_path / name, "wb") as stream:
            assert isinstance(stream, DirectFile) is name.endswith("distcp")
            stream.write(b"abc")
    assert files.digests == {"__0_0.distcp": blake3(b"abc").hexdigest()}
    with files.create_stream(tmp_path / ".metadata", "rb") as stream:
        assert stream.read() == b"abc"

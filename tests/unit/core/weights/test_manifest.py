"""Files, names, limits, the chunk grid and the snapshot digest."""

from dataclasses import replace

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest
from echo2d.core.weights.manifest import (
    CHUNK_BYTES,
    CHUNKS_MAX,
    SNAPSHOT_BYTES_MAX,
    SNAPSHOT_FILES_MAX,
    Chunk,
    FileEntry,
    Manifest,
    check_files,
    check_path,
    chunk_layout,
    split_digests,
)
from echo2d.core.weights.safetensors_header import HEADER_BYTES_MAX
from echo2d.errors import IntegrityFault

CONFIG = FileEntry("config.json", 10, 0)
WEIGHTS = FileEntry("model.safetensors", 2 * CHUNK_BYTES + 108, 108)


def digests(count: int) -> tuple[Digest, ...]:
    return tuple(digest_of(bytes([index])) for index in range(count))


MANIFEST = Manifest((CONFIG, WEIGHTS), digests(4))


@pytest.mark.parametrize(
    "path",
    [
        "config.json",
        "model-00001-of-00002.safetensors",
        "_a/tokenizer.model",
        "a.py.txt",
        "chat_template.jinja",
    ],
)
def test_allowed_names_are_accepted(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "", "a", ".json", "a.py", "a.bin", "a.pt", "a.pkl", "a.json.py", "../a.json", "/a.json", "a//b.json",
        "a/../b.json", "a/b/c.json", "-rf.json", "a b.json", "a\n.json", "a.json\n", "ä.json", ".git/a.json",
        "a\\b.json", "a\0.json", "x" * 129 + ".json", "a.JSON",
    ],
)  # fmt: skip
def test_forbidden_names_are_refused(path: str) -> None:
    with pytest.raises(IntegrityFault, match="forbidden"):
        check_path(path)


@pytest.mark.parametrize(
    "files",
    [
        (),
        (WEIGHTS, CONFIG),
        (CONFIG, CONFIG),
        (FileEntry("a.json", 0, 0),),
        (FileEntry("a.json", 10, 8),),
        (FileEntry("a.json", SNAPSHOT_BYTES_MAX + 1, 0),),
        (FileEntry("a.safetensors", 10, 0),),
        (FileEntry("a.safetensors", 10, 7),),
        (FileEntry("a.safetensors", 10, 11),),
        (FileEntry("a.safetensors", 1 << 30, HEADER_BYTES_MAX + 9),),
        (FileEntry("a.json", 1, 0), FileEntry("a.json/b.json", 1, 0)),
        tuple(FileEntry(f"{index:05d}.json", 1, 0) for index in range(SNAPSHOT_FILES_MAX + 1)),
    ],
)
def test_impossible_files_are_refused(files: tuple[FileEntry, ...]) -> None:
    with pytest.raises(IntegrityFault):
        check_files(files)


def test_files_are_cut_into_the_chunk_grid() -> None:
    assert chunk_layout((CONFIG, WEIGHTS)) == (
        Chunk("config.json", 0, 10),
        Chunk("model.safetensors", 0, 108),
        Chunk("model.safetensors", 108, CHUNK_BYTES),
        Chunk("model.safetensors", 108 + CHUNK_BYTES, CHUNK_BYTES),
    )


def test_a_long_header_is_cut_too() -> None:
    long_header = FileEntry("m.safetensors", CHUNK_BYTES + 20, CHUNK_BYTES + 5)
    assert [chunk.length for chunk in chunk_layout((long_header,))] == [CHUNK_BYTES, 5, 15]


def test_the_worst_snapshot_stays_within_the_chunk_limit() -> None:
    worst = [
        FileEntry(f"{index:05d}.safetensors", CHUNK_BYTES + 9, 8)
        for index in range(SNAPSHOT_FILES_MAX)
    ]
    assert len(chunk_layout(worst)) == 3 * SNAPSHOT_FILES_MAX <= CHUNKS_MAX
    largest = [FileEntry("a.safetensors", SNAPSHOT_BYTES_MAX, 8)]
    assert len(chunk_layout(largest)) <= CHUNKS_MAX


def test_the_snapshot_digest_covers_names_sizes_and_bytes() -> None:
    others = [
        Manifest((replace(CONFIG, path="konfig.json"), WEIGHTS), digests(4)),
        Manifest((replace(CONFIG, size=11), WEIGHTS), digests(4)),
        Manifest((CONFIG, replace(WEIGHTS, header_bytes=109)), digests(4)),
        Manifest((CONFIG, WEIGHTS), (*digests(3), digest_of(b"other"))),
    ]
    assert len({manifest.digest for manifest in (MANIFEST, *others)}) == 5
    assert MANIFEST.digest == Manifest((CONFIG, WEIGHTS), digests(4)).digest


def test_a_manifest_round_trips() -> None:
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST
    assert MANIFEST.full_bytes == 10 + 2 * CHUNK_BYTES + 108


def test_a_manifest_has_one_digest_a_chunk() -> None:
    for wrong in (digests(3), digests(5), (*digests(3), Digest(b"short"))):
        with pytest.raises(IntegrityFault):
            Manifest((CONFIG, WEIGHTS), wrong)


@pytest.mark.parametrize("data", [b"", b"\x90", MANIFEST.encode()[:-1], MANIFEST.encode() + b"\0"])
def test_a_damaged_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityFault):
        Manifest.decode(data)


def test_joined_digests_can_be_split_again() -> None:
    assert split_digests(b"".join(digests(3))) == digests(3)
    with pytest.raises(IntegrityFault):
        split_digests(bytes(33))

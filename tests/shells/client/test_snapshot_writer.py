"""Files are written as given, in parts of any size, and the manifest equals that of hashing the files."""

import itertools
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from echo2d.client import IntegrityFault, OperatorFault, SnapshotFile, write_snapshot
from echo2d.core.weights.manifest import CHUNK_BYTES, Manifest
from echo2d.store.snapshots import build_manifest

WEIGHTS = save({"a": np.arange(2 * CHUNK_BYTES + 999, dtype=np.uint8), "b": np.ones(7, np.float32)})
HEADER = 8 + int.from_bytes(WEIGHTS[:8], "little")
SMALL = [SnapshotFile(name, 2, 0, [b"{}"]) for name in ("tokenizer.json", "config.json")]


def weights(parts: Sequence[bytes], size: int = len(WEIGHTS)) -> SnapshotFile:
    return SnapshotFile("model.safetensors", size, HEADER, parts)


def cut_at(*places: int) -> list[bytes]:
    edges = [0, *sorted(places), len(WEIGHTS)]
    return [WEIGHTS[start:end] for start, end in itertools.pairwise(edges)]


PARTS: dict[str, Callable[[], list[bytes]]] = {
    "one": lambda: [WEIGHTS],
    "at the header": lambda: cut_at(HEADER),
    "drawn": lambda: cut_at(*random.Random(5).choices(range(len(WEIGHTS)), k=300)),
    "more than one call can write": lambda: [
        *cut_at(*range(HEADER, HEADER + 5000, 2)),
        b"",
    ],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_files_and_manifest_are_right(tmp_path: Path, parts: Callable[[], list[bytes]]) -> None:
    manifest = write_snapshot(tmp_path, [*SMALL, weights(parts())])
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert Manifest.decode(manifest) == build_manifest(tmp_path)


def test_a_file_is_whole_although_the_disk_takes_a_little_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return pwritev(descriptor, [buffers[0][:700_001]], offset)

    monkeypatch.setattr(os, "pwritev", slow)
    manifest = write_snapshot(tmp_path, [*SMALL, weights(cut_at(HEADER, 1_000_000))])
    assert Manifest.decode(manifest) == build_manifest(tmp_path)


@pytest.mark.parametrize(("size", "word"), [(-1, "more"), (1, "fewer")])
def test_parts_must_fill_the_file(tmp_path: Path, size: int, word: str) -> None:
    with pytest.raises(
        OperatorFault, match=rf"model.safetensors: expected \d+ bytes; found {word}"
    ):
        write_snapshot(tmp_path, [weights([WEIGHTS], len(WEIGHTS) + size)])


def test_a_forbidden_file_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityFault, match="forbidden file"):
        write_snapshot(tmp_path, [SnapshotFile("run.py", 1, 0, [b"x"])])

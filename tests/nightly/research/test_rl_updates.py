"""The snapshots on which deltas are measured: each is a small step from the one before, and they are repeatable."""

import sys
from pathlib import Path

import numpy as np
import pytest

from echo2d.core.weights.delta import ChunkMode, encode_chunk
from echo2d.core.weights.manifest import chunk_layout
from echo2d.store.snapshots import build_manifest, read_chunk, scan_snapshot
from echo2d_lab.research.rl_updates import main


def make(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    arguments = ["--size", "0.5m", "--pretrain", "2", "--steps", "3", "--keep", "2", "--lr", "1e-5"]
    monkeypatch.setattr(sys, "argv", ["rl_updates.py", str(out), *arguments])
    main()
    return out / "1e-5"


def test_consecutive_versions_differ_by_a_small_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path / "one", monkeypatch)
    old, new = (run / name for name in ("v2", "v3"))
    assert sorted(run.iterdir()) == [old, new]
    chunk = max(chunk_layout(scan_snapshot(new)), key=lambda each: each.length)
    sides = read_chunk(new, chunk), read_chunk(old, chunk)
    words = [np.frombuffer(side, "<u2") for side in sides]
    assert 0.02 < np.mean(words[0] != words[1]) < 0.15
    assert encode_chunk(*sides).mode in (ChunkMode.SPARSE, ChunkMode.SPLIT)
    again = make(tmp_path / "two", monkeypatch)
    assert build_manifest(again / "v3").digest == build_manifest(new).digest

"""Small files of a run with one flipped bit, cut short, or missing: one line, and never another meaning."""

import json
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from echo2d.core.base.ids import PublishSeq, RunId
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import load_or_make_key, public_bytes
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.run_dir.run_directory import (
    COORDINATOR_FILE,
    RunDirectory,
    announce,
    find_coordinator,
)
from echo2d.store.json_log import JsonLog, read_json_log


def each_bit(content: bytes) -> list[bytes]:
    """The content with one bit flipped, for each of its bits."""
    found = []
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        found.append(bytes(changed))
    return found


def accepted(folder: Path) -> tuple[Path, Callable[[], object]]:
    state = StateDir(folder / "state")
    state.keep_publish_seq(RunId("r"), PublishSeq(30))
    return folder / "state" / "accepted.json", lambda: state.publish_seq(RunId("r"))


def key(folder: Path) -> tuple[Path, Callable[[], object]]:
    path = folder / "worker.key"
    load_or_make_key(path)
    return path, lambda: public_bytes(load_or_make_key(path))


def address(folder: Path) -> tuple[Path, Callable[[], object]]:
    run = RunDirectory(folder / "run")
    announce(run, "https://10.0.0.1:7700")
    return run.path / COORDINATOR_FILE, lambda: find_coordinator(run.path)


@pytest.mark.parametrize("make", [accepted, key, address])
def test_no_flipped_bit_and_no_cut_gives_another_meaning(
    tmp_path: Path, make: Callable[[Path], tuple[Path, Callable[[], object]]]
) -> None:
    path, read = make(tmp_path)
    content, sound = path.read_bytes(), read()
    for damaged in (*each_bit(content), *(content[:end] for end in range(len(content)))):
        path.write_bytes(damaged)
        with suppress(OperatorFault):
            assert read() == sound, damaged


def test_a_damaged_line_of_a_log_is_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [{"step": step, "reward": step / 8} for step in range(3)]
    JsonLog(tmp_path, "log", 1 << 20).append(lines)
    path = tmp_path / "log.jsonl"
    content = path.read_bytes()
    assert [json.loads(line)["step"] for line in content.splitlines()] == [0, 1, 2]
    for damaged in random.Random(1).sample(each_bit(content), 200):
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = [(line["step"], line["reward"]) for line in read_json_log(tmp_path, "log")]
        assert all(
            (line["step"], line["reward"]) in found or "damaged" in caplog.text for line in lines
        )
        assert set(found) <= {(line["step"], line["reward"]) for line in lines}

"""Tracking: every number reaches its board, and no board, disk or network ever holds up or ends the learner."""

import importlib.util
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from echo2d.client import OperatorFault
from echo2d.learner.metrics import tracking
from echo2d.learner.metrics.tracking import (
    QUEUE_MAX,
    TRACKER_FAILURES_MAX,
    SampleTable,
    Tracking,
    makers,
    numbers_in,
)
from tests.support.full_disk import files_up_to

ROW = {
    "step": 1,
    "batch": "ab12",
    "loss": -0.5,
    "by_staleness": {0: {"answers": 8, "reward": 0.25}},
}
NUMBERS = {"step": 1, "loss": -0.5, "by_staleness/0/answers": 8, "by_staleness/0/reward": 0.25}


GROUPS = [
    {
        "group": 7,
        "task": "sums",
        "prompt": "1 + 1?",
        "samples": [
            {
                "answer": "<b>2</b> |\n",
                "reward": 1.0,
                "finish": "stop",
                "versions": [3, 4],
                "worker": "w",
            },
            {
                "answer": [5, 6],
                "reward": 0.0,
                "finish": "length",
                "versions": [3, 3],
                "worker": "v",
            },
        ],
    }
]
TABLE = [
    [7, "sums", "1 + 1?", "<b>2</b> |\n", 1.0, "stop", 3, "w"],
    [7, "sums", "1 + 1?", "5 6", 0.0, "length", 3, "v"],
]


class Shown:
    """A board that keeps what it is shown. Its first `failures` calls fail."""

    def __init__(self, failures: int = 0) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.tables: list[SampleTable] = []
        self.closed = 0
        self.calls = 0
        self._failures = failures

    def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None:
        self.calls += 1
        self.tables.append(samples)
        if self.calls <= self._failures:
            raise ConnectionError("no network")
        self.rows.append((step, numbers))

    def close(self) -> None:
        self.closed += 1


def rows(out_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def test_numbers_in_nested_tables_are_found_by_name() -> None:
    assert dict(numbers_in(ROW)) == NUMBERS


def test_each_row_is_a_line_and_reaches_every_board(tmp_path: Path) -> None:
    one, other = Shown(), Shown()
    tracker = Tracking(tmp_path, {"one": lambda: one, "other": lambda: other})
    tracker.record(ROW)
    tracker.record({**ROW, "step": 2})
    tracker.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert one.rows == other.rows == [(1, NUMBERS), (2, {**NUMBERS, "step": 2})]
    assert (one.closed, other.closed) == (1, 1)


def test_samples_reach_the_boards_as_a_table_and_not_the_file(tmp_path: Path) -> None:
    board = Shown()
    tracker = Tracking(tmp_path, {"board": lambda: board})
    tracker.record(ROW, GROUPS)
    tracker.record(ROW)
    tracker.close()
    assert board.tables == [TABLE, []]
    assert "1 + 1?" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_board_that_fails_now_and_then_is_not_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = Shown(failures=TRACKER_FAILURES_MAX - 1)
    tracker = Tracking(tmp_path, {"board": lambda: board})
    for step in range(TRACKER_FAILURES_MAX):
        tracker.record({**ROW, "step": step})
    tracker.close()
    assert [step for step, _ in board.rows] == [TRACKER_FAILURES_MAX - 1]
    assert (
        caplog.text.count("cannot track tracker=board reason=ConnectionError no network")
        == TRACKER_FAILURES_MAX - 1
    )


def test_a_board_that_always_fails_is_given_up_and_the_others_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Shown:
        raise RuntimeError("not logged in")

    good = Shown()
    tracker = Tracking(tmp_path, {"broken": broken, "good": lambda: good})
    for step in range(2 * TRACKER_FAILURES_MAX):
        tracker.record({**ROW, "step": step})
    tracker.close()
    assert len(good.rows) == len(rows(tmp_path)) == 2 * TRACKER_FAILURES_MAX
    assert caplog.text.count("RuntimeError not logged in") == TRACKER_FAILURES_MAX
    assert f"gave up tracker=broken failures={TRACKER_FAILURES_MAX}" in caplog.text


def test_the_learner_does_not_wait_for_a_board_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_CLOSE_S", 0.01)
    go_on = threading.Event()

    class Hangs(Shown):
        def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None:
            go_on.wait()

    tracker = Tracking(tmp_path, {"hangs": Hangs})
    for step in range(QUEUE_MAX + 3):
        tracker.record({"step": step})
    tracker.close()
    go_on.set()
    assert len(rows(tmp_path)) == QUEUE_MAX + 3
    assert f"{QUEUE_MAX} rows wait for it" in caplog.text
    assert "left behind tracker=hangs" in caplog.text


def test_a_full_disk_costs_rows_but_leaves_no_half_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracking(tmp_path, {})
    tracker.record(ROW)
    room = (tmp_path / "metrics.jsonl").stat().st_size
    with files_up_to(room + 10):
        tracker.record({**ROW, "step": 2})
    tracker.record({**ROW, "step": 3})
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]
    assert "cannot track step=2" in caplog.text


def test_a_full_file_is_renamed_and_a_new_one_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracking(tmp_path, {})
    tracker.record(ROW)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(tracking, "METRICS_BYTES_MAX", 2 * size)
    for step in range(2, 6):
        tracker.record({**ROW, "step": step})
    assert [row["step"] for row in rows(tmp_path)] == [5]
    older = (tmp_path / "metrics.1.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in older] == [3, 4]


def test_a_learner_without_tracking_makes_no_board(tmp_path: Path) -> None:
    def never() -> Shown:
        raise AssertionError

    Tracking(tmp_path, {"never": never}).close()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_reported_at_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        OperatorFault,
        match=rf"learner.track: {name} is not installed; run .* install .*{name}",
    ):
        makers([name], tmp_path)


def test_tensorboard_reads_the_rows_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_CLOSE_S", 50.0)  # torch is imported meanwhile
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    tracker = Tracking(tmp_path, makers(["tensorboard"], tmp_path))
    for step in (1, 2):
        tracker.record({**ROW, "step": step, "loss": -0.5 * step}, GROUPS if step == 2 else ())
    tracker.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(NUMBERS)
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(1, -0.5), (2, -1.0)]
    (shown,) = events.Tensors("samples/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    assert shown.step == 2
    assert "| 7 | sums | 1 &#43; 1&#63; | &#60;b&#62;2&#60;&#47;b&#62; &#124; | 1&#46;0 |" in text
    assert (tmp_path / "tensorboard").stat().st_mode & 0o777 == 0o700


OFFLINE = """
import sys
from pathlib import Path
from echo2d.learner.metrics import tracking
from echo2d.learner.__main__ import end_with

tracking.CLOSE_S = 50.0
assert sys.stdin.isatty()
tracker = tracking.Tracking(Path(), tracking.makers(["wandb"], Path()))
group = {"group": 7, "task": "sums", "prompt": "1 + 1?", "samples": [
    {"answer": "2", "reward": 1.0, "finish": "stop", "versions": [3, 4], "worker": "w"}]}
for step in (1, 2):
    row = {"step": step, "loss": -0.5, "by_staleness": {0: {"reward": 0.25}}}
    tracker.record(row, [group] if step == 2 else ())
tracker.close()
end_with(0)
"""


def test_weights_and_biases_asks_for_no_login_and_works_offline(tmp_path: Path) -> None:
    """The program runs at a terminal, where wandb would ask."""
    terminal, ours = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**kept, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], stdin=ours, cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False, timeout=55,
    )  # fmt: skip
    os.close(terminal)
    os.close(ours)
    assert done.returncode == 0, done.stderr
    assert "not logged in tracker=wandb" in done.stderr
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    history = history_of(path)
    assert [
        (step, {name: value for name, value in row.items() if not name.startswith("samples/")})
        for step, row in history
    ] == [(step, {"step": step, "loss": -0.5, "by_staleness/0/reward": 0.25}) for step in (1, 2)]
    (table,) = path.parent.glob("files/media/table/samples_*.json")
    assert json.loads(table.read_text())["data"] == [
        [7, "sums", "1 + 1?", "2", 1.0, "stop", 3, "w"]
    ]
    assert [row.get("samples/nrows") for _, row in history] == [None, 1]


def history_of(path: Path) -> list[tuple[int, dict[str, float]]]:
    """The steps in a run's own file, without what it notes by itself.

    LevelDB's log: 7 bytes, then records of CRC (4), length (2), kind (1); one block of 32 KiB is enough here.
    """
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, found = path.read_bytes(), 7, []
    assert len(data) < 1 << 15
    while at < len(data):
        start = at + 7
        at = start + int.from_bytes(data[start - 3 : start - 1], "little")
        record = messages.Record.FromString(data[start:at])
        if record.WhichOneof("record_type") == "history":
            items = {
                "/".join(item.nested_key) or item.key: item.value_json
                for item in record.history.item
            }
            numbers = {name: json.loads(value) for name, value in items.items() if name[0] != "_"}
            found.append((json.loads(items["_step"]), numbers))
    return found


ENDS = """
import atexit, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from echo2d.learner.__main__ import end_with

atexit.register(time.sleep, 50)  # a board that waits for its network
pool = ThreadPoolExecutor(1)  # as a checkpoint has one
pool.submit(lambda: (time.sleep(0.3), Path("saved").touch()))
pool.shutdown(wait=False)
print("said")
end_with(3)
"""


def test_the_program_ends_when_its_threads_have_and_waits_for_no_library(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=40
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"said\n", b"")
    assert (tmp_path / "saved").exists()

"""Tracking: every number reaches its board, and no board, disk or network ever holds up or ends the learner."""

import contextlib
import importlib.util
import json
import os
import pty
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from echo2d.client import OperatorFault
from echo2d.learner.metrics import tracking
from echo2d.learner.metrics.tracking import (
    QUEUE_MAX,
    TRACKER_FAILURES_MAX,
    SampleTable,
    TrackedRun,
    Tracking,
    makers,
    numbers_in,
)
from tests.support.full_disk import files_up_to
from tests.support.polling import poll

BOARDS = ("tensorboard", "wandb", "mlflow", "trackio")

ROW = {
    "step": 1,
    "batch": "ab12",
    "loss": -0.5,
    "by_staleness": {0: {"answers": 8, "reward": 0.25}},
}
NUMBERS = {"loss": -0.5, "by_staleness/0/answers": 8, "by_staleness/0/reward": 0.25}


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


def no_run() -> TrackedRun:
    raise AssertionError("no board is made before the first row")


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
    assert dict(numbers_in(ROW)) == {"step": 1, **NUMBERS}


def test_each_row_is_a_line_and_reaches_every_board(tmp_path: Path) -> None:
    one, other = Shown(), Shown()
    tracker = Tracking(tmp_path, {"one": lambda: one, "other": lambda: other})
    tracker.record(ROW)
    tracker.record({**ROW, "step": 2})
    tracker.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert one.rows == other.rows == [(1, NUMBERS), (2, NUMBERS)]
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
    told = caplog.text.count("cannot track tracker=board reason=ConnectionError no network")
    assert told == 1, "failures in a row are told once"


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
    assert caplog.text.count("RuntimeError not logged in") == 1
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
    assert caplog.text.count(f"{QUEUE_MAX} rows wait for it") == 1
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


@pytest.mark.parametrize("name", BOARDS)
def test_a_missing_package_is_reported_at_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        OperatorFault,
        match=rf"learner.track: {name} is not installed; run .* install .*{name}",
    ):
        makers([name], no_run)


# Shows three steps and waits to be killed, or goes on after step 2 and closes its board.
SHOWS = """
import sys
from pathlib import Path
from echo2d.learner.__main__ import end_with
from echo2d.learner.metrics import tracking

tracking._CLOSE_S = 50.0
name, resumed_at, out_dir = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
run = tracking.TrackedRun("run-1", out_dir, resumed_at, {"lr": 1e-05, "track": [name], "loss": ""})
tracker = tracking.Tracking(out_dir, tracking.makers([name], lambda: run))
group = {"group": 7, "task": "sums", "prompt": "1 + 1?", "samples": [
    {"answer": "<b>2</b> |", "reward": 1.0, "finish": "stop", "versions": [3, 4], "worker": "w"}]}
scale = 10.0 if resumed_at else 1.0
for step in range(resumed_at + 1, resumed_at + 4):
    row = {"step": step, "loss": scale * step, "kl": float("nan"), "tags": {"level=0.5": 1.0, "/a//b/": 2.0}}
    tracker.record(row, [group] if step == 4 else ())
if not resumed_at:
    sys.stdin.read()
tracker.record({"step": 5, "eval": {"held": {"mean": 0.75}}})
tracker.close()
end_with(0)
"""
Numbers = dict[tuple[str, int], list[float]]


def shown_by_tensorboard(out_dir: Path) -> tuple[Numbers, str]:
    """The values that a board shows, by name and step, the oldest first; the settings and the samples as text."""
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    folder, found = out_dir / "tensorboard", Numbers()
    if not any(folder.glob("events.*")):
        return found, ""
    events = reader.EventAccumulator(str(folder)).Reload()
    for name in events.Tags()["scalars"]:
        for each in events.Scalars(name):
            found.setdefault((name, each.step), []).append(each.value)
    texts = [events.Tensors(name)[-1] for name in events.Tags()["tensors"]]
    return found, " ".join(each.tensor_proto.string_val[0].decode() for each in texts)


def shown_by_wandb(out_dir: Path) -> tuple[Numbers, str]:
    found, texts = Numbers(), []
    for path in sorted((out_dir / "wandb").glob("offline-run-*/*.wandb")):
        for step, row in history_of(path):
            for name, value in row.items():
                found.setdefault((name, step), []).append(value)
        for run in (record.run for record in records_of(path) if record.HasField("run")):
            assert run.run_id == "run-1"
            texts.append(str(run.config))
        texts += [each.read_text() for each in path.parent.glob("files/**/*.table.json")]
    return found, " ".join(texts)


def asked(database: Path, question: str) -> list[Any]:
    if not database.exists():
        return []
    with contextlib.closing(sqlite3.connect(database)) as opened:
        try:
            return opened.execute(question).fetchall()
        except sqlite3.OperationalError:
            return []  # the board has not made the table yet


def shown_by_mlflow(out_dir: Path) -> tuple[Numbers, str]:
    database, found = out_dir / "mlflow" / "mlflow.db", Numbers()
    for name, step, value in asked(
        database, "SELECT key, step, value FROM metrics ORDER BY timestamp"
    ):
        found.setdefault((name, step), []).append(value)
    assert len(asked(database, "SELECT * FROM runs")) <= 1
    samples = [path.read_text() for path in (out_dir / "mlflow").rglob("samples/*.md")]
    return found, f"{asked(database, 'SELECT key, value FROM params')} {samples}"


def shown_by_trackio(out_dir: Path) -> tuple[Numbers, str]:
    database, found = out_dir / "trackio" / "echo2d.db", Numbers()
    texts = [str(asked(database, "SELECT config FROM configs"))]
    for run, step, metrics in asked(
        database, "SELECT run_name, step, metrics FROM metrics ORDER BY id"
    ):
        assert run == "run-1"
        for name, value in json.loads(metrics).items():
            found.setdefault((name, step), []).append(value)
            texts += [str(value)] if name == "samples" else []
    return found, " ".join(texts)


def environment_of(name: str, home: Path) -> dict[str, str]:
    """Without the developer's own settings of boards. Skips the test if the board's package is missing."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install '.[{name}]'")
    foreign = ("WANDB_", "MLFLOW_", "TRACKIO_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return {**kept, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}


SHOWN: dict[str, Callable[[Path], tuple[Numbers, str]]] = {
    "tensorboard": shown_by_tensorboard,
    "wandb": shown_by_wandb,
    "mlflow": shown_by_mlflow,
    "trackio": shown_by_trackio,
}


@pytest.mark.parametrize(
    "name",
    # The others take up to half a minute.
    ["tensorboard", *(pytest.param(name, marks=pytest.mark.nightly) for name in BOARDS[1:])],
)
def test_a_learner_that_goes_on_after_a_kill_shows_its_rows_in_the_same_run(
    name: str, tmp_path: Path
) -> None:
    shown, folder, environment = SHOWN[name], tmp_path / name, environment_of(name, tmp_path)
    words = [sys.executable, "-c", SHOWS, name]
    first = subprocess.Popen(
        [*words, "0", str(tmp_path)], stdin=subprocess.PIPE, cwd=tmp_path, env=environment
    )
    try:
        poll(lambda: ("loss", 2) in shown(tmp_path)[0], interval_s=0.2)
    finally:
        first.kill()
        first.communicate()
    subprocess.run([*words, "2", str(tmp_path)], cwd=tmp_path, env=environment, check=True)
    numbers, text = shown(tmp_path)
    assert [numbers["loss", step][-1] for step in (1, 2)] == [1.0, 2.0]
    assert [numbers["loss", step][-1] for step in (3, 4, 5)] == [30.0, 40.0, 50.0]
    assert len(numbers["loss", 3]) <= (1 if name == "tensorboard" else 2), "it was shown twice"
    assert numbers["eval/held/mean", 5] == [0.75]
    assert sum(step == 4 and "level" in tag for tag, step in numbers) == 1
    assert "lr" in text
    assert "sums" in text
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(tmp_path.glob("mlruns*")), "nothing is written beside it"


UNREACHABLE = """
import sys, time
from pathlib import Path
from echo2d.learner.__main__ import end_with
from echo2d.learner.metrics import tracking

tracking._CLOSE_S = 8.0
run = tracking.TrackedRun("run-1", Path(), 0, {})
tracker = tracking.Tracking(Path(), tracking.makers(sys.argv[1:], lambda: run))
tracker.record({"step": 1, "loss": 0.5})
began = time.monotonic()
tracker.close()
print(time.monotonic() - began)
end_with(0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", BOARDS[1:])
def test_the_learner_ends_although_the_server_of_a_board_does_not_answer(
    name: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        remote = {
            "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "MLFLOW_TRACKING_URI": url,
            "TRACKIO_SERVER_URL": url, "TRACKIO_WRITE_TOKEN": "secret",
        }  # fmt: skip
        environment = {**environment_of(name, tmp_path), **remote}
        done = subprocess.run(
            [sys.executable, "-c", UNREACHABLE, name], cwd=tmp_path, env=environment, text=True,
            capture_output=True, check=True, timeout=40,
        )  # fmt: skip
        silent.setblocking(False)
        silent.accept()[0].close()  # BlockingIOError: the board never tried
    assert 8.0 <= float(done.stdout.splitlines()[-1]) < 12.0
    assert f"left behind tracker={name} waiting=" in done.stderr
    assert [row["step"] for row in rows(tmp_path)] == [1]


OFFLINE = """
import sys
from pathlib import Path
from echo2d.learner.metrics import tracking
from echo2d.learner.__main__ import end_with

tracking._CLOSE_S = 50.0
assert sys.stdin.isatty()
run = tracking.TrackedRun("run-1", Path(), 0, {})
tracker = tracking.Tracking(Path(), tracking.makers(["wandb"], lambda: run))
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
    environment = environment_of("wandb", tmp_path)
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
    ] == [(step, {"loss": -0.5, "by_staleness/0/reward": 0.25}) for step in (1, 2)]
    (table,) = path.parent.glob("files/media/table/samples_*.json")
    assert json.loads(table.read_text())["data"] == [
        [7, "sums", "1 + 1?", "2", 1.0, "stop", 3, "w"]
    ]
    assert [row.get("samples/nrows") for _, row in history] == [None, 1]


def records_of(path: Path) -> Iterator[Any]:
    """LevelDB's log: 7 bytes, then records of CRC (4), length (2), kind (1); one block of 32 KiB is enough here."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at = path.read_bytes(), 7
    assert len(data) < 1 << 15
    while at < len(data):
        start = at + 7
        at = start + int.from_bytes(data[start - 3 : start - 1], "little")
        yield messages.Record.FromString(data[start:at])


def history_of(path: Path) -> list[tuple[int, dict[str, float]]]:
    """The steps in a run's own file, without what it notes by itself."""
    found = []
    for record in records_of(path):
        if record.HasField("history"):
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

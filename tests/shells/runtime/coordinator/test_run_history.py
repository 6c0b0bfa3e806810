"""The curves of a run: in memory, in their log, and after a restart."""

import asyncio
import json
from pathlib import Path

import pytest

from echo2d.core.cluster.step_history import StepSummary
from echo2d.runtime.coordinator.run_history import COLUMNS, HISTORY_STEPS_MAX, RunHistory
from echo2d.store.json_log import _with_sum
from tests.support.polling import poll


def summary(step: int, reward: float | None = 0.5) -> StepSummary:
    return StepSummary(
        step=step, reward=reward, staleness=1.0, trajectories=4, tokens=100, t_train_s=2.0,
        wait_s=None, tokens_per_s=50.0, dropped=0, t_bcast_s=None, entropy=1.5, grad_norm=0.1,
        parts={"right": 0.5},
    )  # fmt: skip


def steps(history: RunHistory, since: int = 0) -> list[int]:
    return [row[COLUMNS.index("step")] for row in json.loads(history.of(since))["rows"]]


def test_the_history_gives_the_rows_after_a_step(tmp_path: Path) -> None:
    history = RunHistory(tmp_path, clock=lambda: 7.0)
    for step in range(1, 5):
        history.tell(summary(step))
    found = json.loads(history.of(3))
    assert found["columns"] == list(COLUMNS)
    assert found["rewound"] == 0
    assert found["rows"] == [
        [
            7.0,
            1.5,
            None,
            None,
            0.1,
            None,
            None,
            None,
            None,
            4,
            0.5,
            1.0,
            4,
            100,
            2.0,
            None,
            50.0,
            0,
            None,
            {"right": 0.5},
            {},
        ]
    ]
    assert steps(history) == [1, 2, 3, 4]


def test_a_step_that_is_trained_again_removes_later_steps_from_the_history(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    for step in (1, 2, 3, 4, 2):
        history.tell(summary(step))
    assert steps(history) == [1, 2]
    assert json.loads(history.of(0))["rewound"] == 1


def test_the_history_of_a_long_run_stays_visible_and_bounded(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    for step in range(5 * HISTORY_STEPS_MAX):
        history.tell(summary(step))
    found = steps(history, -1)
    assert HISTORY_STEPS_MAX // 2 <= len(found) <= HISTORY_STEPS_MAX
    assert (found[0], found[-1]) == (0, 5 * HISTORY_STEPS_MAX - 1)
    assert found == sorted(found)
    assert found[-1] - found[-2] == 1, "the newest part is whole"


async def test_a_restart_reads_the_history_from_its_log(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    keeping = asyncio.create_task(history.keep())
    for step in range(1, 4):
        history.tell(summary(step, reward=None))
    file = tmp_path / "history.jsonl"
    await asyncio.to_thread(
        poll, lambda: file.exists() and len(file.read_bytes().splitlines()) == 3
    )
    keeping.cancel()
    again = RunHistory(tmp_path)
    await asyncio.to_thread(again.recover)
    assert again.of(0) == history.of(0)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        "{}",
        '{"step": "9"}',
        '{"step": 9, "reward": "<b>"}',
        '{"step": 9, "parts": {"right": "<b>"}}',
        '{"step": 9, "at"',
    ],
)
def test_a_malformed_line_of_the_log_is_skipped(tmp_path: Path, line: str) -> None:
    lines = [_with_sum(each) for each in (line, '{"step": 3, "reward": 1}')]
    (tmp_path / "history.jsonl").write_bytes(b"".join(each + b"\n" for each in lines))
    history = RunHistory(tmp_path)
    history.recover()
    assert steps(history) == [3]

"""The advice about a failing task's files depends on the files of this host."""

from pathlib import Path

import pytest

from echo2d.config.tasks import TaskTable
from echo2d.runtime.coordinator.task_advice import advice
from echo2d.tasks.process import TaskFailed

HERE = Path(__file__)
NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory"
NOT_ALLOWED = "PermissionError: [Errno 13] Permission denied"
READS = "name the file in task.read_paths: a task can read only these and its rows"
WRITES = "a task may write only in its own temporary folder, tempfile.gettempdir()"


@pytest.mark.parametrize(
    ("reason", "source", "said"),
    [
        (f"{NO_FILE}: '{HERE}'", "open(path)", READS),
        (f"{NO_FILE}: '{HERE}.gone'", "open(path)", ""),
        (f"{NO_FILE}: '{HERE}.log'", 'open(path, "a")', WRITES),
        (f"{NO_FILE}: 'nsjail'", "subprocess.run(['nsjail'])", ""),
        (f"{NOT_ALLOWED}: '{HERE}'", "open(path, 'rb')", READS),
        (f"{NOT_ALLOWED}: '{HERE}'", "open(path, mode='wb')", WRITES),
        (f"{NOT_ALLOWED}: '{HERE}'", "path.write_text(text)", WRITES),
        (f"OSError: [Errno 30] Read-only file system: '{HERE}'", "", WRITES),
    ],
)
def test_a_file_behind_the_walls_is_named_with_the_key(reason: str, source: str, said: str) -> None:
    assert advice(TaskFailed("error", reason, trace=source), TaskTable(kind="rows")) == said

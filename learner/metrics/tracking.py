r"""Record the metrics of train steps: in metrics.jsonl always, in TensorBoard and Weights & Biases
if configured.

    row of a train step --> metrics.jsonl
                       \--> a queue per board --> its thread: numbers like "by_staleness/2/kl"

A full metrics.jsonl becomes metrics.1.jsonl, and a new one is begun.
Tracking never stops or delays training. A failure (full disk, no network, broken package) is logged,
and the file or the board lacks the row. The learner waits for boards only when it closes, for _CLOSE_S. A
missing package is an OperatorFault at the start. A step that is trained again after a crash has two
rows, of which the last one counts.
"""

import errno
import importlib
import importlib.util
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from echo2d.client import OperatorFault
from echo2d.extras import install_command

# Failures in a row after which a board is closed: a full disk may recover, a broken package will not.
TRACKER_FAILURES_MAX = 5
QUEUE_MAX = 1024  # rows waiting for a board: minutes of a fast run, days of a slow one
# The most bytes of metrics.jsonl, and of metrics.1.jsonl: each holds a hundred thousand train steps.
METRICS_BYTES_MAX = 256 << 20
_CLOSE_S = 20.0  # seconds at the end of a run to show the waiting rows

Row = tuple[int, Mapping[str, float], "SampleTable"]
# One row for each sample; SAMPLE_COLUMNS names its cells.
SampleTable = Sequence[Sequence[Any]]
SAMPLE_COLUMNS = ("group", "task", "prompt", "answer", "reward", "finish", "version", "worker")

log = logging.getLogger("echo2d.learner")


class Board(Protocol):
    """Shows numbers and samples by step. Its methods may block and may raise any exception."""

    def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None: ...

    def close(self) -> None: ...


class Tracking:
    """Writes rows to the file and to all boards. makers: a constructor of each board, by name; it is
    called in the board's thread, at the first row.
    """

    def __init__(self, out_dir: Path, makers: Mapping[str, Callable[[], Board]]) -> None:
        self._path = out_dir / "metrics.jsonl"
        self._boards = [_BoardThread(name, make) for name, make in makers.items()]

    @property
    def has_boards(self) -> bool:
        return bool(self._boards)

    def record(self, row: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record one train step; row["step"] is its number. Errors of the disk and of boards are
        logged, not raised.

        groups: of the step, from `Coordinator.samples`; boards show them as a table.
        """
        try:
            _append(self._path, json.dumps(row) + "\n")
        except OSError as error:
            log.warning(
                "cannot track step=%s in=%s reason=%s", row["step"], self._path, error.strerror
            )
        for board in self._boards:
            board.put((row["step"], dict(numbers_in(row)), sample_table(groups)))

    def close(self) -> None:
        for board in self._boards:
            board.close()


class _BoardThread:
    """A board with its queue and the thread that makes and feeds it."""

    def __init__(self, name: str, make: Callable[[], Board]) -> None:
        self._name, self._make = name, make
        self._rows: queue.Queue[Row | None] = queue.Queue(QUEUE_MAX)
        self._thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        self._thread.start()

    def put(self, row: Row | None) -> None:
        """Queue a row; None ends the thread after all rows before it. A full queue drops rows."""
        if not self._thread.is_alive():
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            log.warning("cannot track tracker=%s reason=%d rows wait for it", self._name, QUEUE_MAX)

    def close(self) -> None:
        self.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("left behind tracker=%s waiting=%d", self._name, self._rows.qsize())

    def _work(self) -> None:
        board: Board | None = None
        failures = 0
        while failures < TRACKER_FAILURES_MAX:
            row = self._rows.get()
            try:
                if row is None:
                    return None if board is None else board.close()
                board = board or self._make()
                board.show(*row)
                failures = 0
            except Exception as error:  # noqa: BLE001 - packages may raise anything
                failures += 1
                reason = " ".join(f"{type(error).__name__} {error}".split())
                log.warning("cannot track tracker=%s reason=%s", self._name, reason)
                if row is None:
                    return None
        return log.warning("gave up tracker=%s failures=%d", self._name, TRACKER_FAILURES_MAX)


def makers(names: Sequence[str], out_dir: Path) -> dict[str, Callable[[], Board]]:
    """Constructors of the boards in `learner.track`. OperatorFault: a package is missing."""
    known: dict[str, Callable[[Path], Board]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
    }
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise OperatorFault(
                f"learner.track: {name} is not installed; run {install_command(name)}"
            )
    return {name: partial(known[name], out_dir) for name in names}


def numbers_in(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of the row and of the mappings in it, with a path such as
    "by_staleness/2/kl".
    """
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def sample_table(groups: Sequence[Mapping[str, Any]]) -> SampleTable:
    """A row of SAMPLE_COLUMNS for each sample of these groups."""
    return [
        [
            group["group"],
            group["task"],
            _words(group["prompt"]),
            _words(sample["answer"]),
            sample["reward"],
            sample["finish"],
            sample["versions"][0],
            sample["worker"],
        ]
        for group in groups
        for sample in group["samples"]
    ]


def _words(text: str | Sequence[int]) -> str:
    """The text, or token ids if the coordinator has no tokenizer."""
    return text if isinstance(text, str) else " ".join(map(str, text))


def _markdown(table: SampleTable) -> str:
    lines = [SAMPLE_COLUMNS, ["---"] * len(SAMPLE_COLUMNS), *table]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    """A cell of a markdown table. An answer's characters are escaped, so that none is markdown."""
    lines = str(value).splitlines() or [""]
    return "<br>".join(
        "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in line) for line in lines
    )


class TensorBoard:
    """Event files in <out_dir>/tensorboard."""

    def __init__(self, out_dir: Path) -> None:
        writer: Any = importlib.import_module("torch.utils.tensorboard.writer")
        self._writer = writer.SummaryWriter(str(_private(out_dir / "tensorboard")))

    def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        if samples:
            self._writer.add_text("samples", _markdown(samples), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases in <out_dir>/wandb, configured by its own variables (WANDB_MODE,
    WANDB_PROJECT ...).

    There is no login prompt: without a login the run is offline, and `wandb sync` uploads it later.
    """

    def __init__(self, out_dir: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        mode = wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            log.warning("not logged in tracker=wandb: run is offline; upload it by `wandb sync`")
            mode = "offline"
        _private(out_dir / "wandb")
        self._run = wandb.init(dir=str(out_dir), mode=mode)
        self._make_table = wandb.Table

    def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None:
        shown: dict[str, Any] = dict(numbers)
        if samples:
            columns, data = list(SAMPLE_COLUMNS), [list(row) for row in samples]
            shown["samples"] = self._make_table(columns=columns, data=data)
        self._run.log(shown, step=step)

    def close(self) -> None:
        self._run.finish()


def _private(directory: Path) -> Path:
    """Make a directory that only its owner can read, because prompts and answers may be in it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


def _append(path: Path, line: str) -> None:
    """Append the whole line or nothing: a part of a line would make the file unreadable."""
    data = line.encode()
    if path.exists() and path.stat().st_size + len(data) > METRICS_BYTES_MAX:
        path.replace(path.with_suffix(".1.jsonl"))
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(data) < len(data):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

r"""Record the metrics of train steps: in metrics.jsonl always, and on the boards of `learner.track`.

    row of a train step --> metrics.jsonl
                       \--> a queue per board --> its thread: numbers like "by_staleness/2/kl"

A full metrics.jsonl becomes metrics.1.jsonl, and a new one is begun.
Tracking never stops or delays training. A failure (full disk, no network, broken package) is logged,
and the file or the board lacks the row. The learner waits for boards only when it closes, for _CLOSE_S. A
missing package is an OperatorFault at the start. A step that is trained again after a crash has two
rows, of which the last one counts.

A board is a class with `show` and `close`, made from a `TrackedRun`, and a line of _BOARDS. Its package, its
extra and its word in `learner.track` have the same name.
"""

import errno
import importlib
import importlib.util
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from echo2d.client import OperatorFault
from echo2d.extras import install_command
from echo2d.learner.config import set_unless_set

# Failures in a row after which a board is given up: a full disk may recover, a broken package will not.
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


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a board shows the rows of."""

    name: str  # of the run; a learner that goes on with it has the same name
    out_dir: Path  # a board keeps its files in a folder of its own name there
    resumed_at: int  # a learner before may have shown later steps, which are trained again
    settings: Mapping[str, Any]  # the keys of [learner]


class Board(Protocol):
    """Shows numbers and samples by step. Its methods, and its constructor, may block and may raise any
    exception.
    """

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
            # Boards have the step beside the numbers.
            board.put((row["step"], dict(numbers_in({**row, "step": None})), sample_table(groups)))

    def close(self) -> None:
        """Wait for all boards together for at most _CLOSE_S."""
        ends_at = time.monotonic() + _CLOSE_S
        for board in self._boards:
            board.put(None)
        for board in self._boards:
            board.join(max(0.0, ends_at - time.monotonic()))


class _BoardThread:
    """A board with its queue and the thread that makes and feeds it."""

    def __init__(self, name: str, make: Callable[[], Board]) -> None:
        self._name, self._make, self._lost = name, make, False
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
            if not self._lost:
                self._warn(f"{QUEUE_MAX} rows wait for it")
            self._lost = True

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
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
                if failures == 1:
                    self._warn(f"{type(error).__name__} {error}")
                if row is None:
                    return None
        return log.warning("gave up tracker=%s failures=%d", self._name, TRACKER_FAILURES_MAX)

    def _warn(self, reason: str) -> None:
        log.warning("cannot track tracker=%s reason=%s", self._name, " ".join(reason.split()))


def makers(names: Sequence[str], run: Callable[[], TrackedRun]) -> dict[str, Callable[[], Board]]:
    """Constructors of the boards in `learner.track`. OperatorFault: a package is missing.

    run: called in the board's thread, at the first row.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise OperatorFault(
                f"learner.track: {name} is not installed; run {install_command(name)}"
            )
    return {name: partial(_made, _BOARDS[name], run) for name in names}


def _made(make: Callable[[TrackedRun], Board], run: Callable[[], TrackedRun]) -> Board:
    return make(run())


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
    rows = []
    for group in groups:
        asked = (group["group"], group["task"], _words(group["prompt"]))
        for each in group["samples"]:
            told = (_words(each["answer"]), each["reward"], each["finish"])
            rows.append([*asked, *told, each["versions"][0], each["worker"]])
    return rows


def _words(text: str | Sequence[int]) -> str:
    """The text, or token ids if the coordinator has no tokenizer."""
    return text if isinstance(text, str) else " ".join(map(str, text))


def _markdown(columns: Sequence[str], table: SampleTable) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(each) for each in row] for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    """A cell of a markdown table. An answer's characters are escaped, so that none is markdown."""
    lines = str(value).splitlines() or [""]
    return "<br>".join(
        "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in line) for line in lines
    )


class TensorBoard:
    """Event files in <out_dir>/tensorboard. If a step is trained again, the board shows only its last values."""

    def __init__(self, run: TrackedRun) -> None:
        writer: Any = importlib.import_module("torch.utils.tensorboard.writer")
        folder = str(_private(run.out_dir / "tensorboard"))
        self._writer = writer.SummaryWriter(folder, purge_step=run.resumed_at + 1)
        settings = _markdown(("key", "value"), list(run.settings.items()))
        self._writer.add_text("settings", settings, run.resumed_at)

    def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        if samples:
            self._writer.add_text("samples", _markdown(SAMPLE_COLUMNS, samples), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _LoggedRun:
    """A run of a package that has the functions of wandb. Its subclass begins the run."""

    def __init__(self, package: Any, run: Any) -> None:
        self._run, self._table = run, partial(package.Table, columns=list(SAMPLE_COLUMNS))

    def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None:
        table = {"samples": self._table(data=samples)} if samples else {}
        self._run.log({**numbers, **table}, step=step)

    def close(self) -> None:
        self._run.finish()


class WeightsAndBiases(_LoggedRun):
    """A run of Weights & Biases in <out_dir>/wandb, configured by its own variables (WANDB_MODE,
    WANDB_PROJECT ...). A step that it has is not taken again.

    There is no login prompt: without a login the run is offline, and `wandb sync` uploads it later.
    """

    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        chosen = wandb.setup().settings
        mode = chosen.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            log.warning("not logged in tracker=wandb: run is offline; upload it by `wandb sync`")
            mode = "offline"
        _private(run.out_dir / "wandb")
        same = {"id": chosen.run_id or run.name, "resume": chosen.resume or "allow"}
        found = wandb.init(dir=str(run.out_dir), mode=mode, config=dict(run.settings), **same)
        super().__init__(wandb, found)


class Trackio(_LoggedRun):
    """A run of the project "echo2d" of trackio in <out_dir>/trackio, unless its own variables say otherwise
    (TRACKIO_DIR, TRACKIO_SPACE_ID ...).
    """

    def __init__(self, run: TrackedRun) -> None:
        set_unless_set("TRACKIO_DIR", str(_private(run.out_dir / "trackio")))
        trackio: Any = importlib.import_module("trackio")
        settings = dict(run.settings)
        found = trackio.init("echo2d", name=run.name, resume="allow", config=settings)
        super().__init__(trackio, found)


class MLflow:
    """A run of MLflow in <out_dir>/mlflow, unless its own variables say otherwise (MLFLOW_TRACKING_URI,
    MLFLOW_EXPERIMENT_NAME ...). The tag echo2d.run finds it again.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        if not self._mlflow.is_tracking_uri_set():
            folder = _private(run.out_dir / "mlflow").absolute()
            self._mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
            if self._mlflow.get_experiment_by_name("echo2d") is None:
                self._mlflow.create_experiment("echo2d", (folder / "files").as_uri())
            self._mlflow.set_experiment("echo2d")
        known = f"tags.`echo2d.run` = '{run.name}'"
        found = self._mlflow.search_runs(filter_string=known, output_format="list")
        self._mlflow.start_run(
            run_id=found[0].info.run_id if found else None,
            run_name=run.name,
            tags={"echo2d.run": run.name},
        )
        # A parameter of a run never changes: these are the settings of the run's first learner.
        if not found:
            self._mlflow.log_params(dict(run.settings))

    def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None:
        # A name may have few kinds of characters, and no empty part.
        named = {
            re.sub(r"[^\w /-]|^/|/(?=/|$)", "_", name)[:250]: numbers[name] for name in numbers
        }
        self._mlflow.log_metrics(named, step=step)
        if samples:
            table = _markdown(SAMPLE_COLUMNS, samples)
            self._mlflow.log_text(table, f"samples/{step:06}.md")

    def close(self) -> None:
        self._mlflow.end_run()


_BOARDS: Mapping[str, Callable[[TrackedRun], Board]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


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

r"""Where the facts of train steps go: a file of JSON lines always, TensorBoard and Weights & Biases if asked for.

    row of a train step --> metrics.jsonl, as it is
                       \--> each board's queue --> its thread: the row's numbers, by name ("by_staleness/2/reward")

To keep books is never worth a train step: what fails (a full disk, no network, a broken package) is said in the log and
left out, and nobody waits for a board, but CLOSE_S at the end. That a package is missing is told at the start, by
OperatorFault. A step that is trained again after a crash has two rows; the last one counts.
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

FAILURES_MAX = (
    5  # of a board, in a row: a disk may have room again, a package that is broken stays so
)
QUEUE_MAX = 1024  # rows that wait for a board: of minutes of a fast run, of days of a large one
CLOSE_S = 20.0  # for what still waits when the run is over

Row = tuple[int, Mapping[str, float]]

log = logging.getLogger("echo2d.learner")


class Board(Protocol):
    """Shows numbers by step. May block, and raise anything."""

    def show(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracking:
    """All of them. makers: of boards, by name; each is called on its board's thread, when there is a first row."""

    def __init__(self, out_dir: Path, makers: Mapping[str, Callable[[], Board]]) -> None:
        self._path = out_dir / "metrics.jsonl"
        self._desks = [_Desk(name, make) for name, make in makers.items()]

    def note(self, row: Mapping[str, Any]) -> None:
        """The facts of one train step, its number under "step". Raises nothing that a disk or a board does."""
        try:
            _append(self._path, json.dumps(row) + "\n")
        except OSError as error:
            log.warning(
                "cannot track step=%s in=%s reason=%s", row["step"], self._path, error.strerror
            )
        for desk in self._desks:
            desk.put((row["step"], dict(numbers_in(row))))

    def close(self) -> None:
        for desk in self._desks:
            desk.close()


class _Desk:
    """A board, and the thread on which it is made and works."""

    def __init__(self, name: str, make: Callable[[], Board]) -> None:
        self._name, self._make = name, make
        self._rows: queue.Queue[Row | None] = queue.Queue(QUEUE_MAX)
        self._thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        self._thread.start()

    def put(self, row: Row | None) -> None:
        """None: the end."""
        if not self._thread.is_alive():
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            log.warning("cannot track tracker=%s reason=%d rows wait for it", self._name, QUEUE_MAX)

    def close(self) -> None:
        self.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("left behind tracker=%s waiting=%d", self._name, self._rows.qsize())

    def _work(self) -> None:
        board: Board | None = None
        failures = 0
        while failures < FAILURES_MAX:
            row = self._rows.get()
            try:
                if row is None:
                    return None if board is None else board.close()
                board = board or self._make()
                board.show(*row)
                failures = 0
            except Exception as error:  # noqa: BLE001 - somebody else's program, without which training goes on
                failures += 1
                reason = " ".join(f"{type(error).__name__} {error}".split())
                log.warning("cannot track tracker=%s reason=%s", self._name, reason)
                if row is None:
                    return None
        return log.warning("gave up tracker=%s failures=%d", self._name, FAILURES_MAX)


def makers(names: Sequence[str], out_dir: Path) -> dict[str, Callable[[], Board]]:
    """Of the boards in `learner.track`. OperatorFault: a package is missing."""
    known: dict[str, Callable[[Path], Board]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
    }
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise OperatorFault(
                f"learner.track: {name} is not installed; pip install 'echo2d[{name}]' brings it"
            )
    return {name: partial(known[name], out_dir) for name in names}


def numbers_in(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of the row and of the tables in it."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


class TensorBoard:
    """Event files in <out_dir>/tensorboard."""

    def __init__(self, out_dir: Path) -> None:
        writer: Any = importlib.import_module("torch.utils.tensorboard.writer")
        self._writer = writer.SummaryWriter(str(out_dir / "tensorboard"))

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases in <out_dir>/wandb. Its own settings count: WANDB_MODE, WANDB_PROJECT ...

    Nobody is asked for a login: without one the run is offline, and `wandb sync` sends it when there is one.
    """

    def __init__(self, out_dir: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        mode = wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            log.warning("not logged in tracker=wandb: it is offline; `wandb sync` sends it later")
            mode = "offline"
        self._run = wandb.init(dir=str(out_dir), mode=mode)

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _append(path: Path, line: str) -> None:
    """All of the line, or nothing of it."""
    data = line.encode()
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(data) < len(data):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

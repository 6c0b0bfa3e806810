"""The history of a run for its curves: one row for each committed step, in memory and in a log.

    <run_dir>/history.jsonl, history.1.jsonl, ...   (`store/json_log.py`)

    BatchCommitted --durable--> a row --a thread--> one line of the log; a start reads them back

At most HISTORY_STEPS_MAX rows are in memory. When there are more, every second row is dropped, so that the
whole run stays visible and its newest part is the most detailed. When a step is trained again after a
resume, its old row and all later rows are dropped. No decision depends on the history.
"""

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echo2d.core.cluster.step_history import StepSummary
from echo2d.errors import Fault, StoreFault
from echo2d.store.json_log import JsonLog, read_json_log

HISTORY_LOG = "history"
# A step takes about 400 to 900 bytes, so 18,000 steps or more fit.
HISTORY_BYTES_MAX = 16 << 20
# A page asks for all rows once, and then for the newest.
HISTORY_STEPS_MAX = 2048
# The first column is the Unix time in seconds at which the step was committed.
COLUMNS = ("at", *(field.name for field in dataclasses.fields(StepSummary)))
_COLUMNS = json.dumps(COLUMNS).encode()
REAL = (int, float, type(None))

StepRow = tuple[float | Mapping[str, float] | None, ...]

log = logging.getLogger("echo2d.coordinator")


class RunHistory:
    """See the module docstring."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory, self._clock = directory, clock
        self._files = JsonLog(directory, HISTORY_LOG, HISTORY_BYTES_MAX)
        # The step of each row, and the row's JSON.
        self._rows: list[tuple[int, bytes]] = []
        self._rewound = 0
        # At most 1,024 rows wait for the disk.
        self._waiting: asyncio.Queue[StepRow] = asyncio.Queue(1024)

    def recover(self) -> None:
        """Read back the rows of the log. Blocking; a log that cannot be read costs only the curves."""
        try:
            for line in read_json_log(self._directory, HISTORY_LOG):
                row = _row(line)
                if row is not None:
                    self._add(line["step"], row)
        except Fault as fault:
            log.warning("the curves begin again: %s", fault)

    def tell(self, summary: StepSummary) -> None:
        """Add the row of a step whose commit is durable."""
        row: StepRow = (round(self._clock(), 3), *dataclasses.astuple(summary))
        self._add(summary.step, row)
        try:
            self._waiting.put_nowait(row)
        except asyncio.QueueFull:
            log.warning("a step is missing in %s.jsonl: the disk is too slow", HISTORY_LOG)

    def of(self, since: int) -> bytes:
        """JSON of the rows of all steps after `since`. Its `rewound` says how often steps were trained again."""
        rows = b",".join(text for step, text in self._rows if step > since)
        return b'{"columns":%s,"rewound":%d,"rows":[%s]}' % (_COLUMNS, self._rewound, rows)

    async def keep(self) -> None:
        """Write lines until cancelled."""
        while True:
            rows = [await self._waiting.get()]
            rows += [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]
            lines = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
            try:
                await asyncio.to_thread(self._files.append, lines)
            except StoreFault as fault:
                log.warning("the curves lose %d steps: %s", len(lines), fault)

    def _add(self, step: int, row: StepRow) -> None:
        if self._rows and self._rows[-1][0] >= step:
            self._rewound += 1
            while self._rows and self._rows[-1][0] >= step:
                self._rows.pop()
        if len(self._rows) == HISTORY_STEPS_MAX:
            self._rows = self._rows[::2]
        self._rows.append((step, json.dumps(row, separators=(",", ":")).encode()))


def _row(line: Any) -> StepRow | None:
    """A line of the log as a row. None: another build wrote it, or it is damaged."""
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    row = tuple(line.get(name) for name in COLUMNS)
    numbers = [
        each for value in row for each in (value.values() if isinstance(value, dict) else [value])
    ]
    return row if all(type(value) in REAL for value in numbers) else None

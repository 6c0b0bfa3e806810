"""Logs which user changed the access to a run: a line for each token command, in the run directory.

echo2d token ... --> operators.jsonl --the running coordinator reads new lines--> its log
"""

import json
import logging
import os
import pwd
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from echo2d.errors import StoreFault
from echo2d.store.json_log import JsonLog, log_files

OPERATORS_LOG = "operators"
OPERATORS_BYTES_MAX = 4 << 20

log = logging.getLogger("echo2d.coordinator")


def note_order(run_dir: Path, order: str, token: str) -> None:
    """Log that this user gave an order about a token. The order is obeyed even if the disk is full."""
    entry = {"at": round(time.time(), 3), "order": order, "token": token, "by": _user()}
    try:
        JsonLog(run_dir, OPERATORS_LOG, OPERATORS_BYTES_MAX).append([entry])
    except StoreFault as fault:
        log.warning("%s %s is in no log: %s", order, token, fault)


class OperatorNews:
    """Reads the lines that are added to the newest file from now on. Blocking."""

    def __init__(self, run_dir: Path) -> None:
        self._path = log_files(run_dir, OPERATORS_LOG)[0]
        self._at = self._place()

    def take(self) -> list[dict[str, Any]]:
        """The orders since the last call."""
        file, size = self._place()
        if (file, size) == self._at:
            return []
        begin = self._at[1] if self._at[0] == file and size > self._at[1] else 0
        self._at = file, size
        found = []
        for line in self._path.read_bytes()[begin:size].splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return [each for each in found if isinstance(each, dict)]

    def _place(self) -> tuple[int, int]:
        """The file's inode and size."""
        try:
            stat = self._path.stat()
        except OSError:
            return 0, 0
        return stat.st_ino, stat.st_size


def _user() -> str:
    """The name of the user who runs this process; without one, the number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())

"""A learner's identity, by which the coordinator recognizes it after a restart, and its settings.

    out_dir/learner.id      the name of the first host, and a random number
    out_dir/learner.lock    held by the one process that runs on this directory
    out_dir/day             of --sft: the day that chat templates show
    out_dir/settings.json   the keys of [learner], as of the last start

A learner that is started again on its directory goes on with its run. Any other learner needs
--take-over.
"""

import dataclasses
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving.files import make_directory, store_faults, sync

ID_FILE, LOCK_FILE, DAY_FILE = "learner.id", "learner.lock", "day"

log = logging.getLogger("echo2d.learner")


def own(out_dir: Path, stack: ExitStack, *, take_over: bool = False, wait_s: float = 30.0) -> str:
    """The identity of this directory's learner. No other process gets it until `stack` ends, unless it
    takes over.

    OperatorFault: another process still runs on this directory after `wait_s`, without `take_over`; or
    the identity is damaged. StoreFault: the identity cannot be read or written.
    """
    make_directory("out_dir", out_dir)
    with store_faults("cannot keep the learner's identity in", out_dir):
        lock = stack.enter_context((out_dir / LOCK_FILE).open("a"))
        if not _locked(lock, 0.0 if take_over else wait_s):
            if not take_over:
                raise OperatorFault(
                    f"learner.out_dir: another learner runs on {out_dir}; stop it, or start this one "
                    "with --take-over"
                )
            # The other learner ends at its next call to the coordinator.
            threading.Thread(target=_lock_later, args=(lock,), daemon=True).start()
        path = out_dir / ID_FILE
        if not path.exists():
            _write(path)
        found = path.read_bytes().decode(errors="replace").strip()
    # The coordinator accepts at most 128 characters.
    if len(found) > 128 or with_check(found.rpartition("-")[0]) != found:
        raise OperatorFault(
            f"{path}: expected the identity of a learner; delete the damaged file, and start with "
            "--take-over"
        )
    return found


def _locked(lock: IO[str], wait_s: float) -> bool:
    """Take the lock. Returns whether this process holds it now, or the file system has no locks."""
    ends_at = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends_at:
                return False
            time.sleep(0.1)
        except OSError as error:
            # These errors mean that the file system has no locks.
            if error.errno not in {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}:
                raise
            log.warning("%s: its file system has no locks: %s", lock.name, error.strerror)
            return True
        else:
            return True


def _lock_later(lock: IO[str]) -> None:
    """Wait for the lock. This process may end first, and close the file."""
    with suppress(ValueError, OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)


def with_check(name: str) -> str:
    """The identity with a checksum, so that a damaged one is not taken for another learner's."""
    return f"{name}-{zlib.crc32(name.encode()):08x}"


def _write(path: Path) -> None:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    scratch = path.with_suffix(".new")
    with scratch.open("w") as file:
        file.write(f"{with_check(f'{host}-{secrets.token_hex(4)}')}\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)
    sync(path.parent)


# --- settings: a learner that goes on with other settings logs the differences

SETTINGS_FILE = "settings.json"


def settings_of(config: LearnerConfig) -> dict[str, Any]:
    """The keys of [learner] as JSON has them."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return found


def tell_changes(config: LearnerConfig) -> None:
    """Log each key of [learner] that has changed since the last start, and save the present ones. Blocking."""
    path = config.out_dir / SETTINGS_FILE
    now = settings_of(config)
    for key, then in _kept(path).items():
        if key in now and now[key] != then:
            log.warning("changed key=learner.%s before=%r now=%r", key, then, now[key])
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(now, indent=1))
        part.replace(path)
    except OSError as error:
        log.warning("the next start cannot log what has changed: %s: %s", path, error.strerror)


def _kept(path: Path) -> dict[str, object]:
    """The keys of the last start; empty: there was no start, or the file is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

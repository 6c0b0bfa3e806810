"""`echo2d keep backup`: copies a run while it continues, so that a restored run continues exactly once.

    1. checkpoints  pinned first, so that none is newer than the ledger
    2. ledger       copied as of one moment
    3. versions     those that the ledger names are pinned next
    4. the rest     key, tokens, access table, rentals, logs; then all pinned files are copied

A learner can resume only from a checkpoint between the ledger's last durable checkpoint and its last step.
So the ledger must know one of the pinned checkpoints. If the learner replaces all of them by newer ones
before the ledger is copied, 1 and 2 are repeated. Pinning a folder means linking all its files into the
backup. If the backup is on another file system, they are linked into a folder beside the source until
they are copied. Neither the coordinator nor a learner writes into such a file again.

Kept true: the backup is complete or absent, private, and leaves RESERVE_BYTES free on its disk.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from echo2d.errors import OperatorFault, StoreFault
from echo2d.runtime.run_dir.access_table import require_whole
from echo2d.runtime.run_dir.authority import AUTHORITY_FILE, KEY_FILE
from echo2d.runtime.run_dir.backup_files import (
    BACKUP_PARTS,
    RUN,
    BackupFacts,
    BackupFile,
    CopyProgress,
    copy_file,
    hash_file,
    make_private,
    read_manifest,
    sync_folders,
    write_manifest,
)
from echo2d.runtime.run_dir.run_directory import ACCESS_FILE, LEDGER_FILE, existing_run
from echo2d.store.disk import opened, store_faults, sync
from echo2d.store.ledger_copy import LedgerFacts, copy_database, copy_ledger
from echo2d.store.snapshots import build_manifest

log = logging.getLogger("echo2d.backup")

# This much stays free on the disk of the backup, which may be the run's own.
RESERVE_BYTES = 1 << 30
# The name of a folder with pinned files, and of the lock of a running backup.
PINS, LOCK = ".backup-", ".backup.lock"
PINNED = rf"{re.escape(PINS)}[0-9a-f]{{8}}"
CHECKPOINTS = "checkpoints"
CHECKPOINT_DIGESTS = "digests.blake3"
DATABASES = (ACCESS_FILE, "rentals.sqlite")
# In these folders, files of the same name and size have the same bytes.
LASTING = (f"{RUN}/versions/", f"{BACKUP_PARTS}/{CHECKPOINTS}/")


def back_up(
    run_dir: Path,
    target: Path,
    *,
    learner_dir: Path | None,
    reuse: Path | None,
    tell: Callable[[float], None],
) -> BackupFacts:
    """Back a run up into the new directory `target`. learner_dir: learner.out_dir, if it is on this
    host. reuse: an earlier backup; its versions and checkpoints are linked, not copied again.

    OperatorFault: an argument is wrong, or another backup is being made. StoreFault: the disk fails, or
    has too little room.
    """
    target = target.absolute()
    sources = [run_dir.absolute()] + ([] if learner_dir is None else [learner_dir.absolute()])
    _check(target, sources, run_dir, learner_dir)
    run = existing_run(run_dir)
    with store_faults("backing up to", target), ExitStack() as stack:
        _only_one(run_dir, stack)
        _sweep(sources, target)
        aside = target.with_name(f".{target.name}-{secrets.token_hex(4)}.tmp")
        stack.callback(shutil.rmtree, aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        old = None if reuse is None else read_manifest(reuse)
        if old is not None and old.run_id != run.run_id:
            raise OperatorFault(
                f"{reuse} is a backup of run {old.run_id}; this is run {run.run_id}"
            )
        work = _Backup(run_dir, learner_dir, aside, reuse, () if old is None else old.files, tell)
        ledger, checkpoint = work.take(stack)
        facts = BackupFacts(
            run_id=run.run_id,
            made_at=time.time(),
            host=socket.gethostname(),
            source=str(run_dir.absolute()),
            step=ledger.committed,
            checkpoint=checkpoint,
            files=tuple(work.files),
        )
        write_manifest(aside, facts)
        sync_folders(aside)
        aside.rename(target)
        sync(target.parent)
    return facts


class _Backup:
    """One backup that is being made in the folder `aside`."""

    def __init__(
        self,
        run_dir: Path,
        learner_dir: Path | None,
        aside: Path,
        reuse: Path | None,
        old: Sequence[BackupFile],
        tell: Callable[[float], None],
    ) -> None:
        self._run_dir, self._learner_dir, self._aside = run_dir, learner_dir, aside
        self._progress = CopyProgress(tell)
        # The files of an earlier backup that can be linked. Their folders have unique names.
        self._old_folder = reuse
        self._old = {file.path: file for file in old if file.path.startswith(LASTING)}
        self.files: list[BackupFile] = []

    def take(self, stack: ExitStack) -> tuple[LedgerFacts, int | None]:
        """Take all files. Returns the ledger's facts, and the newest checkpoint's step."""
        run = self._aside / RUN
        run.mkdir(mode=0o700)
        log = self._run_dir / f"{LEDGER_FILE}-wal"
        self._room(_bytes(self._run_dir / LEDGER_FILE) + (_bytes(log) if log.exists() else 0))
        ledger, pins = self._take_ledger(stack)
        copies = [self._run_dir / path for path in ledger.versions]
        versions = self._pin(copies, run / "versions", self._run_dir, stack)
        plain = sum(map(_bytes, _plain(self._run_dir))) + sum(map(_bytes, _logs(self._run_dir)))
        copied = [_size(pin) for pin in (*versions, *pins) if not self._is_here(pin)]
        self._progress.of = plain + sum(map(_size, (*versions, *pins))) + _bytes(run / LEDGER_FILE)
        self._room(plain + sum(copied))
        self._check_versions(versions, ledger)
        self._copy(versions, pins, stack)
        return ledger, max((_step(pin.name) for pin in pins), default=None)

    def _take_ledger(self, stack: ExitStack) -> tuple[LedgerFacts, list[Path]]:
        """Copy the ledger, and pin the checkpoints from which a learner may resume in it."""
        target = self._aside / RUN / LEDGER_FILE
        # Try five times: an attempt fails only if the learner meanwhile saves as many checkpoints as it keeps.
        for _ in range(5):
            pins, steps = self._pin_checkpoints(stack)
            ledger = copy_ledger(self._run_dir / LEDGER_FILE, target)
            fit = [step for step in steps if ledger.checkpoint <= step <= ledger.newest]
            for pin in pins:
                if _step(pin.name) not in fit:
                    shutil.rmtree(pin)
            if fit or not ledger.checkpoint or self._learner_dir is None:
                return ledger, [pin for pin in pins if pin.exists()]
            target.unlink()
        raise StoreFault(
            f"{self._learner_dir}: expected a checkpoint of step {ledger.checkpoint} or later, where "
            f"this run's learner may resume; found {_words(steps)}. Is it this run's learner.out_dir?"
        )

    def _check_versions(self, versions: Sequence[Path], ledger: LedgerFacts) -> None:
        """StoreFault: a version is not what was published. The earlier backup has compared its versions already."""
        digests = {Path(path).name: digest for path, digest in ledger.versions.items()}
        for pin in versions:
            if not self._is_old(pin) and build_manifest(pin).digest != digests[pin.name]:
                raise _damaged(f"{self._run_dir}/versions/{pin.name}", "published")

    def _copy(self, versions: Sequence[Path], pins: Sequence[Path], stack: ExitStack) -> None:
        run, learner = self._aside / RUN, self._aside / BACKUP_PARTS
        for log in _open_logs(self._run_dir, stack):
            self._keep_log(log, run / log.name)
        for path in (*_plain(self._run_dir), *sorted((self._run_dir / "tokens").glob("*.token"))):
            self._keep(path, run / path.relative_to(self._run_dir))
        for name in DATABASES:
            if (self._run_dir / name).exists():
                copy_database(self._run_dir / name, run / name)
        _check_access(run / ACCESS_FILE, self._run_dir / ACCESS_FILE)
        if self._learner_dir is not None:
            for log in _open_logs(self._learner_dir, stack):
                self._keep_log(log, learner / log.name)
            for path in _plain(self._learner_dir):
                self._keep(path, learner / path.name)
        for pin in versions:
            self._keep_folder(pin, run / "versions" / pin.name)
        for pin in pins:
            found = self._keep_folder(pin, learner / CHECKPOINTS / pin.name)
            lines = (pin / CHECKPOINT_DIGESTS).read_text(errors="replace").splitlines()
            saved = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
            if found != saved:
                raise _damaged(f"{self._learner_dir}/{CHECKPOINTS}/{pin.name}", "saved")
        for path in sorted(run.glob("*.sqlite")):
            self._note(path, hash_file(path, self._progress.add))

    def _pin_checkpoints(self, stack: ExitStack) -> tuple[list[Path], list[int]]:
        if self._learner_dir is None:
            return [], []
        folder = self._learner_dir / CHECKPOINTS
        found = [path for path in folder.glob("step-*") if (path / CHECKPOINT_DIGESTS).exists()]
        pins = self._pin(found, self._aside / BACKUP_PARTS / CHECKPOINTS, self._learner_dir, stack)
        return pins, [_step(pin.name) for pin in pins]

    def _pin(
        self, folders: Sequence[Path], target: Path, beside: Path, stack: ExitStack
    ) -> list[Path]:
        """Link folders whose files are never written again. A folder that is deleted meanwhile is left out."""
        if not folders:
            return []
        if _device(self._aside) != _device(beside):
            target = beside / f"{PINS}{secrets.token_hex(4)}"
            target.mkdir(mode=0o700)
            stack.callback(shutil.rmtree, target, ignore_errors=True)
        pins = [target / folder.name for folder in folders]
        return [
            pin
            for folder, pin in zip(folders, pins, strict=True)
            if pin.exists() or _link(folder, pin)
        ]

    def _room(self, needed: int) -> None:
        _check_room(self._aside.parent, needed)

    def _is_here(self, pin: Path) -> bool:
        """Whether a folder takes no more room: it is linked into this backup, or can be linked from
        the earlier one.
        """
        if pin.is_relative_to(self._aside):
            return True
        old = self._old_folder is not None and _device(self._old_folder) == _device(self._aside)
        return old and self._is_old(pin)

    def _is_old(self, pin: Path) -> bool:
        """Whether the earlier backup has the folder."""
        return any(f"/{pin.name}/" in path for path in self._old)

    def _keep_folder(self, pin: Path, target: Path) -> dict[str, str]:
        """Take a folder into the backup. Returns the digests of its files except CHECKPOINT_DIGESTS."""
        names = sorted(str(path.relative_to(pin)) for path in pin.rglob("*") if path.is_file())
        found = {name: self._keep(pin / name, target / name) for name in names}
        return {name: digest for name, digest in found.items() if name != CHECKPOINT_DIGESTS}

    def _keep(self, source: Path, target: Path) -> str:
        """Take one file into the backup, unless it was linked there already. Returns its digest."""
        old = self._old.get(str(target.relative_to(self._aside)))
        if old is not None and self._reuse(old, source, target):
            found = old
        elif target.exists():
            found = hash_file(target, self._progress.add)
        else:
            found = copy_file(source, target, self._progress.add)
        self._note(target, found)
        return found.digest

    def _keep_log(self, log: "_OpenLog", target: Path) -> None:
        """Take a log's whole lines as of the time when it was opened."""
        self._note(target, copy_file(log.fd, target, self._progress.add, size=log.size))

    def _reuse(self, old: BackupFile, source: Path, target: Path) -> bool:
        """Link a file from the earlier backup; returns whether that was possible."""
        assert self._old_folder is not None
        kept = self._old_folder / old.path
        try:
            if source.stat().st_size != old.size or kept.stat().st_size != old.size:
                return False
            if hash_file(kept, self._progress.add).digest != old.digest:
                log.warning("%s is damaged in the earlier backup, and is copied again", kept)
                return False
            make_private(target.parent)
            scratch = target.with_name(f"{target.name}.old")
            os.link(kept, scratch)
            scratch.replace(target)
            # If both were links to the same file, `replace` has left the scratch name in place.
            scratch.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def _note(self, target: Path, found: BackupFile) -> None:
        self.files.append(replace(found, path=str(target.relative_to(self._aside))))


def _check(target: Path, sources: Sequence[Path], run_dir: Path, learner_dir: Path | None) -> None:
    if not (run_dir / LEDGER_FILE).is_file():
        raise OperatorFault(f"{run_dir} is not the directory of a run: it has no {LEDGER_FILE}")
    if learner_dir is not None and not learner_dir.is_dir():
        raise OperatorFault(f"--learner-dir: there is no directory {learner_dir}")
    if target.exists():
        raise OperatorFault(f"{target} exists; name a new directory for each backup")
    if not target.parent.is_dir():
        raise OperatorFault(f"there is no directory {target.parent} to write the backup to")
    for source in sources:
        if target.resolve().is_relative_to(source.resolve()):
            raise OperatorFault(f"{target} is inside {source}, which is backed up")


def _check_access(copy: Path, source: Path) -> None:
    """StoreFault: the access table is damaged. A run may have none yet."""
    if copy.exists():
        with closing(sqlite3.connect(copy)) as access:
            require_whole(access, source)


def _damaged(folder: str, how: str) -> StoreFault:
    return StoreFault(
        f"{folder} is damaged: its files differ from those that were {how}. Delete that directory, and back up again; "
        "the run itself continues with other files"
    )


def _check_room(folder: Path, needed: int) -> None:
    """StoreFault: this many more bytes of a backup do not fit here."""
    free = shutil.disk_usage(folder).free
    if free - needed < RESERVE_BYTES:
        raise StoreFault(
            f"{folder} has {free} bytes free: expected {needed} for this backup, and "
            f"{RESERVE_BYTES} that stay free; make room, or name another disk with --to",
            full=True,
        )


def _only_one(run_dir: Path, stack: ExitStack) -> None:
    lock = stack.enter_context((run_dir / LOCK).open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OperatorFault(f"another backup of {run_dir} is being made") from error


def forget_killed_backups(run_dir: Path) -> None:
    """Delete the files that a killed backup has pinned in a run directory, unless a backup is being made."""
    with ExitStack() as stack, suppress(OperatorFault, OSError):
        _only_one(run_dir, stack)
        _delete(run_dir, PINNED)


def _sweep(sources: Sequence[Path], target: Path) -> None:
    """Delete the leftovers of killed backups of this run."""
    for source in sources:
        _delete(source, PINNED)
    _delete(target.parent, rf"\.{re.escape(target.name)}-[0-9a-f]{{8}}\.tmp")


def _delete(folder: Path, name: str) -> None:
    """Delete the subfolders whose names match."""
    for path in folder.iterdir():
        if path.is_dir() and re.fullmatch(name, path.name):
            shutil.rmtree(path, ignore_errors=True)


def _link(folder: Path, pin: Path) -> bool:
    """Link all files of a folder; False: it was deleted meanwhile."""
    try:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            linked = pin / path.relative_to(folder)
            make_private(linked.parent)
            try:
                os.link(path, linked)
            except FileNotFoundError:
                raise
            except OSError:
                # The file is another user's, or the file system has no links.
                _check_room(linked.parent, _bytes(path))
                copy_file(path, linked, lambda _: None)
    except FileNotFoundError:
        pass
    # Folders are renamed before they are deleted, so a folder that still exists has all of its files.
    if folder.exists():
        return True
    shutil.rmtree(pin, ignore_errors=True)
    return False


def _plain(folder: Path) -> Iterator[Path]:
    """The small files of a run directory or of learner.out_dir that are copied as they are."""
    for name in (KEY_FILE, AUTHORITY_FILE, "learner.id"):
        yield from folder.glob(name)


def _logs(folder: Path) -> list[Path]:
    """The logs in a folder. Files of one log are sorted from the newest: NAME.jsonl, NAME.1.jsonl, and so on."""
    return sorted(folder.glob("*.jsonl"), key=lambda path: (len(path.name), path.name))


@dataclass(frozen=True, slots=True)
class _OpenLog:
    """A log that is open for copying."""

    name: str  # when it was opened
    fd: int
    size: int  # of its whole lines


def _open_logs(folder: Path, stack: ExitStack) -> list[_OpenLog]:
    """Open all logs, so that nothing is lost or copied twice if a log that became too long is renamed meanwhile."""
    found: dict[int, _OpenLog] = {}
    for _ in range(2):  # the second round finds logs that were renamed during the first
        for path in _logs(folder):
            with suppress(FileNotFoundError):
                fd = stack.enter_context(opened(path, os.O_RDONLY))
                number, named = os.fstat(fd).st_ino, {log.name for log in found.values()}
                if number not in found and path.name not in named:
                    found[number] = _OpenLog(path.name, fd, _whole_lines(fd))
    return list(found.values())


def _whole_lines(fd: int) -> int:
    """The size of a log up to the end of its last whole line."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - (1 << 16))
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _bytes(path: Path) -> int:
    return path.stat().st_size


def _device(path: Path) -> int:
    return path.stat().st_dev


def _size(folder: Path) -> int:
    return sum(_bytes(path) for path in folder.rglob("*") if path.is_file())


def _step(name: str) -> int:
    return int(name.split("-")[1])


def _words(steps: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"

"""`echo2d keep restore`: makes a run directory from a backup, so that the run continues exactly once.

Every byte is verified while it is copied, and both directories are complete or absent. The restored
ledger continues above every epoch and publish number that the run may have used since the backup
(`mark_restored`), so that the old learner and workers are not mistaken for the new ones. Two
coordinators with one key would take each other's workers and boxes, so a run that still runs, as far as
this host can see, is not restored.
"""

import json
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from echo2d.errors import OperatorFault
from echo2d.net.security.auth import read_token_file
from echo2d.runtime.run_dir.backup_files import (
    BACKUP_PARTS,
    RUN,
    BackupFacts,
    CopyProgress,
    check_copy,
    copy_file,
    make_private,
    read_manifest,
    sync_folders,
)
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE, in_use
from echo2d.store.disk import store_faults, sync
from echo2d.store.ledger_copy import mark_restored

# (url, token file) -> the id of the run whose coordinator answers there; None: none answers.
# OperatorFault: one answers, but its run cannot be found out.
RunAt = Callable[[str, Path], str | None]


def restore(
    backup: Path,
    run_dir: Path,
    learner_dir: Path | None,
    tell: Callable[[float], None],
    run_at: RunAt,
) -> BackupFacts:
    """Restore a backup into new directories. learner_dir: learner.out_dir of the restored run.

    OperatorFault: a directory exists, or the run still runs. IntegrityFault: the backup is damaged.
    """
    facts = read_manifest(backup)
    targets = {RUN: run_dir.absolute()}
    if learner_dir is not None:
        targets[BACKUP_PARTS] = learner_dir.absolute()
    elif any(file.path.startswith(f"{BACKUP_PARTS}/") for file in facts.files):
        raise OperatorFault(
            "this backup has the learner's checkpoints: name the restored run's learner.out_dir with "
            "--learner-dir"
        )
    for target in targets.values():
        if target.exists():
            raise OperatorFault(f"{target} exists; a backup is restored into a new directory")
        if any(target.is_relative_to(other) for other in targets.values() if other is not target):
            raise OperatorFault(
                f"{target} is inside the other directory: name two beside each other"
            )
    _check_lock(facts)
    _check_coordinator(backup, facts, run_at)
    progress = CopyProgress(tell)
    progress.of = facts.size
    with store_faults("restoring", backup), ExitStack() as stack:
        asides = {part: _aside(target, stack) for part, target in targets.items()}
        for file in facts.files:
            part, _, path = file.path.partition("/")
            found = copy_file(backup / file.path, asides[part] / path, progress.add)
            check_copy(backup, file, found)
        mark_restored(asides[RUN] / LEDGER_FILE, age_s=time.time() - facts.made_at)
        # The run directory is renamed last: a run without its checkpoints could not continue.
        for part in sorted(targets, key=lambda part: part == RUN):
            sync_folders(asides[part])
            asides[part].rename(targets[part])
            sync(targets[part].parent)
    return facts


def _aside(target: Path, stack: ExitStack) -> Path:
    aside = target.with_name(f".{target.name}-{secrets.token_hex(4)}.tmp")
    stack.callback(shutil.rmtree, aside, ignore_errors=True)
    make_private(aside)
    return aside


def _check_lock(facts: BackupFacts) -> None:
    """OperatorFault: a coordinator runs on the directory that was backed up."""
    if in_use(Path(facts.source)):
        raise _still_runs(facts, f"in {facts.source}")


def _check_coordinator(backup: Path, facts: BackupFacts, run_at: RunAt) -> None:
    """OperatorFault: a coordinator of this run answers where this run's coordinator was."""
    token_file = backup / RUN / "tokens" / "viewer.token"
    if not token_file.exists():
        return
    url = read_token_file(token_file).url
    if url and run_at(url, token_file) == facts.run_id:
        raise _still_runs(facts, f"at {url}")


def _still_runs(facts: BackupFacts, where: str) -> OperatorFault:
    return OperatorFault(
        f"run {facts.run_id} still runs {where}: two coordinators with one key would take each other's "
        "workers; stop that one first (`echo2d keep backup --verify` checks a backup while the run goes on)"
    )


def how_to_go_on(facts: BackupFacts, run_dir: Path, learner_dir: Path | None) -> Sequence[str]:
    """Sentences that tell the operator how to continue."""
    where = json.dumps(str(run_dir))
    lines = [
        (
            f"run {facts.run_id} is there as of step {facts.step}: set run.run_dir = {where} and start "
            "echo2d coordinate"
        )
    ]
    if learner_dir is None:
        lines.append("this backup has no checkpoints: the learner resumes from those that it has")
    else:
        at = "the base model" if facts.checkpoint is None else f"step {facts.checkpoint}"
        lines.append(
            f"its learner resumes from {at}: set learner.out_dir = {json.dumps(str(learner_dir))} and "
            "start echo2d learn --resume"
        )
    return lines

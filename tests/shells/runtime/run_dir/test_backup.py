"""Backups of a run directory whose ledger is open, without a coordinator around it."""

import fcntl
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file

from echo2d.core.base.ids import Digest, Epoch, PublishSeq, Version
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.coordinator.events import CheckpointKept, EpochOpened
from echo2d.core.work.events import BatchCommitted
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault
from echo2d.runtime.run_dir import backup as backups
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.backup import LOCK, PINS, back_up, forget_killed_backups
from echo2d.runtime.run_dir.backup_files import BACKUP_MANIFEST, BackupFacts, read_manifest, verify
from echo2d.runtime.run_dir.restore import how_to_go_on, restore
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE, RunDirectory
from echo2d.store import ledger_copy
from echo2d.store.ledger import Ledger
from echo2d.store.ledger_copy import SKIPPED, LedgerFacts
from echo2d.store.sealed import sealed, unsealed
from echo2d.store.snapshots import build_manifest
from tests.support.polling import HANG_S

DIGEST = Digest(b"d" * 32)


def nobody_at(url: str, token_file: Path) -> None:
    """No coordinator answers."""


class Run:
    """A run directory and a learner's. ledger: open, as a coordinator has it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir, self.out_dir = folder, folder / "run", folder / "out"
        self.run = RunDirectory(self.run_dir)
        AccessTable(self.run).create("box", "worker")
        self.ledger = Ledger.open(self.run_dir / LEDGER_FILE)
        self.ledger.append([EpochOpened(Epoch(1), 0, "lea")])
        self.seq = 0
        self.out_dir.mkdir()
        (self.out_dir / "learner.id").write_text("lea\n")
        (self.run_dir / "samples.jsonl").write_text('{"a": 1}\n{"cut sh')

    def commit(self, step: int) -> None:
        self.ledger.append([BatchCommitted(step, Epoch(1), DIGEST, 1.0)])

    def publish(self, version: int, text: str = "weights") -> Path:
        self.seq += 1
        path = f"versions/{version}-{self.seq:08x}"
        (self.run_dir / path).mkdir(parents=True)
        for name in ("config.json", "tokenizer.json"):
            (self.run_dir / path / name).write_text("{}")
        weights = np.frombuffer(f"{text} {version:20}".encode(), np.uint8)
        save_file({"weights": weights}, self.run_dir / path / "model.safetensors")
        digest = build_manifest(self.run_dir / path).digest
        seq, epoch = PublishSeq(self.seq), Epoch(1)
        self.ledger.append([VersionPublished(seq, epoch, Version(version), digest, path, 9)])
        return self.run_dir / path

    def save(self, step: int, *, durable: int | None = None) -> Path:
        path = self.out_dir / "checkpoints" / f"step-{step:08d}-epoch-1"
        path.mkdir(parents=True)
        (path / "__0_0.distcp").write_text(f"state {step}")
        digest = blake3((path / "__0_0.distcp").read_bytes()).hexdigest()
        (path / "digests.blake3").write_text(f"{digest}  __0_0.distcp\n")
        if durable is not None:
            self.ledger.append([CheckpointKept(durable, Epoch(1))])
        return path

    def back_up(
        self, name: str = "backup", *, reuse: Path | None = None, learner: bool = True
    ) -> tuple[Path, BackupFacts]:
        target = self.folder / name
        out_dir = self.out_dir if learner else None
        facts = back_up(self.run_dir, target, learner_dir=out_dir, reuse=reuse, tell=lambda _: None)
        return target, facts


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(backups, "RESERVE_BYTES", 1 << 20)
    made = Run(tmp_path)
    yield made
    made.ledger.close()


def trained(run: Run, steps: int, *saved: int) -> None:
    for step in range(1, steps + 1):
        run.commit(step)
        run.publish(step)
    for step in saved:
        run.save(step)


def tell(share: float) -> None:
    assert 0.0 <= share <= 1.0


def test_a_backup_has_what_a_run_needs_and_is_private(run: Run) -> None:
    trained(run, 4, 2, 4)
    target, facts = run.back_up()
    names = {file.path for file in facts.files}
    assert {
        "run/run.key",
        "run/access.sqlite",
        "run/ledger.sqlite",
        "run/samples.jsonl",
        "run/versions/4-00000004/model.safetensors",
        "learner/learner.id",
        "learner/checkpoints/step-00000004-epoch-1/__0_0.distcp",
    } <= names
    assert names == {
        str(path.relative_to(target))
        for path in target.rglob("*")
        if path.is_file() and path.name != BACKUP_MANIFEST
    }
    assert (facts.step, facts.checkpoint, facts.run_id) == (4, 4, run.run.run_id)
    assert target.stat().st_mode & 0o777 == 0o700
    # A log ends with a whole line.
    assert (target / "run" / "samples.jsonl").read_text() == '{"a": 1}\n'
    assert verify(target, tell) == read_manifest(target) == facts
    assert not list(run.folder.glob(".*"))


def test_a_restored_run_uses_numbers_above_all_that_the_lost_run_used(run: Run) -> None:
    trained(run, 4, 2, 4)
    target, _ = run.back_up()
    run.ledger.close()
    made, out_dir = run.folder / "new", run.folder / "new-out"
    facts = restore(target, made, out_dir, tell, nobody_at)
    assert RunDirectory(made).run_id == run.run.run_id
    with Ledger.open(made / LEDGER_FILE) as ledger:
        recovered = ledger.recover()
        skipped = recovered.epoch - 1
        assert SKIPPED <= skipped <= SKIPPED + HANG_S
        assert recovered.publish_seq == 4 + skipped
        assert [each.version for each in recovered.published] == [1, 2, 3, 4]
        assert recovered.learner == "lea"
    assert (out_dir / "checkpoints" / "step-00000004-epoch-1" / "__0_0.distcp").exists()
    assert AccessTable(RunDirectory(made)).tokens()[0].name == "box"
    words = " ".join(how_to_go_on(facts, made, out_dir))
    assert f'run.run_dir = "{made}"' in words
    assert "resumes from step 4" in words
    # Once more, of the restored run: above what that one used.
    back_up(made, run.folder / "second", learner_dir=out_dir, reuse=None, tell=tell)
    third = run.folder / "third"
    restore(run.folder / "second", third, run.folder / "third-out", tell, nobody_at)
    with Ledger.open(third / LEDGER_FILE) as ledger:
        assert SKIPPED <= ledger.recover().epoch - recovered.epoch <= SKIPPED + HANG_S


def test_a_second_restore_of_one_backup_uses_numbers_above_those_of_the_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run, 4, 2, 4)
    target, facts = run.back_up()
    run.ledger.close()
    epochs = []
    for later_s in (10, 25):
        monkeypatch.setattr(time, "time", lambda now=facts.made_at + later_s: now)
        made = run.folder / f"new-{later_s}"
        restore(target, made, run.folder / f"out-{later_s}", tell, nobody_at)
        with Ledger.open(made / LEDGER_FILE) as ledger:
            epochs.append(ledger.recover().epoch)
    assert epochs == [1 + SKIPPED + 10, 1 + SKIPPED + 25]


def test_a_backup_deletes_nothing_that_is_not_its_own(run: Run) -> None:
    trained(run, 4, 2, 4)
    mine = run.run_dir / f"{PINS}mine"
    others = run.folder / ".backup-b-01234567.tmp"
    for folder in (mine, others):
        folder.mkdir()
    run.back_up()
    assert mine.is_dir()
    assert others.is_dir()


def test_pins_of_a_killed_backup_are_removed_when_the_coordinator_starts(run: Run) -> None:
    pins, mine = run.run_dir / f"{PINS}01234567", run.run_dir / f"{PINS}mine"
    for folder in (pins, mine):
        folder.mkdir()
    with (run.run_dir / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        forget_killed_backups(run.run_dir)
        assert pins.is_dir(), "a backup is being made"
    forget_killed_backups(run.run_dir)
    assert (pins.exists(), mine.exists()) == (False, True)


def test_two_directories_inside_each_other_are_refused_before_anything_is_copied(run: Run) -> None:
    trained(run, 4, 2, 4)
    target, _ = run.back_up()
    run.ledger.close()
    with pytest.raises(OperatorFault, match="inside the other directory"):
        restore(target, run.folder / "new", run.folder / "new" / "out", tell, nobody_at)
    assert not (run.folder / "new").exists()


def test_only_checkpoints_that_the_ledger_knows_are_backed_up(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is deleted and a newer one saved between the look at the checkpoints and the ledger."""
    trained(run, 6, 2, 4)
    looks = list[int]()

    def copy(source: Path, target: Path) -> LedgerFacts:
        looks.append(1)
        if len(looks) == 1:
            for step in (2, 4):
                shutil.rmtree(run.out_dir / "checkpoints" / f"step-{step:08d}-epoch-1")
            run.save(5)
            run.save(6, durable=5)
        return ledger_copy.copy_ledger(source, target)

    monkeypatch.setattr(backups, "copy_ledger", copy)
    target, facts = run.back_up()
    assert len(looks) == 2
    kept = sorted(path.name for path in (target / "learner" / "checkpoints").iterdir())
    assert kept == ["step-00000005-epoch-1", "step-00000006-epoch-1"]
    assert facts.checkpoint == 6


def test_the_checkpoints_of_another_learner_are_refused(run: Run) -> None:
    trained(run, 6)
    run.save(9)
    run.ledger.append([CheckpointKept(5, Epoch(1))])
    with pytest.raises(StoreFault, match=r"expected a checkpoint of step 5 or later.*found 9"):
        run.back_up()
    assert not list(run.folder.glob("*backup*"))
    # Without the learner's directory it works, and says that there is no checkpoint.
    assert run.back_up(learner=False)[1].checkpoint is None


def test_a_version_that_is_deleted_meanwhile_is_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run, 3)
    gone = run.publish(9)
    link = os.link

    def deleted(source: Path, target: Path) -> None:
        if Path(source).parent == gone and gone.exists():
            gone.rename(gone.with_name("gone"))
        link(source, target)

    monkeypatch.setattr(os, "link", deleted)
    target, _ = run.back_up()
    kept = sorted(path.name[0] for path in (target / "run" / "versions").iterdir())
    assert kept == ["1", "2", "3"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_backup_to_another_disk_copies_every_file_and_leaves_no_pin(run: Run) -> None:
    trained(run, 3, 2)
    other = Path(f"/dev/shm/echo2d-test-{os.getpid()}")
    other.mkdir()
    try:
        target = other / "backup"
        back_up(run.run_dir, target, learner_dir=run.out_dir, reuse=None, tell=tell)
        assert {path.stat().st_mode & 0o077 for path in target.rglob("*")} == {0}
        verify(target, tell)
        left = [*run.run_dir.glob(f"{PINS}*"), *run.out_dir.glob(f"{PINS}*")]
        assert [path.name for path in left if path.is_dir()] == []
    finally:
        shutil.rmtree(other)


def test_an_earlier_backup_is_reused(run: Run) -> None:
    trained(run, 3, 2)
    first, _ = run.back_up("first")
    run.publish(4)
    run.commit(4)
    second, _ = run.back_up("second", reuse=first)
    same = "run/versions/3-00000003/model.safetensors"
    assert (first / same).samefile(second / same)
    assert (second / "run/versions/4-00000004").exists()
    verify(second, tell)
    shutil.rmtree(first)
    verify(second, tell)
    stranger = Run(run.folder / "other")
    stranger.ledger.close()
    with pytest.raises(OperatorFault, match="is a backup of run"):
        back_up(stranger.run_dir, run.folder / "x", learner_dir=None, reuse=second, tell=tell)


def test_a_file_that_has_rotted_in_an_earlier_backup_is_copied_again(run: Run) -> None:
    trained(run, 3, 2)
    first, _ = run.back_up("first")
    rotten = first / "run/versions/3-00000003/model.safetensors"
    content = bytearray(rotten.read_bytes())
    content[-1] ^= 1
    # The file itself, which a version of the run may share.
    rotten.unlink()
    rotten.write_bytes(content)
    second, _ = run.back_up("second", reuse=first)
    verify(second, tell)


def test_a_killed_backup_leaves_nothing_that_looks_whole(run: Run) -> None:
    """The child is killed after each file but the last; what it left goes with the next backup."""
    trained(run, 2, 2)
    _, facts = run.back_up("whole")
    for count in range(len(facts.files)):
        child = os.fork()
        if not child:
            told = iter(range(count))

            def die(_: float, told: Iterator[int] = told) -> None:
                if next(told, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            back_up(
                run.run_dir, run.folder / "killed", learner_dir=run.out_dir, reuse=None, tell=die
            )
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert not (run.folder / "killed").exists()
    run.back_up("killed")
    assert not list(run.folder.glob(".killed*"))


def test_damage_of_a_backup_is_found(run: Run) -> None:
    trained(run, 2, 2)
    target, facts = run.back_up()
    run.ledger.close()
    for file in facts.files:
        path = target / file.path
        data = path.read_bytes()
        # In place of the file, as it may be a link to the run's own.
        path.unlink()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(IntegrityFault, match=f"{path.name} is not what was written"):
            verify(target, tell)
        with pytest.raises(IntegrityFault, match=f"{path.name} is not what was written"):
            restore(target, run.folder / "new", run.folder / "new-out", tell, nobody_at)
        path.unlink()
        with pytest.raises(IntegrityFault, match=f"lacks {file.path}"):
            verify(target, tell)
        path.write_bytes(data)
    verify(target, tell)
    assert not list(run.folder.glob("*new*"))


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format": 2, "files": 3}'])
def test_a_damaged_manifest_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / BACKUP_MANIFEST).write_text(text)
    with pytest.raises(OperatorFault, match="is damaged"):
        read_manifest(tmp_path)


def test_a_manifest_that_names_a_file_outside_the_backup_is_refused(run: Run) -> None:
    target, _ = run.back_up()
    text = (target / BACKUP_MANIFEST).read_text()
    for path in ("run/../../evil", "/evil", "other/file", "run//x"):
        facts = unsealed(text.encode())
        facts["files"] = [{**each, "path": path} for each in facts["files"]]
        (target / BACKUP_MANIFEST).write_bytes(sealed(facts))
        with pytest.raises(OperatorFault, match="is damaged"):
            restore(target, run.folder / "new", run.folder / "new-out", tell, nobody_at)
    (target / BACKUP_MANIFEST).write_text(text.replace('"format": 2', '"format": 3'))
    with pytest.raises(
        OperatorFault, match="has format 3, of a newer echo2d; this one reads format 2"
    ):
        read_manifest(target)


def test_a_backup_without_room_is_not_begun(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(StoreFault, match=r"bytes free: expected .* that stay free") as caught:
        run.back_up()
    assert caught.value.full
    assert not list(run.folder.glob("*backup*"))


def test_a_run_that_cannot_be_backed_up_is_refused(run: Run, tmp_path: Path) -> None:
    def asked(run_dir: Path, target: Path, learner_dir: Path | None = None) -> None:
        back_up(run_dir, target, learner_dir=learner_dir, reuse=None, tell=tell)

    with pytest.raises(OperatorFault, match="is not the directory of a run"):
        asked(tmp_path / "nothing", tmp_path / "b")
    with pytest.raises(OperatorFault, match="exists; name a new directory"):
        asked(run.run_dir, run.out_dir)
    with pytest.raises(OperatorFault, match=r"is inside"):
        asked(run.run_dir, run.run_dir / "backup")
    with pytest.raises(OperatorFault, match="there is no directory"):
        asked(run.run_dir, tmp_path / "no" / "b")
    with pytest.raises(OperatorFault, match="--learner-dir: there is no directory"):
        asked(run.run_dir, tmp_path / "b", tmp_path / "no")
    with pytest.raises(OperatorFault, match="is not a backup"):
        read_manifest(tmp_path)


def test_a_backup_that_cannot_be_restored_is_refused(run: Run) -> None:
    trained(run, 2, 2)
    target, _ = run.back_up()
    new, out_dir = run.folder / "new", run.folder / "new-out"
    with pytest.raises(OperatorFault, match=r"name the restored run's learner.out_dir"):
        restore(target, new, None, tell, nobody_at)
    with pytest.raises(OperatorFault, match="exists; a backup is restored into a new directory"):
        restore(target, run.run_dir, out_dir, tell, nobody_at)
    # The ledger is open: a coordinator runs there.
    with pytest.raises(OperatorFault, match=r"still runs in .*: two coordinators with one key"):
        restore(target, new, out_dir, tell, nobody_at)
    run.ledger.close()
    restore(target, new, out_dir, tell, nobody_at)


def test_a_log_renamed_during_a_backup_is_copied_exactly_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that has become long is renamed, and a new one begins."""
    newest, older, oldest = (run.run_dir / f"story{number}.jsonl" for number in ("", ".1", ".2"))
    newest.write_text('{"step": 2}\n{"st')
    older.write_text('{"step": 1}\n')
    measured = backups._whole_lines

    def rotated(fd: int) -> int:
        if not oldest.exists():
            older.replace(oldest)
            newest.replace(older)
            newest.write_text('{"step": 3}\n')
        return measured(fd)

    monkeypatch.setattr(backups, "_whole_lines", rotated)
    target, _ = run.back_up()
    verify(target, tell)
    kept = sorted((target / "run").glob("story*.jsonl"))
    assert sorted(line for path in kept for line in path.read_text().splitlines()) == [
        '{"step": 1}',
        '{"step": 2}',
    ]


def test_a_file_that_cannot_be_linked_is_copied_durably_if_there_is_room(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(source), None, str(target))

    trained(run, 2, 2)
    monkeypatch.setattr(os, "link", no_links)
    target, _ = run.back_up()
    verify(target, tell)
    usage = shutil.disk_usage(run.folder)
    room = [usage._replace(free=usage.total), usage._replace(free=0)]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room.pop(0))
    with pytest.raises(StoreFault, match=r"expected .* for this backup"):
        run.back_up("second")


def test_a_second_backup_at_the_same_time_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(source: Path, target: Path) -> LedgerFacts:
        monkeypatch.setattr(backups, "copy_ledger", ledger_copy.copy_ledger)
        with pytest.raises(OperatorFault, match=r"another backup of .* is being made"):
            run.back_up("second")
        return ledger_copy.copy_ledger(source, target)

    monkeypatch.setattr(backups, "copy_ledger", second)
    run.back_up()


def flip(path: Path) -> None:
    """One bit of the last byte but one."""
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("run/versions/2-00000002/model.safetensors", "versions/2-00000002 is damaged"),
        ("out/checkpoints/step-00000002-epoch-1/__0_0.distcp", "step-00000002-epoch-1 is damaged"),
        (
            "out/checkpoints/step-00000002-epoch-1/digests.blake3",
            "step-00000002-epoch-1 is damaged",
        ),
    ],
)
def test_a_damaged_run_is_not_backed_up_as_if_it_were_whole(run: Run, file: str, line: str) -> None:
    trained(run, 2, 2)
    flip(run.folder / file)
    with pytest.raises(StoreFault, match=line):
        run.back_up()
    assert not (run.folder / "backup").exists()


def test_a_checkpoint_with_a_truncated_list_is_not_backed_up(run: Run) -> None:
    trained(run, 2, 2)
    (run.out_dir / "checkpoints/step-00000002-epoch-1/digests.blake3").write_text("")
    with pytest.raises(StoreFault, match="is damaged"):
        run.back_up()


def test_damaged_rows_are_not_backed_up(run: Run) -> None:
    trained(run, 2, 2)
    with closing(sqlite3.connect(run.run_dir / "access.sqlite")) as access, access:
        access.execute("UPDATE tokens SET max_workers = 5000")
    with pytest.raises(StoreFault, match=r"access\.sqlite is damaged"):
        run.back_up()
    run.ledger.close()
    with closing(sqlite3.connect(run.run_dir / LEDGER_FILE)) as ledger, ledger:
        ledger.execute("UPDATE commits SET t_train_s = 2.0")
    with pytest.raises(OperatorFault, match="of commits"):
        run.back_up()

"""The directory in which a worker keeps its state between starts; one process uses it at a time.

    state_dir (0700) / lock   format   worker.key (0600)   accepted.json   paused   frames/   slots/

format has a number: the format of all the other files.
accepted.json has the highest publish_seq of the run that this worker ever accepted, so that it
still refuses roots below that number after a restart.
paused exists while the owner of the box has paused the worker (`runtime/worker/owner.py`).
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.config.limits import DISK_BYTES_MAX
from echo2d.core.base.ids import PublishSeq, RunId
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.worker.events import Standing
from echo2d.core.worker.versions import WORKER_FORMS_MAX
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault, path_fault
from echo2d.net.security.auth import Succession, TokenFile, load_or_make_key
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import replace_file, store_faults
from echo2d.store.formats import require_format
from echo2d.store.frames import FrameStore
from echo2d.store.sealed import sealed, unsealed
from echo2d.store.slots.current_slot import SLOT_NAMES
from echo2d.store.slots.slot_store import SlotStore

STATE_FORMAT = 2

log = logging.getLogger("echo2d.worker")


def open_frames(root: Path, budget: DiskBudget) -> FrameStore:
    """Open a peer's frame store and forget its older forms, which no plan will ask for again.

    It keeps the newest WORKER_FORMS_MAX forms, or fewer if they exceed the budget, but always the newest.
    """
    store = FrameStore(root, budget)
    forms = store.forms()
    for position, facts in enumerate(forms[:-1]):
        if budget.exceeded or position < len(forms) - WORKER_FORMS_MAX:
            store.forget(facts.form)
    return store


class StateDir:
    """The state directory, locked until `close`. Blocking.

    disk_bytes_max: the most bytes that frames and slots together may take.
    OperatorFault: the directory is not usable, or in use by another worker.
    """

    def __init__(self, path: Path, disk_bytes_max: int = DISK_BYTES_MAX) -> None:
        self._path = path
        self._budget = DiskBudget(disk_bytes_max)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise path_fault(f"cannot use state directory {path}", error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise OperatorFault(f"state directory {path} is in use by another worker") from error
        try:
            self._require_format()
        except (OperatorFault, StoreFault):
            self.close()
            raise

    def _require_format(self) -> None:
        path = self._path / "format"
        try:
            if not path.exists():
                replace_file(path, f"{STATE_FORMAT}\n".encode(), durable=True)
            found = int(path.read_text())
        except OSError as error:
            raise path_fault(f"cannot use {path}", error) from error
        except ValueError as error:
            raise OperatorFault(
                f"{path} is damaged: expected {STATE_FORMAT}; start with another --state-dir, or remove the file"
            ) from error
        older = "start with another --state-dir, into which the worker receives the model again"
        require_format(f"state directory {self._path}", found, STATE_FORMAT, older=older)

    def close(self) -> None:
        os.close(self._lock)

    def free_bytes(self) -> int | None:
        """The bytes that new versions can take: the free ones, and those of older versions that would be deleted.

        None: not known; writing to the disk reports the fault.
        """
        try:
            free = shutil.disk_usage(self._path).free
        except OSError:
            return None
        taken = self._budget.taken
        current, spare = sorted((taken.get(f"slot {slot}", 0) for slot in SLOT_NAMES), reverse=True)
        # The frames of the version being served stay. These frames may take as many bytes as the version's files.
        older_frames = max(0, taken.get("frames", 0) - current)
        return min(free, self._budget.left) + spare + older_frames

    def key(self) -> Ed25519PrivateKey:
        return load_or_make_key(self._path / "worker.key")

    def publish_seq(self, run_id: RunId) -> PublishSeq:
        """The highest publish_seq accepted from this run; 0 if none was.

        OperatorFault: the file is damaged, and without it old roots could be accepted.
        """
        with self._reading("accepted.json") as kept:
            return PublishSeq(int(kept["publish_seq"]) if kept.get("run_id") == run_id else 0)

    def keep_publish_seq(self, run_id: RunId, publish_seq: PublishSeq) -> None:
        """Write the number durably. StoreFault: the disk failed; the file keeps the old number."""
        path = self._path / "accepted.json"
        with store_faults("writing", path):
            replace_file(
                path,
                sealed({"run_id": run_id, "publish_seq": publish_seq}),
                durable=True,
            )

    def authority(self, token: TokenFile) -> Succession | None:
        """The authority that this worker obeys, if it is newer than the token file's.

        If the token file's is newer, it is kept at once, so that no older one is obeyed again. OperatorFault:
        authority.json is damaged, or two authorities claim the same number.
        """
        number, run_key = 0, token.run_key
        with self._reading("authority.json") as kept:
            if kept.get("run_id") == token.run_id:
                number, run_key = int(kept["number"]), str(kept["run_key"])
            if number > token.number:
                return Succession(bytes.fromhex(run_key), str(kept["authority"]), number)
        found = Succession(bytes.fromhex(token.run_key), token.authority, token.number)
        if number == token.number and number and run_key != token.run_key:
            raise OperatorFault(
                "the token file is of another authority than the one that this worker obeys: ask the run's "
                "operator for a new token file"
            )
        if token.number > number:
            self.obey(token.run_id, found)
        return None

    def obey(self, run_id: RunId, authority: Succession) -> None:
        """Keep the authority that this worker obeys from now on. OperatorFault: it cannot be written."""
        path = self._path / "authority.json"
        facts = {"run_id": run_id, "number": authority.number, "run_key": authority.run_key.hex()}
        try:
            replace_file(path, sealed({**facts, "authority": authority.authority}), durable=True)
        except OSError as error:
            raise path_fault(f"cannot write {path}", error) from error

    @contextmanager
    def _reading(self, name: str) -> Iterator[dict[str, Any]]:
        """The fields of a sealed file; none if it does not exist. OperatorFault: it is unreadable or damaged."""
        path = self._path / name
        try:
            yield unsealed(path.read_bytes()) if path.exists() else {}
        except OSError as error:
            raise path_fault(f"cannot read {path}", error) from error
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise OperatorFault(
                f"{path} is damaged: {error}; start with another --state-dir, or remove the file"
            ) from error

    def frames(self) -> FrameStore:
        """The frame store. Call `slots` first: slots have priority when disk space is short."""
        return open_frames(self._path / "frames", self._budget)

    def slots(self) -> tuple[SlotStore, tuple[Standing, ...]]:
        """The slots, and the current snapshot if there is one, every byte verified.

        A damaged current snapshot is given up.
        """
        slots = SlotStore(self._path / "slots", self._budget)
        current = slots.current()
        if current is None:
            return slots, ()
        try:
            slots.require_intact(current.directory, current.manifest.digest)
        except IntegrityFault as fault:
            log.warning("%s", fault)
            return slots, ()
        return slots, (
            Standing(VersionKey(current.version, current.manifest.digest), str(current.directory)),
        )

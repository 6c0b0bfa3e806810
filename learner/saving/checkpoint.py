"""Save and load checkpoints: all that a learner needs to resume after a crash, one directory per
step.

    <directory>/step-00000010-epoch-3/
        .metadata  __0_0.distcp ...   model and optimizer, a file per rank, by torch's DCP
        progress-0.pt ...             a file per rank: step, run, groups trained, generator states
        digests.blake3                digests of all the files above

Invariants: a kill at any moment leaves every checkpoint whole or absent, and at most `keep` stay after a
save.

With a URL, rank 0 copies each checkpoint there (`remote`) before it counts, and only the copies count
as durable, because the disk may disappear with its host. A learner loads the newest checkpoint of both
places.

Model and optimizer are copied when `save` is called and written while training goes on. If the
newest checkpoint is damaged, a warning is logged and the one before it is loaded. Therefore the step
that is reported to the coordinator as durable is that of the oldest of `keep` checkpoints. The
coordinator may delete the batches up to this step, so the batches after each checkpoint still exist.

Ranks on several hosts need one directory that all hosts see. Another number of ranks can load a
checkpoint, but without the states of the random number generators. Load only checkpoints that you
trust: parts of them are pickled.
"""

import contextlib
import logging
import pickle
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import set_crc32_options

from echo2d.client import OperatorFault
from echo2d.learner.ranks.ranks import Channel, Ranks
from echo2d.learner.saving.direct import DirectFileSystem
from echo2d.learner.saving.files import ASIDE, remove_directory, store_faults, whole_directory
from echo2d.learner.saving.remote import DIGESTS, RemoteCheckpoints
from echo2d.logs import say

PROGRESS = "progress-{}.pt"  # with the rank
_FORMAT = "format"  # key in the progress file
CHECKPOINT_FORMAT = 1
OWN = "own"  # key in the progress file: state that only the same rank can use
_LINE_MAX = 200  # characters of a torch error that are quoted; it may list all tensors
_NAME = re.compile(r"step-(\d+)-epoch-(\d+)")
_UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)

log = logging.getLogger("echo2d.learner")


class SavedCheckpoint(NamedTuple):
    """A checkpoint whose digests are right."""

    path: Path
    step: int
    epoch: int
    progress: dict[str, Any]  # that of the first rank


class Checkpoints:
    """The checkpoints in one directory, of which the newest `keep` stay. An epoch saves each step
    at most once. remote: where they are copied to, and downloaded from.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        ranks: Ranks | None = None,
        remote: RemoteCheckpoints | None = None,
    ) -> None:
        self._directory = directory
        self._remote = remote
        self._copied: list[str] = []  # the complete copies after the last save, oldest first
        self._keep = keep
        self._ranks = ranks or Ranks()
        self._channel = self._ranks.channel()
        self._saving: Future[None] | None = None
        # A copy to host memory, made before it returns. The memory is used for each save in turn, because new
        # memory costs training more time than the copy does; a GPU writes into pinned memory ten times as fast.
        on_gpu = self._ranks.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        self._began_at = 0.0
        # Seconds of the last save, from the copy until it counted; None: no save has ended.
        self.took_s: float | None = None

    def __bool__(self) -> bool:
        """Whether there is any checkpoint, here or at the URL. StoreFault: the URL cannot be reached."""
        return bool(self._all() or self._whole_copies())

    @property
    def busy_s(self) -> float:
        """Seconds until the save under way ends, if it takes as long as the last one."""
        if self._saving is None or self._saving.done():
            return 0.0
        return max(0.0, self._began_at + (self.took_s or 0.0) - time.monotonic())

    @property
    def durable(self) -> int:
        """The lowest step at which a learner may have to resume: 0, the base model, while there are
        fewer than `keep`.
        """
        found = [path.name for path in self._all()] if self._remote is None else self._copied
        steps = [_step_and_epoch(name)[0] for name in found]
        return steps[0] if len(steps) >= self._keep else 0

    def save(
        self,
        step: int,
        epoch: int,
        state: dict[str, Any],
        progress: dict[str, Any],
        own: dict[str, Any],
    ) -> None:
        """Wait for the previous save and begin this one. `state` may change as soon as this
        returns.

        state: model and optimizer, from `Policy.state`. progress: small plain values, the same on all
        ranks. own: small plain values of this rank. Checkpoints of lower epochs at this step or later
        are deleted, because their learners have been replaced.
        """
        self.settle()
        self._began_at = time.monotonic()
        copy = self._stager.stage(state)
        pool = ThreadPoolExecutor(1, "checkpoint")
        facts = {**progress, _FORMAT: CHECKPOINT_FORMAT, "step": step, OWN: own}
        self._saving = pool.submit(self._save, step, epoch, copy, facts)
        # This does not wait, but the interpreter waits for the pool's thread before it exits.
        pool.shutdown(wait=False)

    def settle(self, *, wait: bool = True) -> bool:
        """Wait for the save under way if `wait`. Returns whether it has finished, so that its checkpoint is
        durable; False if no save was under way.

        StoreFault: the save failed; earlier checkpoints still exist.
        """
        if self._saving is None or not (wait or self._saving.done()):
            return False
        saving, self._saving = self._saving, None
        saving.result()
        return True

    def load_newest(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fill `state` from the newest readable checkpoint and return its progress, with this
        rank's own under OWN.

        OWN is empty if another number of ranks made the checkpoint. OperatorFault: no checkpoint can be
        read, or it is of another model.
        """
        path, progress = self._ranks.share(self._newest)
        _load(path, state, self._channel)
        return (
            progress[self._ranks.rank]
            if len(progress) == self._ranks.size
            else {**progress[0], OWN: {}}
        )

    def find(self, step: int | None) -> SavedCheckpoint:
        """The checkpoint of a step, of the highest epoch that has one. step: None: the last one.

        OperatorFault: there is no such checkpoint, or it cannot be read.
        """
        found = {_step_and_epoch(path.name)[0]: path for path in self._all()}
        if not found:
            raise OperatorFault(f"{self._directory} has no checkpoints")
        path = found.get(max(found) if step is None else step)
        if path is None:
            there = ", ".join(map(str, found))
            raise OperatorFault(
                f"{self._directory} has no checkpoint of step {step}; it has those of steps {there}"
            )
        try:
            return SavedCheckpoint(path, *_step_and_epoch(path.name), _progress(path)[0])
        except _UNREADABLE as error:
            line = " ".join(str(error).split())
            raise OperatorFault(f"cannot read the checkpoint {path}: {line}") from error

    def _newest(self) -> tuple[Path, list[dict[str, Any]]]:
        """The newest checkpoint that can be read, with the progress of each rank that made it."""
        here, copies = {path.name for path in self._all()}, self._whole_copies()
        for name in sorted({*here, *copies}, key=_step_and_epoch, reverse=True):
            path = self._directory / name
            if name in here:
                try:
                    return path, _progress(path)
                except _UNREADABLE as error:
                    _warn(str(path), error)
            if self._remote is not None and name in copies:
                try:
                    log.info("downloading %s/%s", self._remote.url, name)
                    remove_directory(path)
                    return path, _progress(self._remote.download(name, self._directory))
                except _UNREADABLE as error:
                    _warn(f"{self._remote.url}/{name}", error)
        raise OperatorFault(f"cannot read any checkpoint in {self._directory}")

    def _whole_copies(self) -> list[str]:
        """The names of the complete copies at the URL, oldest first."""
        if self._remote is None:
            return []
        found = [name for name in self._remote.names() if _NAME.fullmatch(name)]
        return sorted(found, key=_step_and_epoch)

    def _save(self, step: int, epoch: int, state: Any, progress: dict[str, Any]) -> None:
        """Runs on all ranks at once, in the save's thread. Each rank writes its shards, and rank 0 all other
        files.
        """
        target = self._directory / f"step-{step:08d}-epoch-{epoch}"
        each = self._channel.gather(progress)
        with (
            store_faults("cannot write the checkpoint", target),
            plain_errors(),
            contextlib.ExitStack() as stack,
        ):
            aside = self._channel.share(lambda: self._begin(target, each, stack))
            digests = self._channel.gather(_save_shards(aside, state, self._channel))
            known = {name: digest for each in digests for name, digest in each.items()}
            self._channel.share(lambda: self._finish(aside, known, stack))
        self._channel.share(lambda: self._copy(target))
        if self._ranks.leads:
            for name in _surplus([path.name for path in self._all()], target.name, self._keep):
                remove_directory(self._directory / name)
        self.took_s = time.monotonic() - self._began_at
        if self._ranks.leads:
            say(log, logging.INFO, "saved", step=step, seconds=f"{self.took_s:.3f}")

    def _begin(
        self, target: Path, progress: list[dict[str, Any]], stack: contextlib.ExitStack
    ) -> Path:
        self._sweep()
        aside = stack.enter_context(whole_directory(target))
        for rank, each in enumerate(progress):
            with (aside / PROGRESS.format(rank)).open("wb") as file:
                torch.save(each, file)
        return aside

    def _finish(self, aside: Path, known: dict[str, str], stack: contextlib.ExitStack) -> None:
        if missing := _named_in(aside) - {path.name for path in aside.iterdir()}:
            found = f"{self._directory} lacks {min(missing)}, which another host wrote"
            raise OperatorFault(
                f"learner.out_dir: expected a directory that all hosts share; {found}"
            )
        (aside / DIGESTS).write_text(_digests(aside, known))
        stack.close()

    def _copy(self, target: Path) -> None:
        """Copy a checkpoint to the URL, and remove the old copies there. Runs on rank 0 only."""
        if self._remote is None:
            return
        self._remote.keep_identity(self._directory.parent)
        self._remote.upload(target)
        copies = self._whole_copies()
        surplus = _surplus(copies, target.name, self._keep)
        # Incomplete copies left by killed learners do not count as checkpoints to keep, and are deleted, except those
        # of newer epochs.
        (_, epoch), begun = _step_and_epoch(target.name), {*self._remote.begun()} - {*copies}
        left = [name for name in begun if _NAME.fullmatch(name)]
        surplus += [name for name in left if _step_and_epoch(name)[1] <= epoch]
        for name in surplus:
            self._remote.remove(name)
        self._copied = [name for name in copies if name not in surplus]

    def _all(self) -> list[Path]:
        """The checkpoints in the directory, oldest first."""
        return sorted(
            (path for path in self._directory.glob("step-*") if _NAME.fullmatch(path.name)),
            key=lambda path: _step_and_epoch(path.name),
        )

    def _sweep(self) -> None:
        """Delete the files of learners that were killed during a save."""
        for path in self._directory.glob(f"{ASIDE}*"):
            shutil.rmtree(path, ignore_errors=True)


def _step_and_epoch(name: str) -> tuple[int, int]:
    named = _NAME.fullmatch(name)
    assert named is not None
    return int(named[1]), int(named[2])


def _surplus(found: Sequence[str], target: str, keep: int) -> list[str]:
    """The old checkpoints among these, oldest first, once `target` is saved. Those of newer epochs stay,
    because this learner may have been replaced and not know it yet.
    """
    step, epoch = _step_and_epoch(target)
    earlier = [name for name in found if _step_and_epoch(name)[0] < step]
    kept = {target, *earlier[max(0, len(earlier) + 1 - keep) :]}
    return [name for name in found if name not in kept and _step_and_epoch(name)[1] <= epoch]


def _warn(where: str, error: BaseException) -> None:
    log.warning("cannot read the checkpoint %s: %s", where, " ".join(str(error).split()))


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise torch's error about a failed write as the OSError that caused it."""
    try:
        yield
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise _os_error(cause) from None
    except RuntimeError as error:
        raise _os_error(error) from None


def silence_single_process_warning() -> None:
    """Silence torch's warning about a missing process group. Filters of warnings are global, so this
    silences all threads.
    """
    warnings.filterwarnings(
        "ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning
    )


def _os_error(error: BaseException) -> BaseException:
    """The first of two errors: after a failed write torch closes the file, fails again and reports
    only the second failure.
    """
    return error.__context__ if isinstance(error.__context__, OSError) else error


def _save_shards(directory: Path, state: Any, channel: Channel) -> dict[str, str]:
    """Save this rank's shards and return the digests of their files. Each rank syncs its own files to disk,
    because no other host can do that.
    """
    silence_single_process_warning()
    # The digests show damage; checksums of the tensors in the files would cost as much again.
    set_crc32_options(compute_crc32=False)
    writer = FileSystemWriter(directory, sync_files=channel.group is not None)
    writer.fs = files = DirectFileSystem()
    save(state, storage_writer=writer, process_group=channel.group, no_dist=channel.group is None)
    return files.digests


def _progress(path: Path) -> list[dict[str, Any]]:
    """The progress of each rank, after a check of all bytes. ValueError: they have changed since
    they were saved.
    """
    if _digests(path) != (path / DIGESTS).read_text():
        raise ValueError("its bytes are not those that were saved")
    files = [
        path / PROGRESS.format(rank) for rank in range(len(list(path.glob(PROGRESS.format("*")))))
    ]
    found = [
        torch.load(file, map_location="cpu", weights_only=True)
        for file in files or [path / PROGRESS.format(0)]
    ]
    for each in found:
        _require_format(path, each.get(_FORMAT))
        if each["step"] != _step_and_epoch(path.name)[0]:
            raise ValueError(f"it is of step {each['step']}")
    return found


def _require_format(path: Path, found: object) -> None:
    """OperatorFault: the checkpoint has another format. No older one is loaded then: a person must decide that."""
    if found != CHECKPOINT_FORMAT:
        raise OperatorFault(
            f"the checkpoint {path} has format {found}; this learner reads format "
            f"{CHECKPOINT_FORMAT}: go on with the echo2d that wrote it, or begin a new run from its "
            "newest model (`echo2d keep export`)"
        )


def _load(path: Path, state: dict[str, Any], channel: Channel) -> None:
    silence_single_process_warning()
    reader = FileSystemReader(path)
    try:
        _same_weights(reader, state)
        load(
            state, storage_reader=reader, process_group=channel.group, no_dist=channel.group is None
        )
    except (CheckpointException, RuntimeError, ValueError, KeyError) as error:
        (cause, _), *_ = (
            error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        )
        line = " ".join(str(cause).split())
        raise OperatorFault(
            f"the checkpoint {path} does not fit learner.model: {line[:_LINE_MAX]}"
        ) from error


def _same_weights(reader: FileSystemReader, state: dict[str, Any]) -> None:
    """ValueError: the checkpoint has other weights. Torch would silently load the matching ones."""
    saved = {
        name for name in reader.read_metadata().state_dict_metadata if name.startswith("model.")
    }
    if saved != {f"model.{name}" for name in state.get("model", {})}:
        raise ValueError("it has other trained weights")


def _named_in(directory: Path) -> set[str]:
    """The names of the files with the shards of all ranks."""
    return {
        place.relative_path
        for place in FileSystemReader(directory).read_metadata().storage_data.values()
    }


def _digests(directory: Path, known: Mapping[str, str] = MappingProxyType({})) -> str:
    """A line for each file except the digest file itself. known: digests of files that need not be read."""
    files = sorted(path for path in directory.iterdir() if path.name != DIGESTS)
    return "".join(
        f"{known.get(path.name) or blake3().update_mmap(path).hexdigest()}  {path.name}\n"
        for path in files
    )

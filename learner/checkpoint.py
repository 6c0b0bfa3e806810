"""Checkpoints: what a learner needs to go on after any crash, one directory per step.

    <directory>/step-00000010-epoch-3/    .metadata  __0_0.distcp        model and optimizer, by torch's DCP
                                          progress-0.pt                  the step, whose it is, what is a rank's own
                                          digests.blake3                 of all these

Each rank writes its shards (__1_0.distcp ...) and has a progress of its own (progress-1.pt ...), so several hosts need
a directory that all of them see. Another number of ranks can go on from it, without what each had of its own.
Model and optimizer are copied when `save` is called and written while training goes on. A damaged newest checkpoint is
said, and the one before it is used. So a step is reported to the coordinator as durable, which deletes its batches,
only when it is the oldest of all that are kept: whichever is used, its next batches are there.
Kept true: at most `keep` stay once a save is over, and a kill at any moment leaves each of them whole, or not there.
They are pickled, in part: read only those that a learner of yours has made.
"""

import contextlib
import logging
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from echo2d.client import OperatorFault
from learner.files import ASIDE, remove_directory, store_faults, whole_directory
from learner.ranks import Channel, Ranks

PROGRESS = "progress-{}.pt"  # of a rank
OWN = "own"  # in it: what the same rank alone has use for
DIGESTS = "digests.blake3"
LINE_MAX = 200  # characters of what torch says, which may be a list of all tensors
_NAME = re.compile(r"step-(\d+)-epoch-(\d+)")
_UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)

log = logging.getLogger("echo2d.learner")


class Checkpoints:
    """The checkpoints in one directory; the newest `keep` stay. An epoch saves a step once."""

    def __init__(self, directory: Path, keep: int, ranks: Ranks | None = None) -> None:
        self._directory = directory
        self._keep = keep
        self._ranks = ranks or Ranks()
        self._channel = self._ranks.channel()
        self._saving: Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._all())

    @property
    def durable(self) -> int:
        """The lowest step that a learner may have to resume at; 0, the base model, until there are `keep`."""
        steps = [_place(path)[0] for path in self._all()]
        return steps[0] if len(steps) >= self._keep else 0

    def save(
        self,
        step: int,
        epoch: int,
        state: dict[str, Any],
        progress: dict[str, Any],
        own: dict[str, Any],
    ) -> None:
        """Begin to save, after the save before is over. state may change as soon as this returns.

        state: tensors and what else of model and optimizer; progress: small and plain; own: the same, of this rank.
        What learners of lower epochs saved of this step or later ones is of no use any more.
        """
        self.settle()
        copy = DefaultStager(StagingOptions(*[False] * 4)).stage(state)
        pool = ThreadPoolExecutor(1, "checkpoint")
        self._saving = pool.submit(
            self._save, step, epoch, copy, {**progress, "step": step, OWN: own}
        )
        pool.shutdown(wait=False)  # the process does not end before the save does

    def settle(self, *, wait: bool = True) -> bool:
        """Whether a save is over now and was not before: durable. StoreFault: the disk refused it.

        All that was there before then still is.
        """
        if self._saving is None or not (wait or self._saving.done()):
            return False
        saving, self._saving = self._saving, None
        saving.result()
        return True

    def load_newest(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fill `state` from the newest whole one; its progress, with what this rank had of its own if there is any.

        OperatorFault: there is none, or it is another model's.
        """
        path, progress = self._ranks.share(self._newest)
        _load(path, state, self._channel)
        return (
            progress[self._ranks.rank]
            if len(progress) == self._ranks.size
            else {**progress[0], OWN: {}}
        )

    def _newest(self) -> tuple[Path, list[dict[str, Any]]]:
        """The newest whole one, with the progress of each rank that made it."""
        for path in reversed(self._all()):
            try:
                return path, _progress(path)
            except _UNREADABLE as error:
                log.warning("cannot read the checkpoint %s: %s", path, " ".join(str(error).split()))
        raise OperatorFault(f"cannot read any checkpoint in {self._directory}")

    def _save(self, step: int, epoch: int, state: Any, progress: dict[str, Any]) -> None:
        """In step on all ranks; all that is not shards is rank 0's."""
        target = self._directory / f"step-{step:08d}-epoch-{epoch}"
        each = self._channel.gather(progress)
        with (
            store_faults("cannot write the checkpoint", target),
            _plain_errors(),
            contextlib.ExitStack() as stack,
        ):
            aside = self._channel.share(lambda: self._begin(target, each, stack))
            _save_shards(aside, state, self._channel)
            self._channel.share(lambda: self._finish(aside, stack))
        if self._ranks.leads:
            self._prune(step, target)

    def _begin(
        self, target: Path, progress: list[dict[str, Any]], stack: contextlib.ExitStack
    ) -> Path:
        self._sweep()
        aside = stack.enter_context(whole_directory(target))
        for rank, each in enumerate(progress):
            with (aside / PROGRESS.format(rank)).open("wb") as file:
                torch.save(each, file)
        return aside

    def _finish(self, aside: Path, stack: contextlib.ExitStack) -> None:
        if missing := _named_in(aside) - {path.name for path in aside.iterdir()}:
            where = f"{self._directory} has no {min(missing)}, which another host wrote"
            raise OperatorFault(
                f"learner.out_dir: {where}; it must be one directory that all hosts see"
            )
        (aside / DIGESTS).write_text(_digests(aside))
        stack.close()

    def _prune(self, step: int, target: Path) -> None:
        """Not what a newer learner has saved: this one may be fenced, and not know it yet."""
        (_, epoch), found = _place(target), self._all()
        earlier = [path for path in found if _place(path)[0] < step]
        kept = {target, *earlier[max(0, len(earlier) + 1 - self._keep) :]}
        for path in found:
            if path not in kept and _place(path)[1] <= epoch:
                remove_directory(path)

    def _all(self) -> list[Path]:
        """Oldest first."""
        return sorted(
            (path for path in self._directory.glob("step-*") if _NAME.fullmatch(path.name)),
            key=_place,
        )

    def _sweep(self) -> None:
        """What learners left that were killed while they saved."""
        for path in self._directory.glob(f"{ASIDE}*"):
            shutil.rmtree(path, ignore_errors=True)


def _place(path: Path) -> tuple[int, int]:
    """Step and epoch."""
    named = _NAME.fullmatch(path.name)
    assert named is not None
    return int(named[1]), int(named[2])


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What torch says about a disk that refused, as the OSError that it was."""
    try:
        yield
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise _os_error(cause) from None
    except RuntimeError as error:
        raise _os_error(error) from None


def _one_process_is_meant() -> None:
    """torch warns where no process group is. For all threads: filters are the process's."""
    warnings.filterwarnings(
        "ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning
    )


def _os_error(error: BaseException) -> BaseException:
    """torch closes a file after a write that failed, fails again, and tells only that."""
    return error.__context__ if isinstance(error.__context__, OSError) else error


def _save_shards(directory: Path, state: Any, channel: Channel) -> None:
    """Each rank syncs its own files: another one's host may not have them."""
    _one_process_is_meant()
    writer = FileSystemWriter(directory, sync_files=channel.group is not None)
    save(state, storage_writer=writer, process_group=channel.group, no_dist=channel.group is None)


def _progress(path: Path) -> list[dict[str, Any]]:
    """Of each rank of a checkpoint whose bytes are those that were saved."""
    if _digests(path) != (path / DIGESTS).read_text():
        raise ValueError("its bytes are not those that were saved")
    files = [
        path / PROGRESS.format(rank) for rank in range(len(list(path.glob(PROGRESS.format("*")))))
    ]
    return [
        torch.load(file, map_location="cpu", weights_only=True)
        for file in files or [path / PROGRESS.format(0)]
    ]


def _load(path: Path, state: dict[str, Any], channel: Channel) -> None:
    _one_process_is_meant()
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
            f"the checkpoint {path} does not fit learner.model: {line[:LINE_MAX]}"
        ) from error


def _same_weights(reader: FileSystemReader, state: dict[str, Any]) -> None:
    """ValueError: others were saved. Fewer would be filled in without a word."""
    saved = {
        name for name in reader.read_metadata().state_dict_metadata if name.startswith("model.")
    }
    if saved != {f"model.{name}" for name in state.get("model", {})}:
        raise ValueError("other weights were trained")


def _named_in(directory: Path) -> set[str]:
    """The files that the shards of all ranks are in."""
    return {
        place.relative_path
        for place in FileSystemReader(directory).read_metadata().storage_data.values()
    }


def _digests(directory: Path) -> str:
    """A line per file, but for the one they are written to."""
    files = sorted(path for path in directory.iterdir() if path.name != DIGESTS)
    return "".join(f"{blake3().update_mmap(path).hexdigest()}  {path.name}\n" for path in files)

"""Lists the versions of a run that are still on its disk, and exports one from the run directory.

The versions are read from the ledger and the directory alone, whether or not a coordinator runs. An
exported directory has exactly the bytes that were published, or it does not appear.
"""

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest, Version
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.weights.manifest import ADAPTER_CONFIG, Manifest, chunk_layout
from echo2d.core.work.evaluation.events import Evaluated
from echo2d.core.work.evaluation.json_form import evaluated_json
from echo2d.core.work.evaluation.summary import best_by_name
from echo2d.errors import Fault, IntegrityFault, OperatorFault, StoreFault
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE
from echo2d.store.disk import store_faults, sync, write_at
from echo2d.store.ledger import read_results
from echo2d.store.snapshots import read_chunk, scan_snapshot, sync_snapshot


@dataclass(frozen=True, slots=True)
class Result:
    """A version in the run directory."""

    version: Version
    digest: Digest
    path: Path
    size: int  # bytes
    is_adapter: bool
    scores: Mapping[str, Evaluated]  # its newest score in each [[eval]], by name
    best: frozenset[str]  # the names of the evals in which it has the run's best score

    def as_dict(self) -> dict[str, Any]:
        """As JSON. A score that does not exist is null."""
        return {
            "version": self.version,
            "digest": self.digest.hex(),
            "bytes": self.size,
            "adapter": self.is_adapter,
            "scores": {name: evaluated_json(each)["mean"] for name, each in self.scores.items()},
            "best": sorted(self.best),
        }


def find_scores(run_dir: Path) -> list[dict[str, Any]]:
    """All evaluations of a run, oldest first, in the API's form. OperatorFault: as in `find_results`."""
    return [evaluated_json(each) for each in read_results(run_dir / LEDGER_FILE)[1]]


def find_results(run_dir: Path) -> list[Result]:
    """The versions that `export` can copy, oldest first. OperatorFault: this is no run directory, or its ledger is
    damaged or has another format.
    """
    published, evaluated = read_results(run_dir / LEDGER_FILE)
    newest = {each.version: each for each in published}
    digests = {each.digest for each in newest.values()}
    best = best_by_name(evaluated, lambda each: each.digest in digests)
    return [
        _result(run_dir, each, evaluated, best)
        for each in sorted(newest.values(), key=lambda each: each.version)
        if (run_dir / each.path).is_dir()
    ]


def _result(
    run_dir: Path,
    record: VersionPublished,
    evaluated: Sequence[Evaluated],
    best: Mapping[str, Evaluated],
) -> Result:
    path, key = run_dir / record.path, (record.version, record.digest)
    return Result(
        record.version,
        record.digest,
        path,
        record.full_bytes,
        (path / ADAPTER_CONFIG).exists(),
        {each.name: each for each in evaluated if (each.version, each.digest) == key},
        frozenset(name for name, each in best.items() if (each.version, each.digest) == key),
    )


def choose(results: Sequence[Result], *, version: int | None, best: str | None) -> Result:
    """The version with this number, or with the best score in this [[eval]], or the last one.

    OperatorFault: there is no such version; the error names those that exist.
    """
    if not results:
        raise OperatorFault("no version is published yet in this run")
    if version is not None:
        found = next((each for each in results if each.version == version), None)
        if found is None:
            # The error names at most 20 versions.
            there = ", ".join(str(each.version) for each in results[-20:])
            raise OperatorFault(
                f"version {version} is not kept; there are {there}. run.keep_every keeps more"
            )
        return found
    if best is None:
        return results[-1]
    found = next((each for each in results if best in each.best), None)
    if found is None:
        names = ", ".join(sorted({name for each in results for name in each.best})) or "none"
        raise OperatorFault(
            f"the version with the best score in {best!r} is not kept; expected one of: {names}"
        )
    return found


def export(
    run_dir: Path, result: Result, directory: Path, progress: Callable[[float], None]
) -> None:
    """Copy a version into a new directory, verified and durable. progress: gets the share that is done.

    OperatorFault: the directory is not empty, or is inside the run directory.
    IntegrityFault: the copy in the run directory is damaged. StoreFault: it was deleted meanwhile, or
    the disk fails or is full.
    """
    target = directory.resolve()
    with store_faults("exporting to", directory):
        _check_target(run_dir, target)
        aside = target.with_name(f".{target.name}-{secrets.token_hex(4)}.tmp")
        try:
            _copy(result, aside, progress)
            aside.replace(target)
            sync(target.parent)
        except (Fault, OSError) as error:
            # A coordinator renames a version before it deletes it, so all of its files vanish at once.
            if result.path.exists():
                raise
            raise StoreFault(
                f"version {result.version} was deleted meanwhile; list again what is there"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _check_target(run_dir: Path, target: Path) -> None:
    """OperatorFault: nothing can be exported to this directory."""
    if target.is_relative_to(run_dir.resolve()):
        raise OperatorFault(
            f"{target} is inside the run directory, where the coordinator deletes old files"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OperatorFault(f"{target} exists and is not empty; name a new directory")
    if target.is_mount():
        raise OperatorFault(f"{target} is a mount point; name a new directory inside it")


def _copy(result: Result, aside: Path, progress: Callable[[float], None]) -> None:
    files, digests, done = scan_snapshot(result.path), [], 0
    for file in files:
        (aside / file.path).parent.mkdir(parents=True, exist_ok=True)
        (aside / file.path).touch()
    for chunk in chunk_layout(files):
        data = read_chunk(result.path, chunk)
        digests.append(digest_of(data))
        write_at(aside / chunk.path, data, chunk.offset)
        done += len(data)
        progress(done / max(1, result.size))
    if Manifest(files, tuple(digests)).digest != result.digest:
        raise IntegrityFault(
            f"{result.path} is damaged: its bytes are not those of version {result.version}"
        )
    sync_snapshot(aside, files)

"""Models and rows by their names on the Hugging Face hub, on hosts that can reach it.

    name[@revision] --> one commit --> its safetensors, texts or Parquet files --> the hub's own cache

Only data are downloaded, never a program: weights as safetensors, rows as Parquet. The path of a download contains the
commit, so a run that names the path is pinned to that commit. The hub's own library handles the access token (`hf auth
login`, HF_TOKEN); no message of this module contains it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from echo2d.errors import OperatorFault

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9._/-]+))?(?::(.+))?")
# Endings of a model's text files. `load_model` chooses the weights. Programs (*.py) and pickles (*.bin) never load.
_TEXTS = (".json", ".jinja", ".txt", ".model")
_WEIGHTS = ".safetensors"
_ROWS = ".parquet"


def names_a_repository(text: str) -> bool:
    """Whether the text can be a name on the hub. If a path of that name exists, it is not."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def load_model(name: str) -> Path:
    """The directory of this model at one commit. The model is downloaded if the cache lacks it.

    OperatorFault: the hub cannot be reached, does not have the model, or does not have its safetensors.
    """
    repository, revision, _ = _parts(name)
    with _hub(name, "model") as hub:
        info = hub.model_info(repository, revision=revision)
        files = [each.rfilename for each in info.siblings or ()]
        weights = [each for each in files if each.endswith(_WEIGHTS) and "/" not in each]
        # Some models have the same weights a second time, in their authors' layout.
        weights = [each for each in weights if not each.startswith("consolidated")]
        if not weights:
            raise OperatorFault(
                f"{name} has no *{_WEIGHTS} on the hub, and other weights may hold programs; "
                "expected a model with safetensors"
            )
        texts = [each for each in files if each.endswith(_TEXTS) and "/" not in each]
        wanted = [*weights, *texts, *(each for each in files if each.startswith("chat_templates/"))]
        return Path(hub.snapshot_download(repository, revision=info.sha, allow_patterns=wanted))


def load_rows(name: str) -> list[Path]:
    """The Parquet files of one split of a data set at one commit. name: OWNER/NAME[@REVISION][:SPLIT].

    OperatorFault: as in `load_model`, or the data set has several splits and the name chooses none.
    """
    repository, revision, split = _parts(name)
    with _hub(name, "dataset") as hub:
        splits: dict[str, list[str]] = {}
        # The hub converts data sets of other formats to Parquet, on the branch refs/convert/parquet.
        for tried in dict.fromkeys((revision, revision or "refs/convert/parquet")):
            info = hub.dataset_info(repository, revision=tried)
            splits = _splits(each.rfilename for each in info.siblings or ())
            if splits:
                break
        found = {each: files for each, files in splits.items() if split in (None, each)}
        if len(found) != 1:
            # The message names up to 12 splits.
            shown = ", ".join(f"{repository}:{each}" for each in list(splits)[:12])
            raise OperatorFault(
                f"--rows {name}: expected one of {shown}"
                if splits
                else f"--rows {name} has no Parquet files on the hub; download it, and write JSON lines"
            )
        (files,) = found.values()
        folder = hub.snapshot_download(
            repository, repo_type="dataset", revision=info.sha, allow_patterns=files
        )
        return [Path(folder, each) for each in sorted(files)]


def download_line(name: str, kind: str = "model") -> str:
    """The command to type on a host that can reach the hub."""
    repository, revision, _ = _parts(name)
    of = {"model": "", "dataset": " --repo-type dataset"}[kind]
    at = f" --revision {revision}" if revision else ""
    return f"hf download {repository}{of}{at} --local-dir {repository.rpartition('/')[2]}"


def _parts(name: str) -> tuple[str, str | None, str | None]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise OperatorFault(f"expected a name on the hub, OWNER/NAME; found {name!r}")
    return found[1], found[2], found[3]


def _splits(files: Iterable[str]) -> dict[str, list[str]]:
    """The Parquet files of each split: `main/train-00000-of-00002.parquet` belongs to `main/train`."""
    splits: dict[str, list[str]] = defaultdict(list)
    for each in files:
        if each.endswith(_ROWS):
            stem = re.sub(r"-\d+-of-\d+(-[0-9a-f]+)?$", "", each.removesuffix(_ROWS))
            splits[re.sub(r"/\d+$", "", stem)].append(each)
    return dict(splits)


@contextmanager
def _hub(name: str, kind: str) -> "Iterator[HfApi]":
    """Yields a client of the hub. Every error of the client becomes one line that says what to do."""
    from huggingface_hub import HfApi, errors

    here = f"{name} is neither a path here nor"
    try:
        yield HfApi(library_name="echo2d")
    except OperatorFault:
        raise
    except errors.GatedRepoError as error:
        raise OperatorFault(
            f"{name} is gated: accept its terms on its page of the hub, then type hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise OperatorFault(f"{name}: the hub has no such revision") from error
    except errors.RepositoryNotFoundError as error:
        raise OperatorFault(
            f"{here} a {kind} on the hub; if it is private there, type hf auth login"
        ) from error
    except Exception as error:  # its class depends on the HTTP client of the hub's library
        raise OperatorFault(
            f"{here} to be had from the hub ({type(error).__name__}); type this where the hub can be "
            f"reached, and give the directory: {download_line(name, kind)}"
        ) from error

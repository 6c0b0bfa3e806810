"""Which files of a model's directory hold its weights, as `transformers` decides it. Blocking.

    the file that config.json names in `transformers_weights` | model.safetensors | the files of its index

Others may lie there: shards of an older revision, a copy in another format, an average of weights. Nobody reads them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2d.errors import OperatorFault, path_fault

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """read: the files with the weights, sorted. index: that says so; None: there is none. ignored: other files of
    weights. told: whether config.json names the file or the index.
    """

    read: tuple[Path, ...]
    index: Path | None
    ignored: tuple[Path, ...]
    told: bool = False

    @property
    def named(self) -> bool:
        """Whether `transformers` finds them; otherwise they are all there are."""
        return self.index is not None or [path.name for path in self.read] == [SINGLE] or self.told

    @property
    def unread(self) -> str:
        """A sentence about the files that are ignored; empty: there are none."""
        names = ", ".join(path.name for path in self.ignored)
        reason = (
            f"{self.read[0].name} counts"
            if self.index is None
            else f"{self.index.name} does not name them"
        )
        return names and f"not read, because {reason}: {names}"


def weight_files(directory: Path) -> WeightFiles:
    """Where `transformers` finds nothing, all files of weights count, such as those of an adapter.

    OperatorFault: the directory or its index cannot be read, or a file that the index names is not there.
    """
    try:
        found = sorted(path for path in directory.iterdir() if path.name.endswith(_SUFFIX))
    except OSError as error:
        raise path_fault(f"{directory} cannot be read", error) from error
    named = str(_object(directory / "config.json").get("transformers_weights") or "")
    index = None
    if named.endswith(_INDEX_SUFFIX):
        index = directory / named
    elif not named and (directory / SINGLE) not in found and (directory / INDEX).exists():
        index = directory / INDEX
    if index is not None:
        shards = _object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise OperatorFault(f"{index} has no weight_map; expected the file of each weight")
        read = tuple(sorted(directory / str(name) for name in {*shards.values()}))
    else:
        single = directory / (named or SINGLE)
        read = (single,) if named or single in found else tuple(found)
    if missing := [path.name for path in read if path not in found]:
        by = "config.json" if index is None else index.name
        raise OperatorFault(f"{directory} lacks {missing[0]}, which {by} names")
    ignored = tuple(path for path in found if path not in read)
    return WeightFiles(read, index, ignored, bool(named))


def _object(path: Path) -> dict[str, Any]:
    """Empty: there is no such file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise path_fault(f"{path} cannot be read", error) from error
    except ValueError as error:
        raise OperatorFault(f"{path} holds no JSON: {error}") from error
    return found if isinstance(found, dict) else {}

"""Versions on disk: the policy's weights in bfloat16, in the files, names and companions of the base model.

A published directory lives until the coordinator has taken it (it hard-links or copies before it answers).

    <snapshot_root>/<run>-epoch-3-version-40/     config.json  tokenizer.json ...  model.safetensors

The run is in the name, so that two runs may have one root, and neither publishes or removes the other's.
"""

import json
import re
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from echo2d.client import Coordinator, OperatorFault
from learner.files import ASIDE, remove_directory, store_faults, whole_directory
from learner.ranks import Ranks
from learner.shards import Shards, published_dtype

COMPANIONS = {".json", ".txt", ".model", ".jinja"}
DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json; the second is the older name
HEADER_ALIGNMENT = 8
_NAMED = {torch.bfloat16: "BF16", torch.bool: "BOOL"}  # the others that are published are integers

FileLayout = dict[str, dict[str, str]]  # file -> name in it -> name of the weight


class SnapshotWriter:
    """Writes versions of the model whose base lies in `base` into `root`, for the run with this id."""

    base_digest = ""  # of what an adapter belongs to

    def __init__(self, base: Path, root: Path, run_id: str, weights: Mapping[str, Tensor]) -> None:
        self._base, self._root, self._run_id = base, root, run_id
        self._companions = [
            path for path in sorted(base.iterdir()) if path.suffix in COMPANIONS and path.is_file()
        ]
        self._layout = {
            file: in_order(names, weights) for file, names in self._files(weights).items()
        }
        self.names = [weight for names in self._layout.values() for weight in names.values()]

    def write(self, epoch: int, version: int, shards: Shards, stream: Iterator[Tensor]) -> Path:
        """A new directory; durable when this returns. StoreFault: the disk refused, and nothing is left.

        stream: the parts of `names`, the weights in the order in which they are written.
        """
        directory = self._root / f"{self._run_id}-epoch-{epoch}-version-{version}"
        remove_directory(
            directory
        )  # of a learner that was killed, before the run's ledger was set back
        with (
            store_faults("cannot write the snapshot", directory),
            whole_directory(directory) as aside,
        ):
            self._accompany(aside)
            for name, names in self._layout.items():
                write_safetensors(aside / name, names, shards, stream)
        return directory

    def clean(self, epoch: int) -> None:
        """Remove what learners of lower epochs left; they are fenced."""
        left = re.compile(
            rf"(?:{re.escape(ASIDE)})?{re.escape(self._run_id)}-epoch-(\d+)-version-\d+"
        )
        for path in self._root.iterdir():
            if (named := left.fullmatch(path.name)) and int(named[1]) < epoch:
                shutil.rmtree(path, ignore_errors=True)

    def _files(self, weights: Mapping[str, Tensor]) -> FileLayout:
        """OperatorFault: the model's weights do not have the names that the base's files have."""
        files = _tensor_names(self._base)
        missing = sorted({name for names in files.values() for name in names} - weights.keys())
        if missing:
            raise OperatorFault(
                f"learner.model: {len(missing)} tensors are no weights of the model, e.g. {missing[0]}"
            )
        return {file: dict(zip(names, names, strict=True)) for file, names in files.items()}

    def _accompany(self, directory: Path) -> None:
        """The files without tensors."""
        for path in self._companions:
            (directory / path.name).write_bytes(_companion(path))


class Publisher:
    """Versions go out in a thread of their own, one after the other, while training goes on. It ends with the block."""

    def __init__(self, writer: SnapshotWriter, coordinator: Coordinator, ranks: Ranks) -> None:
        self._writer = writer
        self._coordinator = coordinator
        self._ranks = ranks
        self._channel = ranks.channel()
        self._going: Future[None] | None = None

    def begin(self, epoch: int, version: int, weights: Mapping[str, Tensor]) -> None:
        """On every rank. The weights may change when this returns; the version before is out by then."""
        self._ranks.share(self.settle)
        self.settle()
        shards = Shards({name: weights[name] for name in self._writer.names}, self._ranks)
        pool = ThreadPoolExecutor(1, "publish")
        self._going = pool.submit(self._publish, epoch, version, shards)
        pool.shutdown(wait=False)  # the process does not end before the version is out

    def settle(self, *, patient: bool = True) -> None:
        """Raises what publishing raised, as soon as it is over."""
        if self._going is not None and (patient or self._going.done()):
            going, self._going = self._going, None
            going.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._going is not None:
            wait([self._going])

    def _publish(self, epoch: int, version: int, shards: Shards) -> None:
        stream = shards.stream(self._writer.names, self._channel)
        try:
            if self._ranks.leads:
                directory = self._writer.write(epoch, version, shards, stream)
                self._coordinator.publish(version, directory)
                shutil.rmtree(directory, ignore_errors=True)  # the next session removes what stays
        finally:
            deque(stream, maxlen=0)  # the other ranks wait to be rid of theirs


def in_order(names: Mapping[str, str], weights: Mapping[str, Tensor]) -> dict[str, str]:
    """As safetensors has tensors in a file: wide types first, so that each is aligned, then by name."""
    sizes = {name: published_dtype(weights[weight]).itemsize for name, weight in names.items()}
    return {name: names[name] for name in sorted(names, key=lambda name: (-sizes[name], name))}


def write_safetensors(
    path: Path, names: Mapping[str, str], shards: Shards, stream: Iterator[Tensor]
) -> None:
    """The file that the library would write, of which no more than a part is in memory. names: in order."""
    with path.open("wb") as file:
        file.write(_header(names, shards))
        for part in islice(stream, len(names) * shards.ranks):
            file.write(part.numpy().data)


def _header(names: Mapping[str, str], shards: Shards) -> bytes:
    facts: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, weight in names.items():
        end = start + shards.size(weight)
        shape, dtype = shards.shapes[weight], _dtype_name(shards.dtypes[weight])
        facts[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _dtype_name(dtype: torch.dtype) -> str:
    """Safetensors' name."""
    if dtype in _NAMED:
        return _NAMED[dtype]
    return f"{'I' if dtype.is_signed else 'U'}{8 * dtype.itemsize}"


def _companion(path: Path) -> bytes:
    """The file as it is; only config.json says which dtype the weights now have."""
    data = path.read_bytes()
    if path.name != "config.json":
        return data
    config: dict[str, Any] = json.loads(data)
    if all(config.get(key, "bfloat16") == "bfloat16" for key in DTYPE_KEYS):
        return data
    config.update({key: "bfloat16" for key in DTYPE_KEYS if key in config})
    return (json.dumps(config, indent=2) + "\n").encode()


def _tensor_names(base: Path) -> dict[str, list[str]]:
    """The tensors in each safetensors file."""
    layout = {}
    for path in sorted(base.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                layout[path.name] = list(file.keys())
        except SafetensorError as error:
            raise OperatorFault(f"learner.model: cannot read {path}: {error}") from error
    if not layout:
        raise OperatorFault(f"learner.model: {base} has no safetensors files")
    return layout

"""Write versions to disk and publish them: the policy's weights in bfloat16, with the base model's
file names, tensor names and companion files.

    <snapshot_root>/<run>-epoch-3-version-40/     config.json  tokenizer.json ...  model.safetensors

A directory is deleted once the coordinator has taken it (it hard-links or copies the files before
it answers). The run id is part of the name, so that two runs can share a root.
"""

import json
import logging
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from echo2d.client import Coordinator, build_manifest, weight_files
from echo2d.learner.ranks.ranks import Channel, Ranks
from echo2d.learner.saving.files import ASIDE, remove_directory, store_faults, whole_directory
from echo2d.learner.saving.layout import Layout
from echo2d.learner.saving.shards import Piece, Shards, VersionTensors, published_dtype
from echo2d.logs import say

INDEX_SUFFIX = ".safetensors.index.json"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
# Keys of config.json; older versions of transformers write the second one.
DTYPE_KEYS = ("dtype", "torch_dtype")
# All other dtypes that are written are integers.
_NAMED = {torch.bfloat16: "BF16", torch.float32: "F32", torch.bool: "BOOL"}

log = logging.getLogger("echo2d.learner")


class SnapshotWriter:
    """Write versions of the model whose base is in `base` into `root`. dtype_of: as in `VersionTensors`."""

    base_digest = ""  # digest of the base model, for adapters only

    def __init__(
        self,
        base: Path,
        root: Path,
        run_id: str,
        weights: Mapping[str, Tensor],
        layout: Layout,
        dtype_of: Callable[[Tensor], torch.dtype] = published_dtype,
    ) -> None:
        self._base, self._root, self._run_id = base, root, run_id
        self._companions = companions(base)
        files = {
            file: in_order(VersionTensors(weights, parts, dtype_of).dtypes)
            for file, parts in layout.items()
        }
        parts = {name: layout[file][name] for file, names in files.items() for name in names}
        self.tensors = VersionTensors(weights, parts, dtype_of)
        self._headers = {file: _header(names, self.tensors) for file, names in files.items()}
        # For each tensor: its file, and the byte with which it begins there.
        self._places: dict[str, tuple[str, int]] = {}
        for file, names in files.items():
            starts = accumulate(map(self.tensors.size, names), initial=len(self._headers[file]))
            self._places |= {
                name: (file, start) for name, start in zip(names, starts, strict=False)
            }

    def write(
        self, epoch: int, version: int, pieces: Iterator[Piece], channel: Channel
    ) -> tuple[Path, bytes]:
        """Write a version into a new directory, as `write_to` does. Returns the directory and its manifest."""
        directory = self._root / f"{self._run_id}-epoch-{epoch}-version-{version}"
        # A directory of this name exists if a learner was killed and the run's ledger was then reset.
        channel.share(lambda: remove_directory(directory))
        # The coordinator syncs what it keeps.
        return directory, self.write_to(directory, pieces, channel, durable=False)

    def write_to(
        self,
        directory: Path,
        pieces: Iterator[Piece],
        channel: Channel | None = None,
        *,
        durable: bool = True,
        hashed: bool = True,
    ) -> bytes:
        """Write a version into a directory that is new or empty, and return its manifest. All ranks call this
        together. StoreFault, on every rank: a rank failed; nothing is left.

        pieces: what this rank writes of the tensors, in any order. hashed: False: the manifest, for which all bytes are
        read again, is empty.
        """
        channel = channel or Channel(0, None)
        with store_faults("cannot write the snapshot", directory), ExitStack() as stack:
            whole = whole_directory(directory, durable=durable)
            aside = channel.share(lambda: self._begin(stack.enter_context(whole)))
            errors = channel.gather(self._write_pieces(aside, pieces))
            return channel.share(lambda: _manifest(aside, errors, hashed=hashed))

    def _begin(self, aside: Path) -> Path:
        """Write the companion files and the headers of the others. Runs on rank 0 only."""
        for name, data in {**self._companion_files(), **self._headers}.items():
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_bytes(data)
        return aside

    def _write_pieces(self, aside: Path, pieces: Iterator[Piece]) -> Exception | None:
        """Write the pieces at their places in the files. Returns the error that prevented it."""
        try:
            for name, some in groupby(pieces, lambda piece: self._places[piece.tensor][0]):
                with (aside / name).open("r+b") as file:
                    for piece in some:
                        file.seek(self._places[piece.tensor][1] + piece.start)
                        file.write(piece.data.numpy().data)
        except Exception as error:  # noqa: BLE001 - rank 0 must hear of any failure
            # Other ranks wait until their pieces are received.
            deque(pieces, maxlen=0)
            return error
        return None

    def clean(self, epoch: int) -> None:
        """Remove the directories of lower epochs. Their learners are fenced and publish no more."""
        left = re.compile(
            rf"(?:{re.escape(ASIDE)})?{re.escape(self._run_id)}-epoch-(\d+)-version-\d+(-[0-9a-f]+)?"
        )
        for path in self._root.iterdir():
            if (named := left.fullmatch(path.name)) and int(named[1]) < epoch:
                shutil.rmtree(path, ignore_errors=True)

    def _companion_files(self) -> dict[str, bytes]:
        """The files that have no tensors, by name."""
        return {
            name: self._index(path) if name.endswith(INDEX_SUFFIX) else _companion(path)
            for name, path in self._companions.items()
        }

    def _index(self, path: Path) -> bytes:
        """The index of the files that are written: the base's own, or a new one if tensors of the base are left out."""
        data = path.read_bytes()
        index: dict[str, Any] = json.loads(data)
        files = {name: file for name, (file, _) in self._places.items()}
        if index["weight_map"] == files:
            return data
        return (json.dumps({"metadata": {}, "weight_map": files}, indent=2) + "\n").encode()


def companions(base: Path) -> dict[str, Path]:
    """The files of a model's directory that belong to its weights, by their names in it.

    Only the index that is used is among them, because any other index would name files that are missing.
    OperatorFault: the directory cannot be read.
    """
    index = weight_files(base).index
    found = [
        path
        for path in sorted(base.iterdir())
        if path.suffix in {".json", ".txt", ".model", ".jinja"}
    ]
    found = [path for path in found if not path.name.endswith(INDEX_SUFFIX) or path == index]
    named = {path.name: path for path in found if path.is_file()}
    if (base / TOOL_TEMPLATE_FILE).is_file():
        named[TOOL_TEMPLATE_FILE] = base / TOOL_TEMPLATE_FILE
    return named


class Publisher:
    """Publish versions in a thread, one after the other, while training goes on. The end of its block
    waits for the version under way.
    """

    def __init__(self, writer: SnapshotWriter, coordinator: Coordinator, ranks: Ranks) -> None:
        self._writer = writer
        self._coordinator = coordinator
        self._ranks = ranks
        self._channel = ranks.channel()
        self._going: Future[None] | None = None

    def begin(self, epoch: int, version: int, weights: Mapping[str, Tensor]) -> None:
        """Begin to publish, on every rank, after the version before is published. The weights may change
        once this returns.
        """
        self._ranks.share(self.settle)
        self.settle()
        shards = Shards(weights, self._writer.tensors, self._ranks)
        pool = ThreadPoolExecutor(1, "publish")
        self._going = pool.submit(self._publish, epoch, version, shards)
        # This does not wait, but the interpreter waits for the pool's thread before it exits.
        pool.shutdown(wait=False)

    def settle(self, *, patient: bool = True) -> None:
        """Wait for the version under way and raise the exception of its publish. patient: False: if it
        is not over, return at once.
        """
        if self._going is not None and (patient or self._going.done()):
            going, self._going = self._going, None
            going.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._going is not None:
            wait([self._going])

    def _publish(self, epoch: int, version: int, shards: Shards) -> None:
        began_at, channel = time.monotonic(), self._channel
        directory, manifest = self._writer.write(epoch, version, shards.pieces(channel), channel)
        if not self._ranks.leads:
            return
        self._coordinator.publish(version, directory, manifest)
        seconds = f"{time.monotonic() - began_at:.3f}"
        say(log, logging.INFO, "published", version=version, seconds=seconds)
        # `clean` of the next session deletes what cannot be deleted now.
        shutil.rmtree(directory, ignore_errors=True)


def in_order(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Order tensors as safetensors does: wide types first, so that all are aligned, then by name."""
    return sorted(dtypes, key=lambda name: (-dtypes[name].itemsize, name))


def _manifest(aside: Path, errors: Sequence[Exception | None], *, hashed: bool) -> bytes:
    """The manifest of a version that all ranks have written. errors: of the ranks; the first one is raised."""
    for error in filter(None, errors):
        raise error
    return build_manifest(aside).encode() if hashed else b""


def _header(names: Sequence[str], tensors: VersionTensors) -> bytes:
    """The header that the safetensors library writes. names: from `in_order`."""
    facts: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        end = start + tensors.size(name)
        shape, dtype = tensors.shapes[name], _dtype_name(tensors.dtypes[name])
        facts[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in safetensors."""
    if dtype in _NAMED:
        return _NAMED[dtype]
    return f"{'I' if dtype.is_signed else 'U'}{8 * dtype.itemsize}"


def _companion(path: Path) -> bytes:
    """The bytes of a file; in config.json the dtype becomes that of the published weights."""
    data = path.read_bytes()
    if path.name != "config.json":
        return data
    config: dict[str, Any] = json.loads(data)
    if all(config.get(key, "bfloat16") == "bfloat16" for key in DTYPE_KEYS):
        return data
    config.update({key: "bfloat16" for key in DTYPE_KEYS if key in config})
    return (json.dumps(config, indent=2) + "\n").encode()

"""Export a checkpoint as a directory that transformers and SGLang load.

The directory has the bytes that a publish of the same step writes, whatever number of ranks saved
the checkpoint. One process writes it, without torch.distributed and without the coordinator:

    checkpoint ---> weight in bfloat16 ---> its tensors in the files      a model, or an adapter
    base's files -> W + alpha / rank * B A, rounded once ---^             an adapter, merged

Invariants: the process never holds the whole model, only the weight that it reads and the last WEIGHTS_KEPT
weights. The directory appears complete or not at all.
"""

import functools
import json
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from echo2d.client import OperatorFault, base_digest
from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving.adapter import AdapterWriter, check_scale
from echo2d.learner.saving.checkpoint import (
    Checkpoints,
    SavedCheckpoint,
    plain_errors,
    silence_single_process_warning,
)
from echo2d.learner.saving.files import store_faults
from echo2d.learner.saving.layout import Layout, WeightPart
from echo2d.learner.saving.publish import SnapshotWriter
from echo2d.learner.saving.shards import Piece, published_dtype
from echo2d.logs import say

LAST = "last"
# The files of a layer take the matrices of its experts from two weights, alternately.
WEIGHTS_KEPT = 2
# Seconds between two lines of progress in the log, if there is no terminal for a bar.
_LINE_S = 10.0

log = logging.getLogger("echo2d.learner")


@dataclass(frozen=True, slots=True)
class Exported:
    """Describes a written export."""

    kind: str  # "model", "adapter" or "merged model"
    directory: str
    step: int
    epoch: int
    run: str
    bytes: int  # of all files
    transformers: str  # an expression that loads it
    sglang: str  # a command that serves it

    def line(self) -> str:
        return (
            f"wrote the {self.kind} of step {self.step} (epoch {self.epoch}, run {self.run}) to "
            f"{self.directory}: {self.bytes:,} bytes; load it with {self.transformers} or "
            f"{self.sglang}"
        )

    def as_json(self) -> str:
        return json.dumps(asdict(self))


# --- single weights of a checkpoint, whatever number of ranks saved it
#
# In memory are only the weight that is being read, and one rank's shard of it.

_MODEL = "model."  # prefix of the names of the model's weights in a checkpoint


class SavedWeights:
    """The weights of the model in a checkpoint. shapes: of the whole weights, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._reader = directory, _Reader(directory)
        self.shapes = {
            name.removeprefix(_MODEL): tuple(facts.size)
            for name, facts in self._reader.read_metadata().state_dict_metadata.items()
            if name.startswith(_MODEL) and isinstance(facts, TensorStorageMetadata)
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole weight, rounded to the dtype. StoreFault: its file cannot be read."""
        silence_single_process_warning()
        weight = torch.empty(self.shapes[name], dtype=dtype)
        with store_faults("cannot read the checkpoint", self._directory), plain_errors():
            # torch copies each rank's shard into the weight, which rounds.
            load({_MODEL + name: weight}, storage_reader=self._reader, no_dist=True)
        return weight


class _Reader(FileSystemReader):
    """Reads the index of a checkpoint once; it lists every shard of every tensor."""

    @functools.cached_property
    def _index(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return self._index


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model of a config, without memory for its weights."""

    weights: Mapping[str, Tensor]  # all weights by name, including an adapter's, on the meta device
    trained: Mapping[str, Tensor]  # the weights that a checkpoint has
    layout: Layout  # of the base's files


def export(
    config: LearnerConfig, step: str, directory: Path, model: ModelFacts, *, merge: bool
) -> Exported:
    """Write the checkpoint of a step, a number or "last", into a directory.

    merge: write the base model with the adapter added to it, instead of the adapter. OperatorFault:
    there is no such checkpoint, it is damaged or of another model, the directory exists and is not
    empty, or there is no adapter to merge. StoreFault: a file cannot be read or written.
    """
    if merge and not config.lora_rank:
        raise OperatorFault("--merge: expected an adapter to merge; learner.lora_rank is 0")
    wanted, target = _step(step), _empty(directory)
    checkpoints = Checkpoints(config.out_dir / "checkpoints", config.checkpoints_kept)
    with _progress_bar() as bar:
        task = bar.add_task("verifying the checkpoint", total=None)
        found = checkpoints.find(wanted)
        saved = SavedWeights(found.path)
        _check(config, found, saved, model)
        writer, tensor_of = _source(config, found, saved, model, merge=merge)
        sizes = {name: writer.tensors.size(name) for name in writer.tensors.parts}

        def pieces() -> Iterator[Piece]:
            total = sum(sizes.values())
            bar.update(task, description="writing", total=total)
            logged_at = time.monotonic()
            for name, size in sizes.items():
                data = tensor_of(name).contiguous().reshape(-1).view(torch.uint8)
                yield Piece(name, 0, data)
                bar.advance(task, size)
                if bar.disable and time.monotonic() - logged_at >= _LINE_S:
                    logged_at = time.monotonic()
                    done = bar.tasks[task].completed
                    say(log, logging.INFO, "exporting", f"{done / 1e9:.1f}/{total / 1e9:.1f} GB")

        writer.write_to(target, pieces())
    kind = "merged model" if merge else "adapter" if config.lora_rank else "model"
    size = sum(path.stat().st_size for path in target.iterdir())
    run = str(found.progress["run"])
    how = _how_to_load(kind, str(target), str(config.model))
    return Exported(kind, str(target), found.step, found.epoch, run, size, *how)


def _source(
    config: LearnerConfig,
    found: SavedCheckpoint,
    saved: SavedWeights,
    model: ModelFacts,
    *,
    merge: bool,
) -> tuple[SnapshotWriter, Callable[[str], Tensor]]:
    """A writer of the export, and a function that makes the tensors of its files, by name."""
    run, root = str(found.progress["run"]), config.snapshot_root
    if config.lora_rank and not merge:
        base = found.progress["base"]
        writer: SnapshotWriter = AdapterWriter(config, run, model.trained, base)
    else:
        writer = SnapshotWriter(config.model, root, run, model.weights, model.layout)
    if merge:
        return writer, functools.partial(_merged, config, saved, model)

    @functools.lru_cache(WEIGHTS_KEPT)
    def weight_of(name: str) -> Tensor:
        return saved.read(name, published_dtype(model.trained[name]))

    def tensor_of(name: str) -> Tensor:
        part = writer.tensors.parts[name]
        tensor = part.of(weight_of(part.weight), 0)
        assert tensor is not None
        return tensor

    return writer, tensor_of


def _merged(config: LearnerConfig, saved: SavedWeights, model: ModelFacts, name: str) -> Tensor:
    """A tensor of the base's files, with the adapter's share added to it."""
    file = next(file for file, parts in model.layout.items() if name in parts)
    part, path = model.layout[file][name], config.model / file
    with store_faults("cannot read", path), safe_open(path, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    if (share := _share(config, saved, part)) is not None:
        tensor = tensor.float().add_(share)
    return tensor.to(published_dtype(model.weights[part.weight]))


def _share(config: LearnerConfig, saved: SavedWeights, part: WeightPart) -> Tensor | None:
    """alpha / rank * B A [out, in] in float32; None: this part has no adapter."""
    layer = part.weight.removesuffix(".weight")
    names = [f"{layer}.lora_{factor}.weight" for factor in "BA"]
    if not set(names) <= saved.shapes.keys():
        return None
    second, first = (saved.read(name, torch.float32) for name in names)
    return (second @ first).mul_(config.lora_alpha / config.lora_rank)


def _check(
    config: LearnerConfig, found: SavedCheckpoint, saved: SavedWeights, model: ModelFacts
) -> None:
    """OperatorFault: the checkpoint is not of this model, or its adapter not of this base."""
    if saved.shapes != {name: tuple(weight.shape) for name, weight in model.trained.items()}:
        raise OperatorFault(
            f"the checkpoint {found.path} does not fit learner.model: it has other trained "
            "weights; use the config of its run"
        )
    if config.lora_rank and base_digest(config.model) != found.progress["base"]:
        raise OperatorFault(
            f"learner.model: the adapter in {found.path} belongs to another base model"
        )
    check_scale(config, found.progress)


def _progress_bar() -> Progress:
    """A bar on stderr, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    return Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden
    )


def _step(text: str) -> int | None:
    """The number of a step; None: the last one."""
    if text == LAST:
        return None
    if not text.isdecimal():
        raise OperatorFault(f"--export: expected the number of a step, or {LAST}; found {text!r}")
    return int(text)


def _empty(directory: Path) -> Path:
    """The absolute path. OperatorFault: it exists and is not an empty directory."""
    target = directory.resolve()
    if target.is_mount():
        raise OperatorFault(f"--export: {directory} is a mount point; name a directory inside it")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise OperatorFault(
            f"--export: expected a directory that is empty or does not exist; found {directory}. "
            "Name another one"
        )
    return target


def _how_to_load(kind: str, directory: str, base: str) -> tuple[str, str]:
    """An expression for transformers and a command for SGLang."""
    model, serve = "AutoModelForCausalLM.from_pretrained", "python -m sglang.launch_server"
    if kind != "adapter":
        return f"{model}({directory!r})", f"{serve} --model-path {shlex.quote(directory)}"
    paths = f"{shlex.quote(base)} --lora-paths policy={shlex.quote(directory)}"
    return (
        f"PeftModel.from_pretrained({model}({base!r}), {directory!r})",
        f"{serve} --model-path {paths}",
    )

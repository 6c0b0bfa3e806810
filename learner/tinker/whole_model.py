"""Full weights: one model of a client whose weights are all trained, beside the frozen model that adapters share.

    frozen model     adapters, prompts
    whole model      float32 weights, gradients, AdamW's moments; a model of its own, sharded as the frozen one is

There is at most one at a time. Its folders, each written once:

    weights to sample   the base's files with these weights, as a version has them; slot.json, base.json
    all of it           optimizer.safetensors: weights and moments in float32; slot.json, base.json

All ranks write a folder together (`saving.shards`), and any number of ranks reads it. If the ranks are on several
hosts, all of them must see the learner's out_dir.

A state of all of it has 12 bytes for each weight. It is written beside training, from a copy in host memory, but not
after each step: the coordinator can have all operations since the last one computed again. If the copy does not fit,
training waits until the state is written.
"""

import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from echo2d.client import BASE_PIN, StoreFault, base_pin
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.layers import prepare_layers
from echo2d.learner.model.load import empty_model, fill, read_weights
from echo2d.learner.model.moments import adamw
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.ranks import Channel, Ranks, layers_of, own_shard
from echo2d.learner.saving.files import store_faults, sync
from echo2d.learner.saving.layout import Layout, WeightPart, layout_of
from echo2d.learner.saving.publish import SnapshotWriter
from echo2d.learner.saving.shards import Shards, published_dtype
from echo2d.learner.tinker.slots import MOMENTS, WEIGHT_BYTES, SlotShape, TrainedWeights
from echo2d.learner.tinker.sums import WrongCall

# Writing states takes at most this share of the time.
STATES_SHARE_MAX = 0.1
# A state is written when calls of this size have come since the last one: the ledger keeps them until then.
UNSAVED_BYTES_MAX = 1 << 30
# The copy of a state may take this share of the host memory that is available.
COPY_SHARE_MAX = 0.8
# Its train_* say nothing.
FULL_SHAPE = SlotShape(rank=0, train_attn=True, train_mlp=True, train_unembed=True)
OPTIMIZER, SLOT = "optimizer.safetensors", "slot.json"
# What a folder has besides the files of a version.
OWN_FILES = frozenset({OPTIMIZER, SLOT, BASE_PIN})


class WholeModel(TrainedWeights):
    """All weights of a model. scorer: runs it."""

    averaged = True

    def __init__(self, scorer: AnswerScorer, config: LearnerConfig, ranks: Ranks) -> None:
        self.scorer = scorer
        weights = dict(scorer.model.named_parameters())
        on_gpu = ranks.device.type == "cuda"
        super().__init__(FULL_SHAPE, weights, *adamw([*weights.values()], config, on_gpu=on_gpu))
        # Bytes of the calls in the steps that no state has.
        self.unsaved = 0
        # When the next state may be written; infinite while one is being written.
        self.state_at = -math.inf

    @property
    def finite(self) -> bool:
        """Whether this rank's part of the weights is; no rank reads a folder with others."""
        return all(bool(own_shard(each).isfinite().all()) for each in self.weights.values())

    @property
    def state_due(self) -> bool:
        return self.unsaved >= UNSAVED_BYTES_MAX or time.monotonic() >= self.state_at

    def saved_tensors(self) -> dict[str, Tensor]:
        """The weights, and the moments in float32 wherever they are."""
        if self._moments is None:
            return {**self.weights, **self.moments}
        with self._moments.on_host():
            return {**self.weights, **self.moments}

    def read(self, directory: Path, *, optimizer: bool, steps: int) -> None:
        """Read the weights of a saved one. optimizer: and its moments, which are those after `steps`."""
        tensors = self.saved_tensors() if optimizer else self.weights
        read_weights(tensors, directory, _layout_of(tensors))
        if optimizer:
            if self._moments is not None:
                self._take(tensors)
            self.at_step(steps)

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        assert self._moments is not None
        for name, weight in self.weights.items():
            for moment in MOMENTS:
                self._optimizer.state[weight][moment] = tensors[f"{name}.{moment}"]
        self._moments.take()


class WholeModels:
    """Makes, saves and loads whole models. layout: of the files of config.model. base_digest: of these files."""

    def __init__(
        self, config: LearnerConfig, ranks: Ranks, layout: Layout, frozen: Any, base_digest: str
    ) -> None:
        self._config, self._ranks, self._layout = config, ranks, layout
        self._digest = base_digest
        # For the main thread, and for that of the states.
        self._channel, self._states_channel = ranks.channel(), ranks.channel()
        on_host = ranks.device.type == "cuda" and config.moments == "host"
        numbers = sum(own_shard(weight).numel() for weight in frozen.parameters())
        # The bytes of this rank's part of one.
        self.memory = (WEIGHT_BYTES // 2 if on_host else WEIGHT_BYTES) * numbers

    def create(self) -> WholeModel:
        """The base model. All ranks call this together."""
        return self._made(self._config.model)

    def check(self, directory: Path, *, optimizer: bool) -> None:
        """WrongCall: it was saved without moments, or it belongs to another base model."""
        if (directory / BASE_PIN).read_bytes() != base_pin(self._digest):
            raise WrongCall("the checkpoint belongs to another base model")
        if optimizer and not (directory / OPTIMIZER).exists():
            raise WrongCall("the checkpoint was saved without the optimizer's state")

    def load(self, directory: Path, *, optimizer: bool) -> WholeModel:
        """A saved model. optimizer: with its moments; else they are zero. All ranks call this together."""
        if not (directory / OPTIMIZER).exists():
            return self._made(directory)
        found = self._made(self._config.model)
        steps = json.loads((directory / SLOT).read_bytes())["steps"]
        found.read(directory, optimizer=optimizer, steps=steps)
        return found

    def _made(self, directory: Path) -> WholeModel:
        scorer, _ = scorer_of(self._config, self._ranks, directory, trained=True)
        return WholeModel(scorer, self._config, self._ranks)

    def save(self, found: WholeModel, directory: Path, *, optimizer: bool) -> int:
        """Write a folder, and return its bytes. A folder that is there stays as it is. All ranks call this together.

        StoreFault: the disk failed.
        """
        writer = _FolderWriter(found, self._config, self._layout, self._digest, optimizer=optimizer)
        shards = Shards(writer.tensors_of, writer.tensors, self._ranks, copied=False)
        return self._write(writer, shards, self._channel, directory)

    def copy_fits(self, found: WholeModel) -> bool:
        """Whether a copy of all of it fits into host memory, on all ranks."""
        tensors = [*found.weights.values(), *found.moments.values()]
        needed = sum(own_shard(each).numel() * each.element_size() for each in tensors)
        fits = needed * self._ranks.on_first_host < COPY_SHARE_MAX * _available_bytes()
        return not self._ranks.highest(int(not fits))

    def copy(self, found: WholeModel, *, copied: bool) -> Callable[[Path], int]:
        """Copy all of it to host memory, on all ranks together. Returns what writes the copy into a folder, as `save`
        does, on all ranks together in a thread. copied: False: nothing is copied, and nothing must change meanwhile.

        RuntimeError, on all ranks: one of them cannot, as when its memory is short.
        """
        began_at, found.unsaved, found.state_at = time.monotonic(), 0, math.inf

        def rest() -> None:
            now = time.monotonic()
            found.state_at = now + (now - began_at) * (1 / STATES_SHARE_MAX - 1)

        error: Exception | None = None
        try:
            writer = _FolderWriter(found, self._config, self._layout, self._digest, optimizer=True)
            shards = Shards(writer.tensors_of, writer.tensors, self._ranks, copied=copied)
            writer.tensors_of = {}
        except Exception as own:  # noqa: BLE001 - the other ranks must not wait for this one
            error = own
        if self._ranks.highest(int(error is not None)):
            rest()
            raise RuntimeError(f"cannot copy it: {error or 'another rank failed'}")

        def write(directory: Path) -> int:
            try:
                return self._write(writer, shards, self._states_channel, directory)
            except StoreFault:
                # Rank 0 says it for all.
                if self._ranks.leads:
                    raise
                return 0
            finally:
                rest()

        return write

    def _write(
        self, writer: "_FolderWriter", shards: Shards, channel: Channel, directory: Path
    ) -> int:
        there = channel.share(directory.is_dir)
        if not there:
            writer.write_to(directory, shards.pieces(channel), channel, hashed=False)
        if not self._ranks.leads:
            return 0
        with store_faults("cannot write the checkpoint", directory):
            if there:
                # Another process may have been killed before this name was durable.
                sync(directory.parent)
            return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


class _FolderWriter(SnapshotWriter):
    """Writes a folder of a whole model as it is now."""

    def __init__(
        self,
        found: WholeModel,
        config: LearnerConfig,
        layout: Layout,
        digest: str,
        *,
        optimizer: bool,
    ) -> None:
        self.tensors_of = (
            found.saved_tensors() if optimizer else found.scorer.model.state_dict(keep_vars=True)
        )
        super().__init__(
            config.model,
            config.out_dir,
            "",
            self.tensors_of,
            _layout_of(self.tensors_of) if optimizer else layout,
            attrgetter("dtype") if optimizer else published_dtype,
        )
        facts = dataclasses.asdict(found.shape) | {"steps": found.steps}
        own = {SLOT: json.dumps(facts).encode(), BASE_PIN: base_pin(digest)}
        self._files = own if optimizer else super()._companion_files() | own

    def _companion_files(self) -> dict[str, bytes]:
        return self._files


def _available_bytes() -> int:
    """The host memory that is free, in bytes."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(facts["MemAvailable"].split()[0])


def _layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return {OPTIMIZER: {name: WeightPart(name) for name in tensors}}


def check_version(directory: Path) -> None:
    """WrongCall: these are full weights with the optimizer's state, of which no version is made."""
    if (directory / OPTIMIZER).exists():
        raise WrongCall(
            "full weights are sampled from a path of save_weights_for_sampler; these are those of save_state"
        )


def take_version(source: Path, directory: Path) -> None:
    """Link or copy the files of a version out of a saved folder. WrongCall: as in `check_version`."""
    check_version(source)
    for path in source.rglob("*"):
        if path.is_file() and path.name not in OWN_FILES:
            target = directory / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            try:
                os.link(path, target)
            except OSError:
                shutil.copyfile(path, target)


def scorer_of(
    config: LearnerConfig, ranks: Ranks, directory: Path, *, trained: bool
) -> tuple[AnswerScorer, Layout]:
    """The model config.model with the weights in a directory, and the layout of its files. All ranks call this.

    OperatorFault: the directory has no such model.
    """
    made = empty_model(config.model).requires_grad_(requires_grad=trained)
    layout = layout_of(made, directory)
    prepare_layers(made, config, ranks.device)
    # There is no dropout.
    model = fill(ranks.shard(made, config), directory, layout, ranks.device).eval()
    scorer = AnswerScorer(model, packing=config.packing)
    # Layers save memory (learner.recompute) only if they themselves, not their parts, are in training.
    for layer in layers_of(model):
        layer.training = True
    return scorer, layout

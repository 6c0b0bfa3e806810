"""Read single weights of a checkpoint in one process, whatever number of ranks saved it.

No more is in memory than the weight that is read and one rank's shard of it.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from echo2d.learner.saving.checkpoint import plain_errors, silence_single_process_warning
from echo2d.learner.saving.files import store_faults

_MODEL = "model."  # begins the names of the model's weights in a checkpoint


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
        """A whole weight, rounded to the dtype. StoreFault: its file is gone."""
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

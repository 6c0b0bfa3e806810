"""Reads the layout of a snapshot directory: its configuration, tensor names and shapes.

All engines use it before they load a snapshot. It needs no torch, and reads only headers, except
for `file_tensor_digests`. The caller has verified the directory; a file that `read_layout` cannot
use is an `EngineFault`.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from echo2d import model_files
from echo2d.core.weights.manifest import ADAPTER_CONFIG
from echo2d.engines.base import AdapterBase
from echo2d.errors import EngineFault, OperatorFault

# Keys of config.json that do not shape a model: two models may differ in them and still be the same.
_CONFIG_NOTES = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header, little-endian


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The dtype and shape of one tensor of a file."""

    dtype: str  # as safetensors spells it ("BF16", "F32", ...)
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotLayout:
    """What a snapshot directory holds besides its numbers.

    Snapshots with equal `config` whose tensors agree in name and shape are versions of one model;
    their numbers differ, and perhaps their dtypes.
    """

    config: Mapping[str, object]
    tensors: Mapping[str, TensorSpec]

    def require_tensors_of(self, served: "SnapshotLayout") -> None:
        """EngineFault if a tensor is missing, unknown or of another shape than in `served`."""
        for name in sorted(self.tensors.keys() ^ served.tensors.keys()):
            raise EngineFault(
                f"tensor {name} is {'unknown' if name in self.tensors else 'missing'}"
            )
        for name, spec in self.tensors.items():
            if spec.shape != served.tensors[name].shape:
                raise EngineFault(
                    f"tensor {name} has shape {spec.shape}, expected {served.tensors[name].shape}"
                )


def read_layout(snapshot: Path, base: AdapterBase | None = None) -> SnapshotLayout:
    """Read the layout of a whole model or, with `base`, of an adapter.

    An adapter's `tensors` are its own only, and its `config` names the base. EngineFault: a file is
    missing or malformed.
    """
    if base is not None:
        adapter = _read_json(snapshot / ADAPTER_CONFIG)
        return SnapshotLayout(
            {"base": base.digest, "adapter": adapter}, dict(_tensor_specs(snapshot))
        )
    config = _read_json(snapshot / "config.json")
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOTES}
    return SnapshotLayout(kept, dict(_tensor_specs(snapshot)))


def weight_files(snapshot: Path) -> list[Path]:
    """The files that hold a snapshot's weights. EngineFault: they are missing."""
    try:
        return [*model_files.weight_files(snapshot).read]
    except OperatorFault as fault:
        raise EngineFault(str(fault)) from fault


def file_tensor_digests(snapshot: Path) -> dict[str, bytes]:
    """Return blake3-256 of each tensor's bytes in the files, as `Engine.tensor_digests` does.

    The files must have a readable header: see `read_layout`.
    """
    return {name: digest for path in weight_files(snapshot) for name, digest in _digests_in(path)}


def _digests_in(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES:start])
        for name in header.keys() - {"__metadata__"}:
            first, end = header[name]["data_offsets"]
            # A view must be released before the file is unmapped.
            with memoryview(data) as view:
                yield name, blake3(view[start + first : start + end]).digest()


def _tensor_specs(snapshot: Path) -> Iterator[tuple[str, TensorSpec]]:
    for path in weight_files(snapshot):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - the file object is not a mapping
                    tensor = file.get_slice(name)
                    yield name, TensorSpec(str(tensor.get_dtype()), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise EngineFault(f"{path.name} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise EngineFault(f"{path.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise EngineFault(f"{path.name} must hold a JSON object, found {type(content).__name__}")
    return content

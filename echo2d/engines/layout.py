"""What a snapshot directory holds besides the numbers: configuration, end tokens, names and shapes of its tensors.

Reads headers only and needs no torch. The directory was verified by the caller; here a file that cannot be used is an
`EngineFault`. Shared by the engines that load files themselves.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from echo2d.core.weights.manifest import ADAPTER_CONFIG
from echo2d.engines.base import AdapterBase
from echo2d.errors import EngineFault

_CONFIG_NOTES = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version"}
)  # do not shape a model
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header, little-endian


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype as safetensors spells it ("BF16", "F32", ...)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotLayout:
    """Two snapshots with equal `config` differ in numbers only, if their tensors agree in name and shape."""

    config: Mapping[str, object]
    eos_token_ids: frozenset[int]
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
    """Of a whole model, or of an adapter: then `tensors` are the adapter's alone, and `config` names the base."""
    if base is not None:
        adapter = _read_json(snapshot / ADAPTER_CONFIG)
        eos = read_layout(base.directory).eos_token_ids
        return SnapshotLayout(
            {"base": base.digest, "adapter": adapter}, eos, dict(_tensor_specs(snapshot))
        )
    config = _read_json(snapshot / "config.json")
    generation = snapshot / "generation_config.json"
    eos = _token_ids(config) | (
        _token_ids(_read_json(generation)) if generation.exists() else frozenset()
    )
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOTES}
    return SnapshotLayout(kept, eos, dict(_tensor_specs(snapshot)))


def weight_files(snapshot: Path) -> list[Path]:
    return sorted(snapshot.glob("*.safetensors"))


def file_tensor_digests(snapshot: Path) -> dict[str, bytes]:
    """blake3-256 of each tensor as it lies in the files: what `Engine.tensor_digests` is compared with."""
    return {name: digest for path in weight_files(snapshot) for name, digest in _digests_in(path)}


def _digests_in(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES:start])
        for name in header.keys() - {"__metadata__"}:
            first, end = header[name]["data_offsets"]
            with memoryview(data) as view:
                yield name, blake3(view[start + first : start + end]).digest()


def _tensor_specs(snapshot: Path) -> Iterator[tuple[str, TensorSpec]]:
    for path in weight_files(snapshot):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 the file object is no mapping
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
        raise EngineFault(f"{path.name} is not an object")
    return content


def _token_ids(config: Mapping[str, object]) -> frozenset[int]:
    found = config.get("eos_token_id")
    if found is None and isinstance(text := config.get("text_config"), dict):
        return _token_ids(text)
    return frozenset(
        i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int)
    )

"""Versions on disk: the policy's weights in bfloat16, in the files, names and companions of the base model.

A published directory lives until the coordinator has taken it (it hard-links or copies before it answers).

    <snapshot_root>/epoch-3-version-40/     config.json  tokenizer.json ...  model.safetensors
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from echo2d.client import OperatorFault
from learner.files import ASIDE, remove_directory, store_faults, whole_directory

COMPANIONS = {".json", ".txt", ".model", ".jinja"}
DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json; the second is the older name


class SnapshotWriter:
    """Writes versions of the model whose base lies in `base` into `root`."""

    def __init__(self, base: Path, root: Path) -> None:
        self._root = root
        self._companions = [path for path in sorted(base.iterdir()) if path.suffix in COMPANIONS and path.is_file()]
        self._layout = _tensor_names(base)

    def check(self, state: Mapping[str, Tensor]) -> None:
        """OperatorFault: the model's weights do not have the names that the base's files have."""
        missing = sorted({name for names in self._layout.values() for name in names} - state.keys())
        if missing:
            raise OperatorFault(f"learner.model: {len(missing)} tensors are no weights of the model, e.g. {missing[0]}")

    def write(self, epoch: int, version: int, state: Mapping[str, Tensor]) -> Path:
        """A new directory; durable when this returns. StoreFault: the disk refused, and nothing is left."""
        directory = self._root / f"epoch-{epoch}-version-{version}"
        remove_directory(directory)  # another run's
        with store_faults("cannot write the snapshot", directory), whole_directory(directory) as aside:
            self._fill(aside, state)
        return directory

    def clean(self, epoch: int) -> None:
        """Remove what learners of lower epochs left; they are fenced."""
        for path in (*self._root.glob("epoch-*-version-*"), *self._root.glob(f"{ASIDE}epoch-*-version-*")):
            number = path.name.removeprefix(ASIDE).split("-")[1]
            if number.isdecimal() and int(number) < epoch:
                shutil.rmtree(path, ignore_errors=True)

    def _fill(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        for path in self._companions:
            (directory / path.name).write_bytes(_companion(path))
        for name, tensors in self._layout.items():
            save_tensors({tensor: state[tensor] for tensor in tensors}, directory / name)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """As they are published, in one file."""
    try:
        save_file({name: _published(tensor) for name, tensor in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _published(tensor: Tensor) -> Tensor:
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype).contiguous()


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
                layout[path.name] = sorted(file.keys())
        except SafetensorError as error:
            raise OperatorFault(f"learner.model: cannot read {path}: {error}") from error
    if not layout:
        raise OperatorFault(f"learner.model: {base} has no safetensors files")
    return layout

"""The layout of a model that a snapshot directory describes."""

import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file

from echo2d.engines.layout import SnapshotLayout, TensorSpec, file_tensor_digests, read_layout
from echo2d.errors import EngineFault

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.ones(4, dtype=np.float16)


def write(folder: Path, config: object, **files: object) -> Path:
    """Two weight files and these JSON files."""
    save_file({"a.weight": A}, folder / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b.weight": B}, folder / "model-2.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_tensors_of_all_files_are_listed(tmp_path: Path) -> None:
    layout = read_layout(write(tmp_path, {"model_type": "x"}))
    assert layout.tensors == {
        "a.weight": TensorSpec("F32", (2, 3)),
        "b.weight": TensorSpec("F16", (4,)),
    }


def test_notes_of_the_writing_library_do_not_change_the_configuration(tmp_path: Path) -> None:
    layout = read_layout(
        write(tmp_path, {"hidden_size": 8, "transformers_version": "5.0", "dtype": "bfloat16"})
    )
    assert layout.config == {"hidden_size": 8}


def test_digests_are_of_the_bytes_in_the_files(tmp_path: Path) -> None:
    digests = {
        name: blake3(tensor.tobytes()).digest()
        for name, tensor in (("a.weight", A), ("b.weight", B))
    }
    assert file_tensor_digests(write(tmp_path, {})) == digests


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_a_fault(tmp_path: Path, content: bytes) -> None:
    (write(tmp_path, {}) / "config.json").write_bytes(content)
    with pytest.raises(EngineFault, match=r"config\.json"):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, (1 << 20).to_bytes(8, "little") + b"{", b"\2" + bytes(7) + b"{}x"]
)
def test_a_weight_file_with_a_false_header_is_a_fault(tmp_path: Path, content: bytes) -> None:
    (write(tmp_path, {}) / "model-1.safetensors").write_bytes(content)
    with pytest.raises(EngineFault, match=r"model-1\.safetensors"):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "a is missing"),
        ({"a": (2, 3), "b": (1,)}, "b is unknown"),
        ({"a": (3, 2)}, r"a has shape \(3, 2\), expected \(2, 3\)"),
    ],
)
def test_a_layout_that_does_not_fit_the_served_one_is_named(
    tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    served = SnapshotLayout({}, {"a": TensorSpec("BF16", (2, 3))})
    new = SnapshotLayout({}, {name: TensorSpec("BF16", shape) for name, shape in tensors.items()})
    served.require_tensors_of(served)
    with pytest.raises(EngineFault, match=words):
        new.require_tensors_of(served)

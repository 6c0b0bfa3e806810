"""Safetensors headers that lie."""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from echo2d.core.weights.safetensors_header import HEADER_BYTES_MAX, check_header, header_bytes
from echo2d.errors import IntegrityFault


def header_of(tensors: object) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(
    start: int, stop: int, shape: list[Any] | None = None, dtype: str = "BF16"
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(stop - start) // 2] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def check(header: bytes, data_bytes: int) -> None:
    size = len(header) + data_bytes
    assert header_bytes(header[:8], size) == len(header)
    check_header(header, size)


def test_a_header_that_the_library_writes_is_accepted() -> None:
    file = save(
        {
            "b": np.zeros((3, 5), np.float32),
            "a": np.ones(7, np.int8),
            "empty": np.zeros((0, 4), np.float16),
        }
    )
    length = header_bytes(file[:8], len(file))
    check_header(file[:length], len(file))


def test_a_right_header_is_accepted() -> None:
    check(header_of({"__metadata__": {"format": "pt"}, "y": tensor(4, 10), "x": tensor(0, 4)}), 10)
    check(header_of({}), 0)
    check(header_of({"x": tensor(0, 3, [6], "F4")}), 3)
    check(header_of(b'{"x":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}   '), 2)


@pytest.mark.parametrize(
    ("prefix", "file_size"),
    [
        (b"", 0),
        (b"1234567", 7),
        ((100).to_bytes(8, "little"), 107),
        ((HEADER_BYTES_MAX + 1).to_bytes(8, "little"), 1 << 40),
        ((100 << 20).to_bytes(8, "little"), 1 << 40),
        (b"\xff" * 8, 1 << 40),
    ],
)
def test_impossible_lengths_of_a_header_are_refused(prefix: bytes, file_size: int) -> None:
    with pytest.raises(IntegrityFault, match="header"):
        header_bytes(prefix, file_size)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        (b"[]", "not a JSON object"),
        (b" {}", "not a JSON object"),
        (b"{", "not JSON"),
        (b"{" * 100_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b'{"x": NaN}', "not JSON"),
        ('{"x":1}'.encode("utf-16-le"), "not JSON"),
        (b'{"\xff": 1}', "not JSON"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":1}', "twice"),
        ({"__metadata__": {"step": 3}}, "metadata"),
        ({"__metadata__": []}, "metadata"),
        ({"x": 3}, "not described"),
        ({"x": {"dtype": "BF16", "shape": [1]}}, "not described"),
        ({"x": tensor(0, 2) | {"more": 1}}, "not described"),
        ({"x": tensor(0, 2) | {"data_offsets": [0, 1, 2]}}, "not described"),
        ({"x": tensor(0, 2, dtype="PICKLE")}, "unknown dtype"),
        ({"x": tensor(0, 2, [-1])}, "impossible"),
        ({"x": tensor(0, 2, [True])}, "impossible"),
        ({"x": tensor(0, 2, [1.0])}, "impossible"),
        ({"x": tensor(0, 2, [1] * 17)}, "impossible"),
        ({"x": tensor(0, 2, [10**400])}, "impossible"),
        ({"x": tensor(0, 2, [2])}, "do not fit"),
        ({"x": tensor(2, 0, [0])}, "do not fit"),
        ({"x": tensor(0, 1, [1], "F4")}, "do not fit"),
        ({"x": tensor(2, 4)}, "hole"),
        ({"x": tensor(0, 2), "y": tensor(0, 2)}, "overlap"),
        ({"x": tensor(0, 4)}, "describes 4 data bytes"),
        ({}, "describes 0 data bytes"),
    ],
)  # fmt: skip
def test_false_headers_are_refused(tensors: object, complaint: str) -> None:
    with pytest.raises(IntegrityFault, match=complaint):
        check(header_of(tensors), 2)

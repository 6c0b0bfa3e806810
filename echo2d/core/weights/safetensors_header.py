"""Checks the header of a safetensors file before any of it is used.

A file is `u64 N | N bytes of JSON | data`. The JSON object maps tensor names to dtype, shape and
data_offsets, and `__metadata__` to texts. The tensors must cover the data section without holes or
overlaps. A wrong header is an `IntegrityFault`. Not here: reading files.
"""

import json
import math
from typing import Any, NoReturn

from echo2d.errors import IntegrityFault

LENGTH_BYTES = 8
# Room for 100,000 tensors in one file; the largest public models have 40,000 in all files.
HEADER_BYTES_MAX = 16 << 20
# Real tensors have at most 5 dimensions. Together with the limit of a dimension this bounds the numbers that a header
# can make us multiply.
TENSOR_DIMS_MAX = 16
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


def header_bytes(prefix: bytes, file_size: int) -> int:
    """Return 8 + N. prefix: the first 8 bytes of the file, or the whole file if it is shorter."""
    if len(prefix) < LENGTH_BYTES:
        raise IntegrityFault("too short for a safetensors header")
    declared = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if declared > HEADER_BYTES_MAX:
        raise IntegrityFault(
            f"its safetensors header claims {declared} bytes; at most {HEADER_BYTES_MAX} are"
            " allowed"
        )
    if LENGTH_BYTES + declared > file_size:
        raise IntegrityFault(
            f"its safetensors header claims {declared} bytes, but the file has {file_size}"
        )
    return LENGTH_BYTES + declared


def check_header(header: bytes, file_size: int) -> None:
    """Check a whole header. header: the first `header_bytes(...)` bytes of the file."""
    tensors = _parse(header[LENGTH_BYTES:])
    _check_metadata(tensors.pop("__metadata__", {}))
    extents = sorted(_extent(name, tensor) for name, tensor in tensors.items())
    end = 0
    for start, stop in extents:
        if start != end:
            raise IntegrityFault(f"its tensors leave a hole or overlap at data byte {end}")
        end = stop
    if end != file_size - len(header):
        raise IntegrityFault(
            f"its header describes {end} data bytes, but the file has {file_size - len(header)}"
        )


def _parse(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise IntegrityFault("its safetensors header is not a JSON object")
    try:
        parsed = json.loads(
            text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise IntegrityFault("its safetensors header is not JSON") from error
    assert isinstance(parsed, dict)
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise IntegrityFault("its safetensors header names something twice")
    return names


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise IntegrityFault("its safetensors metadata is not a map of texts")


def _extent(name: str, tensor: object) -> tuple[int, int]:
    """Return the tensor's data offsets, after a check against its dtype and shape."""
    match tensor:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [start, stop],
            **others,
        } if not others:
            pass
        case _:
            raise IntegrityFault(
                f"tensor {name[:80]!r} is not described by dtype, shape and data_offsets"
            )
    if dtype not in DTYPE_BITS:
        raise IntegrityFault(f"tensor {name[:80]!r} has the unknown dtype {dtype[:20]!r}")
    # 1 << 48 is more than the bits of any snapshot.
    numbers_ok = all(
        type(number) is int and 0 <= number <= 1 << 48 for number in (*shape, start, stop)
    )
    if len(shape) > TENSOR_DIMS_MAX or not numbers_ok:
        raise IntegrityFault(f"tensor {name[:80]!r} has an impossible shape or offsets")
    if math.prod(shape) * DTYPE_BITS[dtype] != 8 * (stop - start):
        raise IntegrityFault(f"tensor {name[:80]!r} has offsets that do not fit its shape")
    return start, stop

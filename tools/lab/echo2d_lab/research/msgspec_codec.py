"""What `msgspec` would change in `core/base/codec.py`: bytes, speed, limits, errors. For docs/design/serialisation.md.

`pip install msgspec==0.22.0`, then `python -m echo2d_lab.research.msgspec_codec`. Two messages are written as msgspec
structs with the same limits, and both codecs encode and decode them: medians of seven, with the least and the most.
"""

import gc
import importlib
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgpack

from echo2d.core.base.ids import LeaseId, Version
from echo2d.core.protocol.control_messages import (
    TO_COORDINATOR,
    Heartbeat,
    LeaseProgress,
    SampleDelta,
    VersionSpan,
)

msgspec: Any = importlib.import_module("msgspec")
Meta = msgspec.Meta
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


def struct(name: str, *fields: Any, tag: str | None = None) -> Any:
    return msgspec.defstruct(name, fields, frozen=True, array_like=True, tag=tag)


Beat = struct(
    "Beat",
    ("running", Count),
    ("disk_free", Count | None, None),
    ("received_bytes", Count, 0),
    ("sent_bytes", Count, 0),
    tag="Heartbeat",
)
Span: Any = struct(
    "Span",
    ("start", Count),
    ("end", Count),
    ("version", Count),
    ("digest", Annotated[bytes, Meta(min_length=32, max_length=32)]),
)
Delta: Any = struct(
    "Delta",
    ("sample", Count),
    ("tokens", bytes),
    ("logprobs", bytes),
    ("spans", Annotated[tuple[Span, ...], Meta(max_length=8192)]),
    ("columns", Annotated[tuple[bytes, ...], Meta(max_length=8)], ()),
)
Progress = struct(
    "Progress",
    ("lease", Count),
    ("attempt", Count),
    ("samples", Annotated[tuple[Delta, ...], Meta(max_length=8192)]),
    tag="LeaseProgress",
)
DIGEST = b"d" * 32


def microseconds(call: Callable[[], Any], times: int = 3000) -> str:
    found = []
    for _ in range(7):
        begun = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - begun) / times * 1e6)
    return f"{statistics.median(found):.2f} us ({min(found):.2f}-{max(found):.2f})"


def cost(call: Callable[[], Any]) -> str:
    """Time, memory and outcome of one hostile message."""
    gc.collect()
    tracemalloc.start()
    begun = time.perf_counter()
    try:
        call()
        outcome = "accepted"
    except Exception as error:  # noqa: BLE001 - each codec has its own
        outcome = f"{type(error).__name__}: {error}"
    took, peak = time.perf_counter() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return f"{took * 1e3:.1f} ms, {peak >> 20} MiB, {outcome}"


def main() -> None:
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Beat | Progress)
    span = VersionSpan(0, 16, Version(5), DIGEST)  # type: ignore[arg-type]
    deltas = tuple(SampleDelta(n, b"t" * 64, b"l" * 64, (span,)) for n in range(16))
    theirs = tuple(Delta(n, b"t" * 64, b"l" * 64, (Span(0, 16, 5, DIGEST),)) for n in range(16))
    pairs = {
        "heartbeat": (Heartbeat(3, 1 << 30, 5, 6), Beat(3, 1 << 30, 5, 6)),
        "progress of 16 samples": (
            LeaseProgress(LeaseId(1 << 40), 1, deltas),
            Progress(1 << 40, 1, theirs),
        ),
    }
    for name, (ours, other) in pairs.items():
        data = TO_COORDINATOR.encode(ours)
        print(f"{name}: {len(data)} B, the same bytes: {encoder.encode(other) == data}")
        print(f"  encode {microseconds(partial(TO_COORDINATOR.encode, ours))}", end="")
        print(f" -> {microseconds(partial(encoder.encode, other))}")
        print(f"  decode {microseconds(partial(TO_COORDINATOR.decode, data))}", end="")
        print(f" -> {microseconds(partial(decoder.decode, data))}")
    lists: list[Any] = [[[]] * 8000] * 500
    hostile = {
        "four million values behind the known fields": ["LeaseProgress", 1, 1, [], *lists],
        "100,000 spans": ["LeaseProgress", 1, 1, [[0, b"", b"", [[0, 1, 2, DIGEST]] * 100_000]]],
        "a negative attempt": ["LeaseProgress", 1, -1, []],
        "a short digest": ["LeaseProgress", 1, 1, [[0, b"", b"", [[0, 1, 2, b"short"]], []]]],
    }
    for name, message in hostile.items():
        data = msgpack.packb(message)[: 4 << 20]
        print(f"{name}:\n  {cost(partial(TO_COORDINATOR.decode, data))}")
        print(f"  {cost(partial(decoder.decode, data))}")


if __name__ == "__main__":
    main()

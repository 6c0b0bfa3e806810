"""`echo2d bench delta`: encodes one version against another, as the seed and the workers do, and measures the cost.

First all of NEW is encoded, decoded, verified and written, and compared with NEW byte for byte. Then the speeds of the
same functions are measured on chunks in memory, in several runs of one thread. They are bytes of the model per CPU
second, so that other programs on the machine disturb little. Each speed includes:

    encode   finding and coding the changes (as sent, and as kept), blake3 and xxh3-128 of the new chunk
    decode   `decode_record`, in the memory of the base; then blake3 of the result, and writing it to its file
    receive  the same as decode, and before it reading the base from its file (page cache)
    memcpy   the same chunks, copied within memory

Hashing the base and the frames, reading the new files and making files durable are not included. The speed-up of two
threads is measured by the clock, which needs two idle cores.
"""

import json
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from echo2d import native
from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import ChunkId, Epoch, PublishSeq, RunId, Version
from echo2d.core.weights.delta import ChunkMode, encode_twice
from echo2d.core.weights.encoder import FormBuilder
from echo2d.core.weights.form import (
    FRAME_BYTES_MIN,
    ChunkRecord,
    FormFacts,
    base_sum,
    decode_record,
    encode_record,
)
from echo2d.core.weights.manifest import CHUNK_BYTES, Chunk, FileEntry, chunk_layout, is_safetensors
from echo2d.errors import IntegrityFault, OperatorFault
from echo2d.store.disk import allocate, store_faults, write_at
from echo2d.store.snapshots import read_chunk, read_chunk_into, scan_snapshot
from echo2d_lab.bench.delta.baselines import RIVALS

RUNS_MAX = 100
# The speeds are measured on this many bytes: the first chunks, all in memory, with their base.
SAMPLE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DeltaBench:
    """The options of the command. out: the directory in which NEW is rebuilt and kept; None: a
    temporary one. codec: a name in `echo2d.native.CODECS`; None: the one in use.
    """

    old: Path
    new: Path
    runs: int = 5
    against: tuple[str, ...] = ()
    out: Path | None = None
    codec: str | None = None

    def __post_init__(self) -> None:
        if self.codec is not None and self.codec not in native.available():
            found = ", ".join(native.available())
            raise OperatorFault(f"--codec: this machine has {found}; found {self.codec}")
        if not 1 <= self.runs <= RUNS_MAX:
            raise OperatorFault(f"--runs: expected 1 to {RUNS_MAX}; found {self.runs}")
        if not set(self.against) <= set(RIVALS):
            raise OperatorFault(
                f"--against: expected some of {', '.join(RIVALS)}; found {', '.join(self.against)}"
            )
        if self.out is not None and self.out.exists():
            raise OperatorFault(f"--out {self.out} exists already")


@dataclass(frozen=True, slots=True)
class RivalResult:
    """An encoding of another project; `ratio` and speed as in DeltaResult, the speed of one pass over all chunks."""

    wire_fraction: float
    ratio: float
    encode_mb_s: float


@dataclass(frozen=True, slots=True)
class DeltaResult:
    """The object that `--json` prints. Speeds: MB (10^6 bytes) of the model per CPU second of one thread, medians over
    the runs.

    changed_fraction: of the 16-bit words. wire_fraction: bytes on the wire, with segment tables, per byte of the
    snapshot; ratio: its inverse. chunks: their number by mode. codec: of `echo2d.native`. ..._per_memcpy: medians of
    the quotients within a run. ..._two_threads: speed of two threads over that of one, by the clock. least_most: the
    smallest and the largest of every speed and quotient over the runs. peak_scratch_mb: the most that encoding or
    decoding a chunk allocates beside its input, with its result, without zstd's own tables (about 1 MB).
    """

    snapshot_bytes: int
    wire_bytes: int
    changed_fraction: float
    wire_fraction: float
    ratio: float
    chunks: Mapping[str, int]
    roundtrip_ok: bool
    runs: int
    codec: str
    encode_mb_s: float
    decode_mb_s: float
    receive_mb_s: float
    memcpy_mb_s: float
    encode_per_memcpy: float
    decode_per_memcpy: float
    receive_per_memcpy: float
    encode_two_threads: float
    decode_two_threads: float
    least_most: Mapping[str, tuple[float, float]]
    peak_scratch_mb: float
    against: Mapping[str, RivalResult]
    load: tuple[float, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_delta_bench(wanted: DeltaBench, *, as_json: bool) -> int:
    """Measure and print. Returns the exit code; 1: the decoded version differs from the encoded one."""
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    codec = next(
        (each for each in native.available() if each == wanted.codec), native.available()[-1]
    )
    with bar, native.using(codec):
        result = measure(wanted, bar)
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        print_result(result)
    return 0 if result.roundtrip_ok else 1


def measure(wanted: DeltaBench, bar: Progress) -> DeltaResult:
    files, before = _matching_files(wanted.old, wanted.new), os.getloadavg()[0]
    with _directory(wanted.out) as out:
        whole = _Whole(wanted, files, out)
        for chunk in bar.track(chunk_layout(files), description="encoding, decoding"):
            whole.add(chunk)
        whole.builder.finish()
        roundtrip_ok = scan_snapshot(out) == files and all(
            read_chunk(out, chunk) == read_chunk(wanted.new, chunk)
            for chunk in bar.track(chunk_layout(files), description="comparing")
        )
        sample = _Sample(whole.sample, wanted.old, out)
        peak = sample.peak_bytes()
        speeds = [
            sample.run() for _ in bar.track(range(wanted.runs), description="measuring speeds")
        ]
    columns = {name: [run[name] for run in speeds] for name in speeds[0]}
    total, wire_bytes = whole.builder.totals().full_bytes, whole.builder.totals().wire_bytes
    return DeltaResult(
        snapshot_bytes=total,
        wire_bytes=wire_bytes,
        changed_fraction=whole.changed / whole.words,
        wire_fraction=wire_bytes / total,
        ratio=total / wire_bytes,
        chunks={mode.name.lower(): whole.chunks[mode] for mode in ChunkMode},
        roundtrip_ok=roundtrip_ok,
        runs=wanted.runs,
        codec=native.codec(),
        **{name: median(values) for name, values in columns.items()},
        least_most={name: (min(values), max(values)) for name, values in columns.items()},
        peak_scratch_mb=peak / 1e6,
        against={name: rival.result(total) for name, rival in whole.rivals.items()},
        load=(before, os.getloadavg()[0]),
    )


def _matching_files(old: Path, new: Path) -> tuple[FileEntry, ...]:
    """NEW's files. OperatorFault: their tensors are not at the same places as OLD's."""
    mine, theirs = (scan_snapshot(directory) for directory in (new, old))
    weights = [
        {file.path: file for file in files if is_safetensors(file.path)} for files in (mine, theirs)
    ]
    for path in sorted(weights[0].keys() | weights[1].keys()):
        if weights[0].get(path) != weights[1].get(path):
            raise OperatorFault(
                f"{old} and {new} do not match: {path} is missing or has another size in one of them"
            )
    return mine


@contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    made = Path(tempfile.mkdtemp(prefix="echo2d-delta-"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


@dataclass(slots=True)
class _Rival:
    """Bytes and CPU time that an encoding of another project has taken so far."""

    encode: Callable[[bytes, bytes], bytes]
    wire_bytes: int = 0
    cpu_s: float = 0.0

    def add(self, new: bytes, base: bytes) -> None:
        began = time.thread_time()
        self.wire_bytes += len(self.encode(new, base))
        self.cpu_s += time.thread_time() - began

    def result(self, total: int) -> RivalResult:
        return RivalResult(
            self.wire_bytes / total, total / self.wire_bytes, total / 1e6 / self.cpu_s
        )


@dataclass(frozen=True, slots=True)
class MeasuredChunk:
    """One chunk in memory, and its encoded record."""

    place: Chunk
    new: bytes
    base: bytes | None
    record: ChunkRecord
    payload: bytes

    def encode(self) -> None:
        """Do everything that the seed does with a chunk and its base, except for the base's checksum."""
        base_sum(self.new)
        encode_twice(self.new, self.base)
        digest_of(self.new)

    def decode_into(self, out: Path, scratch: memoryview, source: Path | None = None) -> float:
        """Decode, verify and write. Returns CPU seconds.

        source: the file from which the base is read, which counts; None: the base is first copied into `scratch`, which
        does not count.
        """
        base = None
        if self.base is not None:
            base = scratch[: len(self.base)]
            if source is None:
                base[:] = self.base
        began = time.thread_time()
        if base is not None and source is not None:
            read_chunk_into(source, self.place, base)
        data = decode_record(self.record, self.payload, self.place.length, base, overwrite=True)
        if digest_of(data) != self.record.result:
            raise IntegrityFault(f"chunk {self.record.chunk} was not decoded to what was encoded")
        with store_faults("writing", out / self.place.path):
            write_at(out / self.place.path, data, self.place.offset)
        return time.thread_time() - began

    @property
    def words(self) -> int:
        return len(self.new) // 2

    @property
    def changed_words(self) -> int:
        """The number of changed words; without a base, of all words."""
        if self.base is None:
            return self.words
        mine, theirs = (
            np.frombuffer(data, dtype="<u2", count=self.words) for data in (self.new, self.base)
        )
        return int(np.count_nonzero(mine != theirs))


def new_scratch() -> memoryview:
    """Memory for the base of a chunk, whose pages are allocated already."""
    return memoryview(bytearray(b"1" * CHUNK_BYTES))


def delta_facts() -> FormFacts:
    """The facts of the only form here."""
    return FormFacts(
        RunId("bench"),
        Epoch(1),
        Version(1),
        PublishSeq(1),
        "delta",
        digest_of(b"the base"),
        FRAME_BYTES_MIN,
    )


def make_files(out: Path, files: Sequence[FileEntry]) -> None:
    """Make the files with their space; existing content stays."""
    with store_faults("making files in", out):
        for file in files:
            (out / file.path).parent.mkdir(parents=True, exist_ok=True)
            allocate(out / file.path, file.size)


class _Whole:
    """All chunks, one after the other."""

    def __init__(self, wanted: DeltaBench, files: Sequence[FileEntry], out: Path) -> None:
        make_files(out, files)
        self._old, self._new, self._out, self._scratch = wanted.old, wanted.new, out, new_scratch()
        self._in_base = frozenset(chunk_layout(scan_snapshot(wanted.old)))
        self.builder = FormBuilder(delta_facts(), files)
        self.chunks: Counter[ChunkMode] = Counter()
        self.changed = self.words = 0
        self.sample: list[MeasuredChunk] = []
        self.rivals = {name: _Rival(RIVALS[name]) for name in wanted.against}
        self._count = 0

    def add(self, place: Chunk) -> None:
        new = read_chunk(self._new, place)
        base = read_chunk(self._old, place) if place in self._in_base else None
        record, payload = encode_record(ChunkId(self._count), new, base)
        encoded = MeasuredChunk(place, new, base, record, payload)
        encoded.decode_into(self._out, self._scratch)
        self.builder.add(record, payload)
        self._count += 1
        self.chunks[record.mode] += 1
        self.words += encoded.words
        self.changed += encoded.changed_words
        for rival in self.rivals.values():
            rival.add(new, bytes(len(new)) if base is None else base)
        if sum(len(each.new) for each in self.sample) + len(new) <= SAMPLE_BYTES:
            self.sample.append(encoded)


class _Sample:
    """The chunks whose speeds are measured."""

    def __init__(self, chunks: Sequence[MeasuredChunk], old: Path, out: Path) -> None:
        self._chunks, self._old, self._out = chunks, old, out
        self._scratch = new_scratch()
        total = sum(len(each.new) for each in chunks)
        self._copy = np.ones(total, np.uint8)  # not zeros, so that its pages are allocated already

    def run(self) -> dict[str, float]:
        """One run: MB/s, and quotients."""
        total = self._copy.size / 1e6
        memcpy, encode = (total / _cpu_s(work) for work in (self._copy_all, self._encode_all))
        decode, receive = (
            total / sum(each.decode_into(self._out, self._scratch, source) for each in self._chunks)
            for source in (None, self._old)
        )
        return {
            "encode_mb_s": encode,
            "decode_mb_s": decode,
            "receive_mb_s": receive,
            "memcpy_mb_s": memcpy,
            "encode_per_memcpy": encode / memcpy,
            "decode_per_memcpy": decode / memcpy,
            "receive_per_memcpy": receive / memcpy,
            "encode_two_threads": self._two_threads(lambda each, _: each.encode()),
            "decode_two_threads": self._two_threads(
                lambda each, scratch: each.decode_into(self._out, scratch, self._old)
            ),
        }

    def _two_threads(self, work: Callable[[MeasuredChunk, memoryview], object]) -> float:
        """The speed of two threads over that of one, by the clock."""

        def half(chunks: Sequence[MeasuredChunk], scratch: memoryview) -> None:
            for each in chunks:
                work(each, scratch)

        second, took = new_scratch(), list[float]()
        with ThreadPoolExecutor(2) as pool:
            for parts in ((self._chunks, ()), (self._chunks[::2], self._chunks[1::2])):
                began = time.monotonic()
                list(pool.map(half, parts, (self._scratch, second)))
                took.append(time.monotonic() - began)
        return took[0] / took[1]

    def _copy_all(self) -> None:
        start = 0
        for each in self._chunks:
            self._copy[start : start + len(each.new)] = np.frombuffer(each.new, dtype=np.uint8)
            start += len(each.new)

    def _encode_all(self) -> None:
        for each in self._chunks:
            each.encode()

    def peak_bytes(self) -> int:
        """The most bytes that encoding or decoding any chunk allocates."""
        found = 0
        tracemalloc.start()
        try:
            for each in self._chunks:
                for work in (each.encode, partial(each.decode_into, self._out, self._scratch)):
                    native.free_memory()
                    tracemalloc.reset_peak()
                    before = tracemalloc.get_traced_memory()[0]
                    work()
                    found = max(found, tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()
        return found


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def print_result(result: DeltaResult) -> None:
    """Print a table for people."""
    table = Table("what", "measured", "least - most", box=None)
    modes = ", ".join(f"{count} {mode}" for mode, count in result.chunks.items() if count)
    table.add_row("words changed", f"{result.changed_fraction:.3%}")
    table.add_row("bytes", f"{result.snapshot_bytes:,}")
    table.add_row(
        "on the wire",
        f"{result.wire_bytes:,}, {result.wire_fraction:.3%}, factor {result.ratio:.1f}",
    )
    table.add_row("chunks", modes)
    table.add_row("codec", result.codec)
    for name in ("encode", "decode", "receive", "memcpy"):
        low, high = result.least_most[f"{name}_mb_s"]
        table.add_row(
            f"{name}, one core",
            f"{getattr(result, f'{name}_mb_s'):,.0f} MB/s",
            f"{low:,.0f} - {high:,.0f}",
        )
    for name in ("encode", "decode", "receive"):
        low, high = result.least_most[f"{name}_per_memcpy"]
        table.add_row(
            f"{name} / memcpy",
            f"{getattr(result, f'{name}_per_memcpy'):.3f}",
            f"{low:.3f} - {high:.3f}",
        )
    for name in ("encode", "decode"):
        low, high = result.least_most[f"{name}_two_threads"]
        table.add_row(
            f"{name}, two threads / one",
            f"{getattr(result, f'{name}_two_threads'):.2f}",
            f"{low:.2f} - {high:.2f}",
        )
    table.add_row("scratch of a chunk, at most", f"{result.peak_scratch_mb:.1f} MB")
    table.add_row("built again byte for byte", "yes" if result.roundtrip_ok else "NO")
    for name, rival in result.against.items():
        text = f"{rival.wire_fraction:.3%}, factor {rival.ratio:.1f}, {rival.encode_mb_s:,.0f} MB/s"
        table.add_row(name, text)
    table.add_row("load before, after", f"{result.load[0]:.1f}, {result.load[1]:.1f}")
    Console().print(table)

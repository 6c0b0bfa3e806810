"""`echo2d bench publish`: measures the time from the publish call until the last engine serves the version.

Everything except the model is real: `echo2d coordinate` with TLS, its seed, `echo2d join`, a learner's
client, files on a disk. Versions are synthetic (`versions.py`); the engine reads the files and makes
tokens without a model (`worker.py`). The first version is sent in full, and it and the next one warm up;
the others are deltas. The stages are read from the daemons' logs, on the clock of this machine:

    publish call --> answered      the coordinator has adopted the files
      encoding                     the seed has begun
      first frame                  a worker holds the first frame of payload
      encoded                      the seed has read all chunks, and the last frames may leave
      verified                     the last worker has decoded, hashed and written all chunks
      serving                      the last engine has read them

In the same run the yardstick is measured: one thread reads, hashes and writes the same files once. Files
are synced before each publish, as they would be after the seconds of a train step.
"""

import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from echo2d.client import Coordinator
from echo2d.core.base.canonical import digest_of
from echo2d.core.weights.manifest import CHUNK_BYTES, chunk_layout
from echo2d.demo.processes import Programs, start_worker, wait_for
from echo2d.engines.fake import FAKE_VOCAB_SIZE
from echo2d.errors import Fault, OperatorFault
from echo2d.store.disk import write_all
from echo2d.store.snapshots import read_chunk_into, scan_snapshot
from echo2d_lab.bench.lab.daemons import COORDINATOR
from echo2d_lab.bench.publish.versions import MadeUpVersions

ROUNDS_MAX = 100
WORKERS_MAX = 16
PATIENCE_S = 600.0
POLL_S = 0.05
# Disk space in copies of a snapshot: the coordinator's copies and the learner's directory. Each worker needs two more.
COPIES = 8
STAGES = ("answered", "encoding", "first_frame", "encoded", "verified", "serving")


@dataclass(frozen=True, slots=True)
class PublishBench:
    """The options. sizes: bytes of the snapshots, one series each. predict: a size whose time is predicted
    from those of the series; 0: none. directory: on the disk to be measured.
    """

    sizes: tuple[int, ...]
    changed: float = 0.01
    rounds: int = 5
    workers: int = 1
    predict: int = 0
    directory: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= ROUNDS_MAX:
            raise OperatorFault(f"--rounds: expected 1 to {ROUNDS_MAX}; found {self.rounds}")
        if self.predict and len(set(self.sizes)) < 2:
            raise OperatorFault("--predict: expected at least two sizes to predict from")


@dataclass(frozen=True, slots=True)
class PublishRound:
    """One publish. The stages: seconds from the publish call. yardstick_s: see the module docstring."""

    answered: float
    encoding: float
    first_frame: float
    encoded: float
    verified: float
    serving: float
    yardstick_s: float
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class PublishSeries:
    """All rounds of one size. stages: medians. ratio, ratio_least, ratio_most: serving / yardstick."""

    snapshot_bytes: int
    stages: Mapping[str, float]
    yardstick_s: float
    ratio: float
    ratio_least: float
    ratio_most: float
    wire_fraction: float
    rounds: tuple[PublishRound, ...]

    @staticmethod
    def of(size: int, rounds: Sequence[PublishRound]) -> "PublishSeries":
        ratios = [each.serving / each.yardstick_s for each in rounds]
        return PublishSeries(
            size,
            {stage: _median(getattr(each, stage) for each in rounds) for stage in STAGES},
            _median(each.yardstick_s for each in rounds),
            statistics.median(ratios),
            min(ratios),
            max(ratios),
            _median(each.wire_bytes for each in rounds) / size,
            tuple(rounds),
        )


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The object that `--json` prints. predicted: the stages of `predict_bytes`, on a line through the medians."""

    series: tuple[PublishSeries, ...]
    changed: float
    workers: int
    file_system: str
    tls: bool
    predict_bytes: int
    predicted: Mapping[str, float] | None
    load: tuple[float, float]


def run_publish_bench(wanted: PublishBench, *, as_json: bool) -> int:
    """Measure and print. Returns the exit code."""
    result = measure(wanted)
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        _print(result)
    return 0


def measure(wanted: PublishBench) -> PublishResult:
    """Measure. OperatorFault: the disk has no room. Fault: a daemon ended, or a version did not arrive."""
    load, series, file_system = os.getloadavg()[0], list[PublishSeries](), ""
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        for size in wanted.sizes:
            rounds = bar.track(range(wanted.rounds), description=f"{size / 1e9:.1f} GB")
            with (
                _directory(wanted, size) as folder,
                PublishRun(folder, size, changed=wanted.changed, workers=wanted.workers) as run,
            ):
                file_system = _file_system(folder)
                # One round is not counted: on a virtual machine the first use of memory takes several
                # times as long as writing.
                _round(run)
                series.append(PublishSeries.of(size, [_round(run) for _ in rounds]))
    return PublishResult(
        tuple(series),
        wanted.changed,
        wanted.workers,
        file_system,
        not own_address().startswith("127."),
        wanted.predict,
        _predicted(series, wanted.predict) if wanted.predict else None,
        (load, os.getloadavg()[0]),
    )


class PublishRun:
    """A coordinator, workers and a learner's client, in a directory of its own. It publishes versions."""

    def __init__(self, folder: Path, size: int, *, changed: float, workers: int) -> None:
        self.folder, self.workers = folder, workers
        self.version = -1
        self.programs = Programs(folder / "logs", stop_s=PATIENCE_S)
        self._versions = MadeUpVersions(size, changed, rng_seed=0)
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        """Start the run. It returns when two versions are served, so that both slots exist."""
        with ExitStack() as cleanup:
            (self.folder / "snapshots").mkdir()
            cleanup.callback(self.programs.stop)
            self._client = cleanup.enter_context(self._start())
            self._client.open_session(0)
            for _ in range(2):
                written = self.write()
                self.publish(written)
                self.wait()
                shutil.rmtree(written[0])
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def write(self) -> tuple[Path, bytes]:
        """Write the next version into a directory, which the caller deletes. Returns it, and the manifest."""
        if self.version >= 0:
            batch = self._client.take_batch(self.version + 1)
            self._client.commit(batch, t_train_s=0.0)
        self.version += 1
        directory = self.folder / "snapshots" / str(self.version)
        manifest = self._versions.write(directory)
        os.sync()
        return directory, manifest

    def publish(self, written: tuple[Path, bytes]) -> None:
        """Publish the version; return when the coordinator has answered."""
        self._client.publish(self.version, *written)

    def wait(self) -> None:
        """Wait until all workers serve the last version."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_served():
            self.programs.check()
            if time.monotonic() > deadline:
                raise Fault(f"version {self.version} is not served after {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)

    def seen(self, name: str, version: int) -> dict[str, dict[str, Any]]:
        """The first line of each kind about a version in the JSON log of a program; `at`: its time."""
        found: dict[str, dict[str, Any]] = {}
        for text in (self.folder / "logs" / f"{name}.log").read_text().splitlines():
            line = json.loads(text) if text.startswith("{") else {}
            if line.get("version") == version and "kind" in line:
                at = datetime.fromisoformat(line["time"]).timestamp()
                found.setdefault(line["kind"], {**line, "at": at})
        return found

    def _start(self) -> Coordinator:
        config, host = self.folder / "run.toml", own_address()
        config.write_text(
            COORDINATOR.format(
                run=self.folder,
                port=_free_port(),  # a fixed port, so that a restarted coordinator is found again
                tls="on",
                host=host,
                vocab_size=FAKE_VOCAB_SIZE,
                shape="auto",
                chains=1,  # read only with the shape "chain"
                delta="true",
            )
        )
        program = ("-m", "echo2d", "coordinate", f"--config={config}", "--log-json")
        self.programs.start("coordinator", *program)
        run = self.folder / "coordinator"
        url = json.loads(wait_for(run / "coordinator.json", self.programs, PATIENCE_S))["url"]
        flags = ("--engine=fake", "--slots=1", f"--listen-host={host}", "--log-json")
        for number in range(self.workers):
            name, module = f"worker-{number}", "echo2d_lab.bench.publish.worker"
            start_worker(self.programs, name, self.folder, url, *flags, module=module)
        return Coordinator(url, token_file=run / "tokens" / "learner.token")

    def _is_served(self) -> bool:
        facts = self._client.status()
        serving = [worker["serving"] for worker in facts["workers"] if worker["alive"]]
        there = [each for each in serving if each is not None and each["version"] == self.version]
        return len(there) == self.workers


def _round(run: PublishRun) -> PublishRound:
    directory, manifest = run.write()
    called_at = time.time()
    run.publish((directory, manifest))
    answered_at = time.time()
    run.wait()
    seed = run.seen("coordinator", run.version)
    workers = [run.seen(f"worker-{number}", run.version) for number in range(run.workers)]
    yardstick_s = _yardstick(directory, run.folder / "yardstick")
    shutil.rmtree(directory)
    return PublishRound(
        answered=answered_at - called_at,
        encoding=seed["encoding"]["at"] - called_at,
        first_frame=min(facts["first frame"]["at"] for facts in workers) - called_at,
        encoded=seed["encoded"]["at"] - called_at,
        verified=max(facts["verified"]["at"] for facts in workers) - called_at,
        serving=max(facts["serving"]["at"] for facts in workers) - called_at,
        yardstick_s=yardstick_s,
        wire_bytes=int(seed["encoded"]["wire_bytes"]),
    )


def _yardstick(directory: Path, target: Path) -> float:
    """Seconds in which this thread reads and hashes the files once, and writes them into a new file."""
    buffer, offset = memoryview(bytearray(CHUNK_BYTES)), 0
    os.sync()
    began = time.monotonic()
    with target.open("wb", buffering=0) as file:
        for chunk in chunk_layout(scan_snapshot(directory)):
            data = read_chunk_into(directory, chunk, buffer)
            digest_of(data)
            write_all(file.fileno(), data, offset)
            offset += len(data)
    took_s = time.monotonic() - began
    target.unlink()
    return took_s


def _predicted(series: Sequence[PublishSeries], size: int) -> dict[str, float]:
    sizes = [each.snapshot_bytes for each in series]
    found = {}
    for stage in STAGES:
        line = statistics.linear_regression(sizes, [each.stages[stage] for each in series])
        found[stage] = line.intercept + line.slope * size
    return found


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def own_address() -> str:
    """An address of this machine that is not loopback, so that TLS is used; loopback if there is no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the address is for documentation
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _file_system(folder: Path) -> str:
    """The type of the file system, as in /proc/mounts."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if folder.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


@contextmanager
def _directory(wanted: PublishBench, size: int) -> Iterator[Path]:
    parent = wanted.directory or Path(tempfile.gettempdir())
    needed = (COPIES + 2 * wanted.workers) * size
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OperatorFault(
            f"--dir {parent}: a snapshot of {size / 1e9:.1f} GB needs {needed / 1e9:.0f} GB of disk; "
            f"{free / 1e9:.0f} GB are free"
        )
    with tempfile.TemporaryDirectory(prefix="echo2d-publish-", dir=parent) as folder:
        yield Path(folder).resolve()


def _print(result: PublishResult) -> None:
    heads = ("snapshot", *(stage.replace("_", " ") for stage in STAGES))
    table = Table(*heads, "read, hash, write", "ratio", "on the wire", box=None)
    for each in result.series:
        table.add_row(
            f"{each.snapshot_bytes / 1e9:.1f} GB",
            *(f"{each.stages[stage]:.2f} s" for stage in STAGES),
            f"{each.yardstick_s:.2f} s",
            f"{each.ratio:.2f} ({each.ratio_least:.2f}-{each.ratio_most:.2f})",
            f"{each.wire_fraction:.2%}",
        )
    if result.predicted is not None:
        stages = (f"{result.predicted[stage]:.1f} s" for stage in STAGES)
        table.add_row(f"{result.predict_bytes / 1e9:.1f} GB, predicted", *stages)
    console = Console()
    console.print(table)
    console.print(
        f"seconds from the publish call, medians; {result.workers} workers, "
        f"{result.file_system}, {'TLS' if result.tls else 'no TLS'}, "
        f"load {result.load[0]:.1f}, {result.load[1]:.1f}"
    )

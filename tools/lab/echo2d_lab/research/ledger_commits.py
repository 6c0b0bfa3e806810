"""Measures how long a grouped commit of the ledger takes on a disk.

    python -m echo2d_lab.research.ledger_commits [--directory D]

One commit has the records of one busy turn of a coordinator: 256 records, of groups of 8 samples (a prompt, 8 results,
8 rewards); groups are also deleted, as in a long run. For comparison a file of the same size is written and synced.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from echo2d.core.base.ids import Digest, GroupId, LeaseId, PeerId, Version
from echo2d.core.coordinator.events import CoordinatorRecord
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    TrajectoryRecord,
)
from echo2d.core.work.events import GroupDropped, PromptTaken, SampleKept, SampleRewarded
from echo2d.store.ledger import Ledger

RECORDS = 256  # most events in one turn of the coordinator
GROUP_SIZE = 8
GROUPS_KEPT = 256  # in the buffer and in frozen batches
BAR_MS = 20.0


def group(number: int, tokens: int) -> list[CoordinatorRecord]:
    """The records of one group, its samples of `tokens` tokens each."""
    found: list[CoordinatorRecord] = [PromptTaken(GroupId(number), number, os.urandom(400))]
    for sample in range(GROUP_SIZE):
        spans = (AuthoredSpan(0, tokens, Version(1), Digest(bytes(32)), PeerId("w" * 32)),)
        kept = TrajectoryRecord(
            sample, os.urandom(4 * tokens), os.urandom(4 * tokens), spans, "stop", 0.0
        )
        found += [
            SampleKept(GroupId(number), LeaseId(number), 1, kept),
            SampleRewarded(GroupId(number), sample, 1.0),
        ]
    return [
        *found,
        *([GroupDropped(GroupId(number - GROUPS_KEPT), "old")] if number >= GROUPS_KEPT else []),
    ]


def commits_ms(directory: Path, count: int, tokens: int) -> list[float]:
    """Milliseconds of each commit; commits before the ledger has its steady size do not count."""
    endless = (record for number in range(1 << 30) for record in group(number, tokens))
    before = GROUPS_KEPT * (2 * GROUP_SIZE + 1) // RECORDS
    with Ledger.open(directory / "ledger.sqlite") as ledger:
        return [
            _ms(partial(ledger.append, list(islice(endless, RECORDS))))
            for _ in range(before + count)
        ][before:]


def synced_files_ms(directory: Path, count: int, size: int) -> list[float]:
    data = os.urandom(size)

    def write() -> None:
        with (directory / "file").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    return [_ms(write) for _ in range(count)]


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def line(name: str, times: Sequence[float]) -> str:
    cuts = statistics.quantiles(times, n=100)
    return f"{name:<28} p50 {cuts[49]:6.2f} ms   p99 {cuts[98]:6.2f} ms   max {max(times):6.2f} ms"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--directory", type=Path, help="on the disk in question; a temporary one if left out"
    )
    options.add_argument("--commits", type=int, default=300)
    options.add_argument("--tokens", type=int, default=1000, help="of each sample")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as made:
        commits = commits_ms(Path(made), chosen.commits, chosen.tokens)
        files = synced_files_ms(Path(made), chosen.commits, RECORDS // 2 * 8 * chosen.tokens)
    print(line(f"{RECORDS} records, one commit", commits))
    print(line("as many bytes, one file", files))
    print(
        f"commits within {BAR_MS:.0f} ms: {sum(each <= BAR_MS for each in commits)} of {len(commits)}"
    )


if __name__ == "__main__":
    main()

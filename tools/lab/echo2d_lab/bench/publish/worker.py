"""`python -m echo2d_lab.bench.publish.worker join ...`: `echo2d join`, whose fake engine reads the snapshot.

An engine that loads a version from disk reads all its files while it generates nothing. This one does
that too, into memory of its own, and makes tokens without a model. Unlike SGLang it copies nothing to
a GPU.
"""

import asyncio
import runpy
import time
from pathlib import Path

from echo2d.engines import fake
from echo2d.engines.base import AdapterBase, EngineOptions, RefitReport
from echo2d.engines.fake import FakeEngine
from echo2d.engines.layout import weight_files

READ_BYTES = 64 << 20


class ReadingEngine(FakeEngine):
    """A fake engine whose refit takes as long as reading the files."""

    async def refit(
        self, snapshot: Path, label: str, base: AdapterBase | None = None
    ) -> RefitReport:
        began = time.monotonic()
        await asyncio.to_thread(_read, snapshot)
        report = await super().refit(snapshot, label, base)
        return RefitReport(report.label, time.monotonic() - began)

    async def tensor_digests(self) -> None:  # type: ignore[override]
        """None, as SGLang: the worker has nothing to compare."""


def _read(snapshot: Path) -> None:
    buffer = memoryview(bytearray(READ_BYTES))
    for path in weight_files(snapshot):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def make_reading_engines(options: EngineOptions) -> list[ReadingEngine]:
    return [ReadingEngine(slots=options.slots) for _ in range(options.count)]


def install() -> None:
    """For all engines of this process."""
    fake.make_fake_engines = make_reading_engines  # type: ignore[assignment]
    # The fake engine keeps the digests of the tensors; this one does not give them.
    setattr(fake, "file_tensor_digests", lambda _: {})  # noqa: B010 - for mypy


if __name__ == "__main__":
    install()
    runpy.run_module("echo2d", run_name="__main__")

"""`python -m echo2d_lab.bench.publish.worker join ...`: `echo2d join` with a fake engine that reads the snapshot.

An engine that loads a version from disk reads all its files, and generates nothing meanwhile. So does this
one: it reads them into memory, and makes tokens without a model. Unlike SGLang it copies nothing to a GPU.
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
        """None, as with SGLang: the worker has no digests to compare."""


def _read(snapshot: Path) -> None:
    buffer = memoryview(bytearray(READ_BYTES))
    for path in weight_files(snapshot):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def make_reading_engines(options: EngineOptions) -> list[ReadingEngine]:
    return [ReadingEngine(slots=options.slots) for _ in range(options.count)]


def install() -> None:
    """Let the worker of this process use reading engines."""
    fake.make_fake_engines = make_reading_engines  # type: ignore[assignment]
    # The fake engine computes digests of the tensors; this one does not need them.
    setattr(fake, "file_tensor_digests", lambda _: {})  # noqa: B010 - for mypy


if __name__ == "__main__":
    install()
    runpy.run_module("echo2d", run_name="__main__")

"""Adopts the versions that the learner publishes, and makes the last one survive a power failure.

    files --adopted--> PublishAsked --> the core --> VersionPublished (durable) --a minute--> synced

Not here: which versions are kept (the core), and where their files are (`run_dir/version_files`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from echo2d.core.base.ids import Digest, Epoch, Version
from echo2d.core.cluster.events import CopyLost, PublishAsked, Reply, VersionPublished
from echo2d.core.coordinator.events import CoordinatorEvent
from echo2d.core.weights.manifest import Manifest
from echo2d.errors import Fault
from echo2d.logs import say
from echo2d.runtime.run_dir.version_files import VersionFiles

# A stop waits at most this long for the last version. The whole stop has 30 s (STOP_S_MAX in `process/lifecycle.py`).
SYNC_AT_END_S_MAX = 20.0

log = logging.getLogger("echo2d.coordinator")


class VersionPublisher:
    """See the module docstring. ask: asks the core, and waits for its Reply. last: published before this start."""

    def __init__(
        self,
        files: VersionFiles,
        ask: Callable[..., Awaitable[Reply | None]],
        emit: Callable[[CoordinatorEvent], Awaitable[None]],
        last: VersionPublished | None,
    ) -> None:
        self._files, self._ask, self._emit, self._last = files, ask, emit, last
        self._publishing = asyncio.Lock()
        # The paths of versions that this process has published and not deleted.
        self._paths: set[str] = set()

    def published(self, record: VersionPublished) -> None:
        """Take a version whose publication is durable."""
        self._paths.add(record.path)
        self._last = record

    async def delete(self, path: str) -> None:
        self._paths.discard(path)
        await asyncio.to_thread(self._files.delete, path)

    async def publish(
        self, epoch: Epoch, version: Version, path: str | None, manifest: Manifest | None
    ) -> Reply | Fault | None:
        """Adopt and publish a version. None: the coordinator stops. manifest: as in `VersionFiles.adopt`."""
        async with self._publishing:
            began_at = time.monotonic()
            try:
                adopted = await asyncio.to_thread(self._files.adopt, epoch, version, path, manifest)
            except Fault as fault:
                return fault
            reply = await self._ask(
                lambda number: PublishAsked(
                    number, epoch, version, adopted.digest, adopted.path, adopted.full_bytes
                ),
                timeout_s=None,
            )
            if adopted.path in self._paths:
                say(
                    log,
                    logging.INFO,
                    "published",
                    version=version,
                    full_bytes=adopted.full_bytes,
                    seconds=f"{time.monotonic() - began_at:.3f}",
                )
            # The core refused the version, or the version was published before, from other files.
            else:
                await asyncio.to_thread(self._files.delete, adopted.path)
            return reply

    async def keep_synced(self) -> None:
        """Make the last version survive a power failure if no other follows for a minute."""
        while True:
            last = self._last
            # If no version follows within a minute, the last one is synced.
            await asyncio.sleep(60.0)
            if last is not None and last is self._last:
                await self.sync(last.path, last.digest)

    async def sync_at_end(self) -> None:
        last = self._last
        if last is None or await asyncio.to_thread(self._files.is_synced, last.path):
            return
        log.info(
            "syncing version=%d bytes=%d: the last version is read and written to the disk, so that "
            "it survives a power failure; this takes at most %g s, and a second signal ends it",
            last.version,
            last.full_bytes,
            SYNC_AT_END_S_MAX,
        )
        try:
            async with asyncio.timeout(SYNC_AT_END_S_MAX):
                await asyncio.to_thread(self._files.sync, last.path, last.digest)
        except TimeoutError:
            log.warning(
                "version %d is not synced in %g s; if the machine goes down, the next start hashes it",
                last.version,
                SYNC_AT_END_S_MAX,
            )

    async def sync(self, path: str, digest: Digest) -> None:
        if not await asyncio.to_thread(self._files.sync, path, digest):
            await self._emit(CopyLost(path))

"""Remembers which copies of versions survive a power failure.

Copies are not synced when they are made, because a publish must not wait for the disk. Copies that
stay as results are synced later, and marked. After the machine was restarted, a copy without its mark
may be damaged, and must be hashed.

    versions / <copy> /    a copy
    synced / <copy>        its mark, an empty file
           / .boot         the boot id under which all copies were last known to be undamaged

All methods block.
"""

from collections.abc import Collection
from pathlib import Path

from echo2d.errors import StoreFault
from echo2d.store.disk import read_file, replace_file, store_faults, sync
from echo2d.store.snapshots import scan_snapshot, sync_snapshot

_BOOT = ".boot"
# Linux draws a new boot id at each start of the machine.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SyncedCopies:
    """See the module docstring. copies, marks: the two folders."""

    def __init__(self, copies: Path, marks: Path) -> None:
        self._copies, self._marks = copies, marks
        # Copies of which a sync has failed since this program started.
        self._failed: set[str] = set()

    def suspects(self, names: Collection[str]) -> list[str]:
        """The copies that a power failure may have damaged. Marks of copies that are not in `names` are deleted."""
        self._marks.mkdir(mode=0o700, exist_ok=True)
        for mark in self._marks.iterdir():
            if mark.name != _BOOT and mark.name not in names:
                mark.unlink()
        boot, now = self._marks / _BOOT, _boot_id()
        if now and boot.exists() and read_file(boot) == now:
            return []
        return [name for name in names if not self.has(name)]

    def none_is_damaged(self) -> None:
        """Record that all copies are undamaged, which holds until the machine restarts."""
        replace_file(self._marks / _BOOT, _boot_id(), durable=False)

    def has(self, name: str) -> bool:
        return (self._marks / name).exists()

    def sync(self, name: str) -> None:
        """Make a copy durable. StoreFault: the disk fails, or the copy was deleted meanwhile."""
        copy = self._copies / name
        try:
            with store_faults("syncing", copy):
                sync_snapshot(copy, scan_snapshot(copy))
                sync(self._copies)
                if name not in self._failed:
                    (self._marks / name).touch()
        except StoreFault:
            # The kernel may have dropped what it could not write, and the next sync does not report that.
            self._failed.add(name)
            raise

    def forget(self, name: str) -> None:
        """Delete the mark of a deleted copy."""
        (self._marks / name).unlink(missing_ok=True)


def _boot_id() -> bytes:
    """The boot id. Empty: this system has none."""
    return _BOOT_ID.read_bytes() if _BOOT_ID.exists() else b""

"""Limit the disk bytes of all stores of one process together: each store claims bytes before it
uses them.
"""

import threading
from collections.abc import Mapping

from echo2d.errors import StoreFault


class DiskBudget:
    """A budget of `bytes_max` bytes, shared by named owners. Safe to use from several threads."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._taken: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def taken(self) -> Mapping[str, int]:
        """The bytes of each owner that uses any."""
        return self._taken

    @property
    def left(self) -> int:
        return max(0, self._bytes_max - sum(self._taken.values()))

    @property
    def exceeded(self) -> bool:
        """Whether more is used than allowed, as after a restart with a smaller limit."""
        return sum(self._taken.values()) > self._bytes_max

    def claim(self, owner: str, size: int) -> None:
        """Set the owner's total to `size` bytes. StoreFault: this is more than before, and all owners
        together would exceed the limit; nothing changes.
        """
        with self._lock:
            taken = self._taken | {owner: size}
            if size > self._taken.get(owner, 0) and sum(taken.values()) > self._bytes_max:
                used, more = sum(self._taken.values()), size - self._taken.get(owner, 0)
                limit = f"disk_bytes_max = {self._bytes_max}"
                raise StoreFault(
                    f"{limit}: {used} bytes are used, {more} more are needed", full=True
                )
            self._taken = taken

    def note(self, owner: str, size: int) -> None:
        """Record that the owner uses `size` bytes, even beyond the limit."""
        with self._lock:
            self._taken = {
                each: taken for each, taken in (self._taken | {owner: size}).items() if taken
            }

"""How many bytes the stores of one process may take together: each says what it takes before it takes it."""

import threading

from echo2d.errors import StoreFault


class DiskBudget:
    """At most `bytes_max` bytes for all owners together. Safe to use from several threads."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._taken: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        return max(0, self._bytes_max - sum(self._taken.values()))

    @property
    def exceeded(self) -> bool:
        """Possible after a start with a smaller limit than before."""
        return sum(self._taken.values()) > self._bytes_max

    def claim(self, owner: str, size: int) -> None:
        """The owner takes `size` bytes in all from now on. StoreFault, if that is more and too much: then as before."""
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
        """The owner has taken `size` bytes, whatever the limit says."""
        with self._lock:
            self._taken = {
                each: taken for each, taken in (self._taken | {owner: size}).items() if taken
            }

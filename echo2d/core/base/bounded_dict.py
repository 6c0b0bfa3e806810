"""Books with a limit: a dictionary remembers so many entries, and the oldest make room."""

from typing import Any


def keep_newest(entries: dict[Any, Any], most: int) -> None:
    """Forget the entries that were put in first until at most `most` are left."""
    while len(entries) > most:
        del entries[next(iter(entries))]

"""Keep a dictionary below a limit by evicting its oldest entries."""

from typing import Any


def keep_newest(entries: dict[Any, Any], most: int) -> None:
    """Delete the entries that were inserted first until at most `most` are left.

    Pass an OrderedDict if there are many thousand entries: to find its first entry, a dict must skip all deleted ones.
    """
    while len(entries) > most:
        del entries[next(iter(entries))]

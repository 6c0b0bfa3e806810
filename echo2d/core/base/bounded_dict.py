"""Keep a dictionary below a limit by evicting its oldest entries."""

from typing import Any


def keep_newest(entries: dict[Any, Any], most: int) -> None:
    """Delete the entries that were inserted first until at most `most` are left.

    Pass an OrderedDict if there are many thousand entries: a dict looks for its first entry behind all deleted ones.
    """
    while len(entries) > most:
        del entries[next(iter(entries))]

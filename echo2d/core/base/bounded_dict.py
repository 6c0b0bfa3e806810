"""Keep a dictionary below a limit by evicting its oldest entries."""

from collections.abc import Container
from typing import Any


def keep_newest(entries: dict[Any, Any], most: int, keep: Container[Any] = ()) -> None:
    """Delete the entries that were inserted first until at most `most` are left. keep: fewer than `most` that stay.

    Pass an OrderedDict if there are many thousand entries: to find its first entry, a dict must skip all deleted ones.
    """
    while len(entries) > most:
        del entries[next(each for each in entries if each not in keep)]

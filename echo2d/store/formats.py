"""Each file or directory that outlives a program has a format number; another number is one clear line.

A newer one was written by a newer echo2d, and is never touched by an older one. For an older one its
owner says how to go on.
"""

from echo2d.errors import OperatorFault


def require_format(what: str, found: int, ours: int, *, older: str) -> None:
    """OperatorFault unless `found` is our format. older: what to do about an older one."""
    if found > ours:
        raise OperatorFault(
            f"{what} has format {found}, of a newer echo2d; this one reads format {ours}: "
            "go on with the echo2d that wrote it, or a newer one"
        )
    if found < ours:
        raise OperatorFault(f"{what} has format {found}; this echo2d reads format {ours}: {older}")

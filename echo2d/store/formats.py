"""Checks the format number that each lasting file or directory has; another number is one clear line.

A newer format was written by a newer echo2d, and an older echo2d never touches the file. For an older
format, the owner of the file says how to go on.
"""

from echo2d.errors import OperatorFault


def require_format(what: str, found: int, ours: int, *, older: str) -> None:
    """OperatorFault unless `found` is our format. older: what to do about an older format."""
    if found > ours:
        raise OperatorFault(
            f"{what} has format {found}, of a newer echo2d; this one reads format {ours}: "
            "go on with the echo2d that wrote it, or a newer one"
        )
    if found < ours:
        raise OperatorFault(f"{what} has format {found}; this echo2d reads format {ours}: {older}")

"""Limits that several tables share, and the parser of uplink limits."""

from echo2d.errors import OperatorFault
from echo2d.quantities import parse_rate

# This many tokens with their logprobs are 1 MiB on the control link, whose messages have at most 4 MiB.
NEW_TOKENS_MAX = 131072
PORT_MAX = 65535
# Enough for the frames of four versions and for two snapshots of a 50 GB model.
DISK_BYTES_MAX = 256 << 30
UPLINK_LIMIT_MIN = 125e3  # bytes/s, 1mbit: below it, one frame takes seconds


def uplink_bytes_per_s(key_name: str, limit: str, least: str) -> int | None:
    """Parse a limit such as 50mbit into bytes/s; None: no limit."""
    try:
        rate = parse_rate(limit) if limit else None
    except OperatorFault as fault:
        raise OperatorFault(f"{key_name}: {fault}") from fault
    if rate is not None and rate < UPLINK_LIMIT_MIN:
        raise OperatorFault(f"{key_name}: expected at least {least}; found {limit!r}")
    return None if rate is None else int(rate)

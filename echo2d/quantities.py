"""Parses quantities as people write them: 100mbit, 64MiB, 50ms."""

import re
from collections.abc import Mapping

from echo2d.errors import OperatorFault

SIZES = {"": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_rate(text: object) -> float:
    """Bytes/s, from text such as "100mbit". OperatorFault: it is not a rate."""
    return _parse(text, {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}, "a rate such as 100mbit")


def parse_bytes(text: object) -> int:
    """Bytes, from text such as "64MiB". OperatorFault: it is not a size."""
    return round(_parse(text, SIZES, "a size such as 64MiB"))


def parse_seconds(text: object) -> float:
    """Seconds, from text such as "50ms" or "2s". OperatorFault: it is not a time."""
    return _parse(text, TIMES, "a time such as 50ms")


def _parse(text: object, units: Mapping[str, float], expected: str) -> float:
    found = _QUANTITY.fullmatch(str(text).strip())
    if found is None or found[2].lower() not in units:
        raise OperatorFault(f"expected {expected}; found {text!r}")
    return float(found[1]) * units[found[2].lower()]

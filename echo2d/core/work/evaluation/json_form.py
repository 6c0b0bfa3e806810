"""An evaluation as JSON: for the API, metrics.jsonl and `echo2d status --scores --json`."""

import math
from typing import Any

from echo2d.core.work.evaluation.events import Evaluated


def evaluated_json(found: Evaluated) -> dict[str, Any]:
    """A number that does not exist, such as the error of one value, is null."""
    return {
        "number": found.number,
        "name": found.name,
        "version": found.version,
        "digest": found.digest.hex(),
        "rows": found.rows,
        "of": found.of,
        "samples": found.samples,
        "mean": _number(found.mean),
        "se": _number(found.se),
        "pass_at": {str(each.k): each.share for each in found.passes},
        "parts": {part.name: part.value for part in found.parts},
        "truncated": _number(found.truncated),
        "tokens": _number(found.tokens),
        "seconds": found.seconds,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Small JSON documents in which damage shows: the last field is a checksum of all others.

Not here: what the fields mean, and how a file is replaced atomically (`disk.replace_file`).
"""

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

_SUM = "sum"
_SUM_BYTES = 8


def sealed(facts: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Encode the fields and their sum. indent: as in json.dumps."""
    return json.dumps({**facts, _SUM: _sum_of(facts)}, indent=indent).encode()


def unsealed(document: bytes) -> dict[str, Any]:
    """The fields without the sum. ValueError: the document is not as it was written."""
    found = json.loads(document)
    if not isinstance(found, dict) or found.pop(_SUM, None) != _sum_of(found):
        raise ValueError("its checksum is wrong")
    return found


def _sum_of(facts: Mapping[str, Any]) -> str:
    return blake3(json.dumps(facts, separators=(",", ":")).encode()).hexdigest(_SUM_BYTES)

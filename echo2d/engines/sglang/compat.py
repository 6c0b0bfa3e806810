"""What differs between the versions of SGLang that echo2d speaks to. Pure; the only place that knows.

| from | what changed |
| --- | --- |
| 0.5.19 | the last chunk of a request says which weight version wrote which token: nothing older will do |
| 0.5.22 | an update that cannot flush the cache says so; before, its assertion ends the server |

A server is probed: the version it reports, and the paths it serves. One that serves no list of its paths is taken at
its version; one newer than all that were tried is taken for the newest.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from echo2d.errors import EngineFault

OLDEST = (0, 5, 19)
NEWEST = (0, 5, 23)  # the newest one tried
_FLUSH_REPORTED_SINCE = (0, 5, 22)
_NEEDED = (
    "/generate",
    "/model_info",
    "/update_weights_from_disk",
    "/pause_generation",
    "/continue_generation",
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """flushes_safely: an update may be asked to flush the cache. tried: not newer than what echo2d was tried with."""

    version: str
    flushes_safely: bool
    tried: bool


def dialect_of(version: str, paths: Collection[str] | None) -> Dialect:
    """paths: None where the server does not list them. EngineFault: too old, or not what it says."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found else (0, 0, 0)
    if number < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EngineFault(
            f"SGLang {version or '(unknown version)'} does not report per-token weight versions; "
            f"use {oldest} or newer"
        )
    for path in _NEEDED:
        if paths is not None and path not in paths:
            raise EngineFault(f"SGLang {version} does not serve {path}, which echo2d needs")
    return Dialect(version, number >= _FLUSH_REPORTED_SINCE, tried=number <= NEWEST)

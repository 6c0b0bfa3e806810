"""Knows how the supported versions of SGLang differ. Pure; no other module depends on a version.

| since | change |
| --- | --- |
| 0.5.19 | the last chunk of a request reports which version wrote which token (required) |
| 0.5.23 | updates are framed by begin and end, which our module in the server needs |
| 0.5.22 | an update that cannot flush the cache says so; before, an assertion ended the server |

A server is probed for the version that it reports and for the paths that it serves. If it does not
list its paths, its version decides alone. A version newer than `NEWEST` is treated like `NEWEST`.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from echo2d.errors import EngineFault

OLDEST = (0, 5, 19)
_NEEDED = (
    "/generate",
    "/model_info",
    "/update_weights_from_disk",
    "/pause_generation",
    "/continue_generation",
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between servers, for one server."""

    version: str
    flushes_safely: bool  # an update may be asked to flush the cache
    tried: bool  # echo2d was tried with this version, or with a newer one
    # It runs with --enable-deterministic-inference: an assertion then ends it if a request has min_p
    # (seen in 0.5.23).
    deterministic: bool = False
    calls_inside: bool = False  # it calls our module where nothing is generated


def dialect_of(
    version: str, paths: Collection[str] | None, *, deterministic: bool = False
) -> Dialect:
    """Return the dialect of a server that reports `version` and serves `paths`.

    paths: None if the server does not list them. EngineFault: the version is too old or unknown, or
    a needed path is missing.
    """
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
    flushes = number >= (0, 5, 22)
    # 0.5.23 is the newest release that was tried.
    return Dialect(
        version,
        flushes,
        tried=number <= (0, 5, 23),
        deterministic=deterministic,
        calls_inside=number >= (0, 5, 23),
    )

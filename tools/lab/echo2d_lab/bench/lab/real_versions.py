"""Consecutive versions of a real run (`echo2d_lab.research.rl_updates`), made as large as a laboratory wants them.

A version's weights are repeated until they have so many bytes: what changes from one version to the next, where and by
how much, is what training changed, and no chunk is encoded by the help of another one. Blocking functions.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo2d.core.weights.manifest import is_safetensors
from echo2d.errors import OperatorFault
from echo2d.store.disk import read_at, store_faults
from echo2d.store.snapshots import scan_snapshot


def versions_of(run: Path) -> list[Path]:
    """Its v1, v2, ... in order."""
    numbered = (path for path in run.glob("v*") if path.is_dir() and path.name[1:].isdigit())
    return sorted(numbered, key=lambda path: int(path.name[1:]))


class RealVersions:
    """The last `count` versions of a run."""

    def __init__(self, run: Path, count: int) -> None:
        found = versions_of(run)
        if len(found) < count:
            raise OperatorFault(
                f"--versions {run}: expected at least {count}, one for each round; found {len(found)}"
            )
        self._paths = found[-count:]

    def weights(self, index: int, words: int) -> NDArray[np.uint16]:
        """Those of one version, again and again, so many of them."""
        return np.resize(np.concatenate([*_weights(self._paths[index])]), words)


def _weights(version: Path) -> Iterator[NDArray[np.uint16]]:
    """The data sections of its files, bf16 as they are."""
    for file in scan_snapshot(version):
        if is_safetensors(file.path):
            path = version / file.path
            with store_faults("reading", path):
                data = read_at(path, file.size - file.header_bytes, file.header_bytes)
            yield np.frombuffer(data, dtype="<u2")

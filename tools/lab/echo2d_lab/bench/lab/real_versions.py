"""Consecutive versions of a real run (`echo2d_lab.research.rl_updates`), made as large as a laboratory needs them.

A version's weights are repeated until they have the wanted size. The changes from one version to the next, their places
and sizes, are those of the training, and no chunk is encoded with the help of another one. The functions block.
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
    """The run's v1, v2, ... in order."""
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
        """The weights of one version, repeated up to this many words."""
        return np.resize(np.concatenate([*_weights(self._paths[index])]), words)


def _weights(version: Path) -> Iterator[NDArray[np.uint16]]:
    """The data sections of the version's files, as 16-bit words."""
    for file in scan_snapshot(version):
        if is_safetensors(file.path):
            path = version / file.path
            with store_faults("reading", path):
                data = read_at(path, file.size - file.header_bytes, file.header_bytes)
            yield np.frombuffer(data, dtype="<u2")

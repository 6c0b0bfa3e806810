"""Verifies the base model (`--base-model`) of a worker whose run publishes LoRA adapters.

The directory is hashed when the first adapter arrives, and again after the inode, size, mtime or
ctime of one of its files has changed. The engine compares what it loaded with these digests.
Calls block, and are made one at a time.
"""

import logging
from pathlib import Path

from echo2d.adapters import base_digest, base_files, pinned_base
from echo2d.engines.base import AdapterBase
from echo2d.engines.layout import file_tensor_digests
from echo2d.errors import EngineFault, OperatorFault

log = logging.getLogger("echo2d.worker")

_Stamps = list[tuple[str, int, int, int, int]]


class LoraBase:
    """directory: None if the operator configured no base model."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        # The inodes, sizes and times of the files from which `_digest` and `_base` were computed.
        self._stamps: _Stamps = []
        self._digest = ""
        self._base: AdapterBase | None = None

    def of(self, snapshot: Path) -> AdapterBase | None:
        """The base model that a verified snapshot needs; None if the snapshot is a whole model.

        EngineFault: the base model that the adapter names is not here, or cannot be read.
        """
        try:
            wanted = pinned_base(snapshot)
            return None if wanted is None else self._verified(wanted)
        except (OperatorFault, OSError) as fault:
            raise EngineFault(f"an adapter cannot be served: {fault}") from fault

    def _verified(self, wanted: str) -> AdapterBase:
        if self._directory is None:
            raise EngineFault(
                f"the version is an adapter of base model {wanted[:12]}; pass its directory as "
                "--base-model"
            )
        stamps = _stamps(self._directory)
        if stamps != self._stamps:
            self._digest, self._base = base_digest(self._directory), None
            self._stamps = stamps
            log.info("base model hashed path=%s digest=%s", self._directory, self._digest[:12])
        if self._digest != wanted:
            raise EngineFault(
                f"the adapter belongs to base model {wanted[:12]}, but --base-model is "
                f"{self._digest[:12]}"
            )
        if self._base is None:
            self._base = AdapterBase(self._directory, wanted, file_tensor_digests(self._directory))
        # If a file changed during the reads above, its hash may be of half old and half new bytes.
        if stamps != _stamps(self._directory):
            raise EngineFault(f"base model {self._directory} changed while it was read")
        return self._base


def _stamps(directory: Path) -> _Stamps:
    found = [(path.name, path.stat()) for path in base_files(directory)]
    return [
        (name, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for name, each in found
    ]

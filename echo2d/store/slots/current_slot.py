"""Say which slot is current: a small file names it, and one atomic rename replaces that file.

    root / current.json        {"slot": "a", "epoch": 1, "version": 7, "digest": "..."}
           a / manifest        the manifest of slot a; written when the slot is complete
             / model / ...     the files that an engine loads

Blocking functions.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from echo2d.core.base.canonical import require
from echo2d.core.base.ids import Epoch, Version
from echo2d.core.weights.manifest import Manifest
from echo2d.errors import IntegrityFault
from echo2d.store.disk import read_file, replace_file, store_faults

SLOT_NAMES = ("a", "b")
CURRENT = "current.json"
SLOT_MANIFEST = "manifest"

log = logging.getLogger("echo2d.store")


@dataclass(frozen=True, slots=True)
class CurrentSlot:
    """The current version. directory: its model files, to be read only while it is current."""

    directory: Path
    epoch: Epoch
    version: Version
    manifest: Manifest

    @property
    def slot(self) -> str:
        return self.directory.parent.name

    def flip(self) -> None:
        """Make this slot the current one by one atomic rename."""
        digest = self.manifest.digest.hex()
        facts = {"slot": self.slot, "epoch": self.epoch, "version": self.version, "digest": digest}
        path = self.directory.parent.parent / CURRENT
        replace_file(path, json.dumps(facts).encode(), durable=False)


def read_current(root: Path) -> CurrentSlot | None:
    """The slot that current.json names. None: there is none, or the names and sizes of its files
    are not those of its manifest.
    """
    path = root / CURRENT
    try:
        with store_faults("reading", path):
            if not path.exists():
                return None
            facts = json.loads(read_file(path))
            model = root / SLOT_NAMES[SLOT_NAMES.index(facts["slot"])] / "model"
            manifest = read_manifest(model)
            require(
                manifest.digest.hex() == facts["digest"],
                "the slot's manifest is another version's",
            )
            return CurrentSlot(
                model, Epoch(int(facts["epoch"])), Version(int(facts["version"])), manifest
            )
    except (ValueError, KeyError, TypeError, OverflowError, IntegrityFault) as error:
        log.warning("current slot is damaged path=%s error=%s", path, error)
        return None


def read_manifest(model: Path) -> Manifest:
    """The manifest of the slot with these model files. IntegrityFault: it has none, or files of
    other names or sizes.
    """
    path = model.parent / SLOT_MANIFEST
    if not path.exists():
        raise IntegrityFault("the slot has no manifest")
    manifest = Manifest.decode(read_file(path))
    for file in manifest.files:
        if not (model / file.path).exists() or (model / file.path).stat().st_size != file.size:
            raise IntegrityFault(f"{file.path} is missing or has another size")
    return manifest


def model_files(model: Path) -> list[Path]:
    """All files below a directory."""
    return [path for path in model.rglob("*") if not path.is_dir()]

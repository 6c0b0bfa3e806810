"""Checks a snapshot before and after a server loads it.

The check before is needed because a server may end at a file that it cannot read. The check after is needed
because the files could have been replaced while the server read them.
"""

import asyncio
from pathlib import Path

from echo2d.core.base.model_config import vocab_size
from echo2d.engines.layout import SnapshotLayout, read_layout, weight_files
from echo2d.engines.server.weight_update import Doubtful, Files, WeightUpdate
from echo2d.errors import EngineFault


async def require_unchanged(order: WeightUpdate) -> None:
    """Doubtful: the files changed since `order` was made, so other weights may be loaded."""
    if order.files != await asyncio.to_thread(list_files, order.snapshot):
        raise Doubtful(f"{order.snapshot.name} changed while the server loaded it")


def read_model(snapshot: Path) -> SnapshotLayout:
    """Read the layout of a whole model. EngineFault: it is unreadable, or has no weights."""
    layout = read_layout(snapshot)
    if not layout.tensors:
        raise EngineFault("the snapshot holds no safetensors weights")
    return layout


def list_files(snapshot: Path) -> Files:
    """List name, size, time of change and inode of the files that a server loads.

    If one of these differs later, the snapshot must count as another one.
    """
    try:
        found = [
            (path.name, path.stat()) for path in [*weight_files(snapshot), snapshot / "config.json"]
        ]
    except OSError as error:
        raise EngineFault(f"the snapshot cannot be read: {error}") from error
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found]


def vocabulary(layout: SnapshotLayout) -> int:
    """EngineFault: config.json does not say it."""
    size = vocab_size(layout.config)
    if size is None:
        raise EngineFault("config.json: expected an integer vocab_size, found none")
    return size

"""The snapshot that a server is told to load, looked at before and after: SGLang may die of what it cannot read."""

import asyncio
from pathlib import Path

from echo2d.engines.layout import SnapshotLayout, read_layout, weight_files
from echo2d.engines.sglang.weight_update import Doubtful, Files, WeightUpdate
from echo2d.errors import EngineFault


async def require_unchanged(order: WeightUpdate) -> None:
    """Doubtful: the files are not those that were verified any more."""
    if order.files != await asyncio.to_thread(list_files, order.snapshot):
        raise Doubtful("the snapshot changed while it was loaded")


def read_model(snapshot: Path) -> SnapshotLayout:
    layout = read_layout(snapshot)
    if not layout.tensors:
        raise EngineFault("the snapshot holds no safetensors weights")
    return layout


def list_files(snapshot: Path) -> Files:
    """Name, size, time and inode of what is loaded: another one of these is another snapshot."""
    try:
        found = [
            (path.name, path.stat()) for path in [*weight_files(snapshot), snapshot / "config.json"]
        ]
    except OSError as error:
        raise EngineFault(f"the snapshot cannot be read: {error}") from error
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found]


def limits_of(layout: SnapshotLayout) -> tuple[int, int | None]:
    """Vocabulary size and context length."""
    text = layout.config.get("text_config")
    facts = {**layout.config, **(text if isinstance(text, dict) else {})}
    vocab_size, context = facts.get("vocab_size"), facts.get("max_position_embeddings")
    if not isinstance(vocab_size, int):
        raise EngineFault("config.json does not say how many tokens there are")
    return vocab_size, context if isinstance(context, int) else None

"""The LoRA adapters that a server holds beside its base, each under its version's label.

A request names its adapter, so the version of each of its tokens is known, and a newer adapter cuts nothing. A request
goes on under the adapter with which it began while its next token can still be trained on; then it is cut, and goes on
under the newest one. A request whose caller chose a held adapter keeps that one to its end. A server reads an adapter's
directory again whenever it has evicted it. So each label has a directory of its own, which stays as it is until the
label is dropped; a worker's slots are overwritten. The copy has the tensors of the version, and an adapter_config.json
that every server reads in the same way.
"""

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from echo2d.core.weights.manifest import ADAPTER_CONFIG
from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.base import AdapterBase
from echo2d.engines.server.continuation import StreamChunk
from echo2d.errors import EngineFault


class ServedAdapters:
    """folder: holds a directory for each label."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._base: AdapterBase | None = None
        # Those that the server was asked to load, oldest first, and those of them that it has loaded.
        self._paths: dict[str, Path] = {}
        self._loaded: set[str] = set()
        self.newest: str | None = None  # the one under which requests begin that choose none
        # Those that requests may choose, the newest among them.
        self.held: frozenset[str] = frozenset()

    def copy(self, snapshot: Path, label: str, adapter: AdapterLayout) -> Path:
        """Copy the files of an adapter to the label's directory, which is returned, unless they are there. Blocking.

        From now on the server may be asked to load it, and may have it. EngineFault: the disk refuses.
        """
        if label in self._paths:
            return self._paths[label]
        kept = self._folder.absolute() / label
        part = kept.with_name(f"{label}.part")
        try:
            for stale in (part, kept):
                shutil.rmtree(stale, ignore_errors=True)
            shutil.copytree(snapshot, part)
            config = json.loads((part / ADAPTER_CONFIG).read_bytes()) | adapter.plain_config
            (part / ADAPTER_CONFIG).write_text(json.dumps(config))
            part.rename(kept)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise EngineFault(f"an adapter cannot be copied to {kept}: {error}") from error
        self._paths[label] = kept
        return kept

    def holds(self, label: str) -> bool:
        """Whether the server has loaded it. A label never has other bytes."""
        return label in self._loaded

    def unloading(self, label: str) -> None:
        """The server is asked to drop it, and may not have it from now on."""
        self._loaded.discard(label)

    def serve(self, label: str, base: AdapterBase) -> None:
        """From now on this adapter, which the server has loaded, is the newest."""
        self._paths[label] = self._paths.pop(label)
        self._loaded.add(label)
        self.held = (base.kept & self.held) | {label}
        self.newest, self._base = label, base

    def serve_none(self) -> None:
        self.newest, self.held = None, frozenset()

    def latest(self, labels: Collection[str], most: int) -> frozenset[str]:
        """Of these labels the ones that were served last, at most so many."""
        served = [label for label in self._paths if label in labels]
        return frozenset(served[max(0, len(served) - most) :])

    def full(self, room: int) -> bool:
        """Whether a server with room for so many has none for another one."""
        return len(self._paths) >= room

    def outdated(self, label: str) -> bool:
        """Whether a request must not go on under this label."""
        return (
            self.newest is not None
            and self._base is not None
            and self._base.outdated(label, self.newest)
        )

    def unneeded(self, used: Collection[str]) -> list[str]:
        """The labels that are neither held nor among `used`."""
        return [label for label in self._paths if label not in self.held and label not in used]

    def forget(self, label: str) -> Path:
        """The server does not have it any more. Returns its directory, to be deleted."""
        return self._paths.pop(label)

    def clear(self) -> None:
        """The server has none of them any more: delete all files, also those of earlier lives. Blocking."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self.serve_none()
        self._paths.clear()
        self._loaded.clear()


def under_adapter(chunk: StreamChunk, weights: str, label: str) -> StreamChunk:
    """The chunk of a request under adapter `label`, where the server names only its weights."""
    spans = chunk.spans
    if spans is not None:
        spans = [replace(span, label=label) if span.label == weights else span for span in spans]
    return replace(chunk, spans=spans, label=label if chunk.label == weights else chunk.label)

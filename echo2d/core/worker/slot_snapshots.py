"""Tracks which snapshots are in the two slots of a worker, and which of them a root has published.

in a slot --(an accepted root names its digest)--> published, with the root's publish_seq
    +--(overwritten, lost)--> gone
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PublishSeq
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.worker.events import Standing

SNAPSHOT_SLOTS = 2  # current and spare


class SlotSnapshots(Collection[VersionKey]):
    """The snapshots in the slots, oldest first; the last one is current.

    If a snapshot is in both slots, only the newer copy is known.
    """

    def __init__(self, standing: Iterable[Standing]) -> None:
        self._paths = {each.key: each.path for each in standing}
        self._published: dict[VersionKey, PublishSeq] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._paths

    def __iter__(self) -> Iterator[VersionKey]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def current(self) -> VersionKey | None:
        return next(reversed(self._paths), None)

    @property
    def published(self) -> Mapping[VersionKey, PublishSeq]:
        """The snapshots that an accepted root has named; only these may be served."""
        return self._published

    def path(self, key: VersionKey | None) -> str | None:
        """The directory of this snapshot; None if it is in no slot."""
        return None if key is None else self._paths.get(key)

    def publish(self, key: VersionKey, seq: PublishSeq) -> None:
        """Record that a root has named this snapshot. Nothing changes if it is in no slot."""
        if key in self._paths:
            self._published[key] = max(seq, self._published.get(key, seq))

    def revoke(self, key: VersionKey) -> None:
        self._published.pop(key, None)

    def put(self, key: VersionKey, path: str) -> None:
        """Record that this snapshot was written and is current."""
        # The last entry is the current one, so a key that was here moves to the end.
        self._paths.pop(key, None)
        self._paths[key] = path
        keep_newest(self._paths, SNAPSHOT_SLOTS)
        self._published = {key: at for key, at in self._published.items() if key in self._paths}

    def lose(self, key: VersionKey) -> None:
        """Record that this snapshot is overwritten or damaged."""
        self._paths.pop(key, None)
        self._published.pop(key, None)

    def lose_spare(self) -> None:
        """Record that the spare slot is about to be written."""
        for key in list(self._paths)[:-1]:
            self.lose(key)

    def check(self) -> None:
        assert len(self._paths) <= SNAPSHOT_SLOTS
        assert self._published.keys() <= self._paths.keys()

"""The published versions of a run: the bytes of each, which are revoked, which snapshot copies are
kept.

    published --(published again in a newer epoch)--> newest again, under a new publish_seq
        +-- a newer epoch resumed below it, or gave its number to other bytes --> revoked

A copy is kept while it is needed to spread versions. The copies of the newest version, of the best
versions and of every `keep_every`-th version also stay afterwards, as results of the run.

Kept true: publish_seq only grows; two versions that are not revoked never share a number.
Not here: how versions reach the workers (`broadcast`).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from echo2d.core.base.ids import Epoch, PublishSeq, Version
from echo2d.core.cluster.events import (
    DeleteVersion,
    Note,
    PublishAsked,
    SyncVersion,
    VersionPublished,
)
from echo2d.core.protocol.control_messages import VersionKey

# At most this many versions are remembered; tokens of older ones are far beyond any staleness bound.
PUBLISHED_VERSIONS_MAX = 4096
# The copies of this many newest versions are kept if there is room, so that a worker that is three
# versions behind gets a delta.
BASES_MAX = 4


@dataclass(frozen=True, slots=True)
class PublishRefusal:
    """Why a publish is refused: an error word of the API and a sentence."""

    error: str
    detail: str


def key_of(record: VersionPublished) -> VersionKey:
    return VersionKey(record.version, record.digest)


def facts_of(record: VersionPublished) -> dict[str, Any]:
    """A published version as answers of the API name it (JSON)."""
    return {
        "version": record.version,
        "digest": record.digest.hex(),
        "publish_seq": record.publish_seq,
    }


class PublishedVersions:
    """See the module docstring.

    published: the versions in the order of publish_seq, without revoked versions. lost: the paths of copies that are
    gone. keep_every: of each span of this many versions, the copy of the first version stays; 0: none.
    """

    def __init__(
        self,
        published: Iterable[VersionPublished],
        publish_seq: PublishSeq,
        *,
        lost: Collection[str] = (),
        keep_every: int = 0,
    ) -> None:
        self._keep_every = keep_every
        # By span of `keep_every` versions, the version whose copy stays as a result of the run.
        self._results: dict[int, VersionPublished] = {}
        # Spans whose result was deleted for lack of room: no later version takes its place.
        self._given_up: set[int] = set()
        # What `copies` returned last; None: it must be computed again.
        self._found_copies: list[VersionPublished] | None = None
        # The versions that are not revoked, in the order of publish_seq.
        self._live: dict[VersionKey, VersionPublished] = {}
        # How many versions were revoked or forgotten so far. While it stays the same, live versions stay live.
        self.ended = 0
        # The snapshot copies in the run directory by their path, in the order of publish_seq.
        self._copies: dict[str, VersionPublished] = {}
        # Copies that an audit needs; they are kept, too.
        self.pinned: Collection[str] = ()
        # The versions that workers are told to hold: they stay live, and audits need their copies.
        self.held: tuple[VersionKey, ...] = ()
        # The versions with the best score, and those that are being evaluated; their copies are kept, too.
        self.scored: frozenset[VersionKey] = frozenset()
        self.publish_seq = publish_seq
        # The state from which `surplus` decided last; None: something has changed since.
        self._settled: object = None
        # Paths of results that have been synced, so that they survive a power failure.
        self._synced: frozenset[str] = frozenset()
        for record in published:
            self._take(record, has_copy=record.path not in lost)

    @property
    def newest(self) -> VersionPublished | None:
        """The newest publish that is not revoked."""
        return next(reversed(self._live.values()), None)

    @property
    def current(self) -> VersionPublished | None:
        """The newest publish; None if it is revoked, as the copies of older ones may be gone."""
        newest = self.newest
        return newest if newest is not None and newest.publish_seq == self.publish_seq else None

    def live(self, key: VersionKey | None) -> VersionPublished | None:
        """The newest publish of these bytes under this number.

        None: they were never published, are revoked, or were forgotten long ago.
        """
        return None if key is None else self._live.get(key)

    def numbered(self, version: Version) -> VersionKey | None:
        """The live version with this number. None: there is none."""
        newest_first = reversed(self._live)
        return next((key for key in newest_first if key.version == version), None)

    def judge(
        self, asked: PublishAsked, *, resume_step: int, committed: int
    ) -> VersionPublished | PublishRefusal | None:
        """Judge a publish of the current epoch. None: accept it; a record: it repeats that one."""
        mine = [record for record in self._live.values() if record.epoch == asked.epoch]
        same = next((record for record in mine if record.version == asked.version), None)
        if same is not None and same.digest == asked.digest:
            return same
        if same is not None:
            return PublishRefusal(
                "digest",
                f"version {asked.version} has other bytes in this epoch; open a new session",
            )
        if not mine and asked.version != resume_step:
            return PublishRefusal(
                "order", f"a session publishes its resume_step first: version {resume_step}"
            )
        if mine and asked.version < mine[-1].version:
            return PublishRefusal("order", f"version {mine[-1].version} is published already")
        if asked.version > committed:
            return PublishRefusal(
                "order", f"step {asked.version} is not committed; {committed} is the last one"
            )
        return None

    def others_of(self, record: VersionPublished) -> bool:
        """Whether the session that published this version has published another one."""
        return any(
            each.epoch == record.epoch and each is not record for each in self._live.values()
        )

    def replaced_by(self, asked: PublishAsked) -> list[VersionKey]:
        """The versions that this publish revokes: those with the same number and other bytes."""
        return [
            key for key in self._live if key.version == asked.version and key.digest != asked.digest
        ]

    def above(self, step: int, *, before: Epoch) -> list[VersionKey]:
        """The versions that a session of epoch `before` revokes when it resumes at `step`."""
        return [
            key
            for key, record in self._live.items()
            if key.version > step and record.epoch < before
        ]

    def publish(self, asked: PublishAsked) -> VersionPublished:
        """Take an accepted publish."""
        seq = PublishSeq(self.publish_seq + 1)
        record = VersionPublished(
            seq, asked.epoch, asked.version, asked.digest, asked.path, asked.full_bytes
        )
        self._take(record)
        return record

    def revoke(self, keys: Collection[VersionKey]) -> None:
        for key in keys:
            del self._live[key]
            self.ended += 1
            self._given_up.discard(self._span(key.version))
        self.held = tuple(key for key in self.held if key not in keys)
        self._results = {
            span: record for span, record in self._results.items() if key_of(record) not in keys
        }
        self._changed()

    def copies(self) -> list[VersionPublished]:
        """The live versions whose snapshot copies are kept, newest first."""
        if self._found_copies is None:
            self._found_copies = [
                record
                for record in reversed(self._copies.values())
                if self._live.get(key_of(record)) is record
            ]
        return self._found_copies

    def lose(self, path: str) -> list[DeleteVersion]:
        """Delete a copy whose bytes are not what was published, or the remains of a copy."""
        self._results = {span: each for span, each in self._results.items() if each.path != path}
        lost = self._copies.pop(path, None)
        self._changed()
        return [DeleteVersion(path)] if lost else []

    def fit(self, paths: Collection[str], bytes_max: int) -> bool:
        """Whether there is room for the copies at these paths and for the next version."""
        return self._taken({*paths}) <= bytes_max

    def surplus(
        self, needed: Collection[str], *, bases: int, bytes_max: int
    ) -> list[DeleteVersion | SyncVersion | Note]:
        """Delete all snapshot copies except the newest version's, the `needed` ones, and those for which
        there is room. Room is given first to the copies that audits need, then to the best versions, the
        newest `bases`, and the results, newest first. The best versions and the results are synced once.

        There is room as long as the next version and its upload still fit into bytes_max.
        """
        newest = self.newest
        state = (frozenset(needed), frozenset(self.pinned), self.scored, bases, bytes_max)
        if state == self._settled:
            return []
        self._settled = state
        kept = {*needed, *([] if newest is None else [newest.path])}
        room = bytes_max - self._taken(kept)
        for path in self._wanted(bases):
            size = self._copies[path].full_bytes
            if path not in kept and size <= room:
                kept.add(path)
                room -= size
        surplus = [path for path in self._copies if path not in kept]
        for path in surplus:
            del self._copies[path]
        dropped = [each for each in self._results.items() if each[1].path not in kept]
        for span, _ in dropped:
            del self._results[span]
            self._given_up.add(span)
        self._found_copies = None
        self._forget()
        reason = "run.disk_bytes_max has no room for its copy"
        notes = [Note("kept", f"version {one.version} is deleted: {reason}") for _, one in dropped]
        deleted = (DeleteVersion(path) for path in surplus)
        return [*deleted, *self._sync_results(), *notes]

    def _sync_results(self) -> list[SyncVersion]:
        """Sync the results that have not been synced yet; they count as synced from now on."""
        best = [record for record in self.copies() if key_of(record) in self.scored]
        results = {record.path: record.digest for record in (*best, *self._results.values())}
        new = [path for path in results if path not in self._synced]
        self._synced = frozenset(results)
        return [SyncVersion(path, results[path]) for path in new]

    def _wanted(self, bases: int) -> Iterator[str]:
        """Paths of copies to keep if there is room, the most important ones first."""
        copies = self.copies()
        yield from (path for path in self.pinned if path in self._copies)
        yield from (record.path for record in copies if key_of(record) in self.scored)
        yield from (record.path for record in copies[:bases])
        yield from (record.path for record in reversed(self._results.values()))

    def _take(self, record: VersionPublished, *, has_copy: bool = True) -> None:
        key = key_of(record)
        self._live.pop(key, None)
        self._live[key] = record
        self.publish_seq = max(self.publish_seq, record.publish_seq)
        self._changed()
        if has_copy:
            self._copies[record.path] = record
            span = self._span(record.version)
            first = self._results.get(span)
            # In span 0 the first version is the base model.
            wanted = span and span not in self._given_up
            if wanted and (first is None or key_of(first) == key):
                self._results[span] = record
        self._forget()

    def _span(self, version: Version) -> int:
        return version // self._keep_every if self._keep_every else 0

    def _forget(self) -> None:
        """Forget the oldest versions beyond PUBLISHED_VERSIONS_MAX, except those that have a copy or are held."""
        old = list(islice(self._live.items(), max(0, len(self._live) - PUBLISHED_VERSIONS_MAX)))
        for key, record in old:
            if record.path not in self._copies and key not in self.held:
                del self._live[key]
                self.ended += 1

    def _changed(self) -> None:
        self._settled = self._found_copies = None

    def _taken(self, paths: Collection[str]) -> int:
        """The bytes of these copies and of three more, each counted with the size of the newest version:
        the newest version, the next one, and the upload of the next one.
        """
        kept = {path: self._copies[path].full_bytes for path in paths if path in self._copies}
        newest = self.newest
        if newest is not None:
            kept |= {newest.path: 0, "": 3 * newest.full_bytes}
        return sum(kept.values())

    def check(self) -> None:
        sequence = [record.publish_seq for record in self._live.values()]
        assert sequence == sorted(set(sequence))
        assert not sequence or sequence[-1] <= self.publish_seq
        assert all(key == key_of(record) for key, record in self._live.items())
        assert len({key.version for key in self._live}) == len(self._live)
        assert len(self._live) <= PUBLISHED_VERSIONS_MAX + len(self._copies) + len(self.held)
        assert self._live.keys() >= {*self.held}
        assert all(record.path in self._copies for record in self._results.values())
        assert all(self._live.get(key_of(each)) is each for each in self._results.values())

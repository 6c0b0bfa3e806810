"""What the engines of workers hold beside the version that they serve: what they are told, and what they say.

    hold --HeldVersions--> workers --their next refit--> RefitDone: what they hold

The versions that workers are told to hold stay live (`versions`), however many newer ones are published. What a worker
says counts only for versions that it has served and that are still live. In a run in which engines hold one version
nothing of this is sent.
Not here: which versions to hold (`core/tinker/held_snapshots`), who writes with them (`work/ranking`).
"""

from collections.abc import Callable, Iterator, Sequence

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer, PeerEngine
from echo2d.core.cluster.versions import PublishedVersions, key_of
from echo2d.core.protocol.control_messages import HeldVersions, VersionKey


class Holding:
    """See the module docstring. most: engines hold at most this many versions, the served one included."""

    def __init__(
        self,
        members: Membership,
        versions: PublishedVersions,
        most: int,
        spreads: Callable[[VersionKey], bool],
    ) -> None:
        """spreads: whether a version is on its way to workers, or waits for that."""
        self._members, self._versions, self._most = members, versions, most
        self._spreads = spreads

    @property
    def several(self) -> bool:
        """Whether engines hold more than the version that they serve."""
        return self._most > 1

    def hold(self, versions: Sequence[Version]) -> list[Send]:
        """From their next refit on, all workers hold these versions, as far as they hold them now.

        versions: at most `most`, the most important one first; those that are not live are left out. The version that
        the next refit loads is held in any case: for it, one fewer of these may stay.
        """
        assert len(versions) <= self._most
        found = map(self._versions.numbered, versions)
        held = tuple(key for key in found if key is not None)
        if held == self._versions.held:
            return []
        self._versions.held = held
        return [send for peer in self._members for send in self.joined(peer)]

    # --- for the samplers of clients

    @property
    def room(self) -> int:
        """How many versions engines hold at most: the median of the workers that serve one."""
        serving = [peer.engine for peer in self._members.workers() if peer.engine.serving]
        rooms = sorted(max(1, min(self._most, each.held_max or self._most)) for each in serving)
        return rooms[len(rooms) // 2] if rooms else self._most

    def spread(self, version: Version) -> bool:
        """Whether every worker that serves a version holds this one; also if it is not live."""
        key = self._versions.numbered(version)
        serving = (peer.engine for peer in self._members.workers() if peer.service.active)
        return key is None or all(key in each.held for each in serving if each.serving is not None)

    def arrived(self, version: Version) -> bool:
        """Whether a worker holds it."""
        key = self._versions.numbered(version)
        return key is not None and self.anywhere(key)

    def coming(self, version: Version) -> bool:
        """Whether it is on its way to workers, or waits for that."""
        key = self._versions.numbered(version)
        return key is not None and self._spreads(key)

    def possible(self, version: Version) -> bool:
        """Whether a worker holds it or may hold it later; also if no worker is here."""
        key = self._versions.numbered(version)
        return key is not None and (self.may_come(key) or next(self._engines(), None) is None)

    # --- for calls whose leases name a version

    def anywhere(self, key: VersionKey) -> bool:
        """Whether a worker holds it."""
        return any(key in each.held for each in self._engines())

    def may_come(self, key: VersionKey) -> bool:
        """Whether a worker holds it, it is on its way to one, or a worker that comes would load it."""
        newest = self._versions.newest
        comes = self._spreads(key) or (newest is not None and key_of(newest) == key)
        return comes or any(key in (*each.held, each.stands) for each in self._engines())

    # --- what workers are told, and what they say

    def joined(self, peer: Peer) -> list[Send]:
        """Tell a worker what to hold; it has been welcomed."""
        if not self.several or peer.kind != "worker" or peer.session is None:
            return []
        return [Send(peer.session, HeldVersions(self._most, self._versions.held))]

    def beside(
        self, peer: Peer, serving: VersionKey | None, held: Sequence[VersionKey]
    ) -> list[VersionKey]:
        """Those versions beside `serving` that the worker says it holds, and that count."""
        served = peer.engine.acknowledged
        named = [key for key in held[: self._most] if key != serving and key in served]
        return [key for key in named[: self._most - 1] if self._versions.live(key)]

    def revoked(self) -> None:
        """Versions may have been revoked. Workers drop them at once, and drop all if they serve one of them."""
        for peer in self._members:
            serves = self._versions.live(peer.engine.serving) is not None
            live = frozenset(filter(self._versions.live, peer.engine.beside if serves else ()))
            if live != peer.engine.beside:
                peer.engine.beside = live
                self._members.changed.add(peer.peer)

    # --- inside

    def _engines(self) -> Iterator[PeerEngine]:
        """Those of workers, also if their connection broke a moment ago."""
        here = (peer for peer in self._members if peer.kind == "worker" and peer.state == "joined")
        return (peer.engine for peer in here)

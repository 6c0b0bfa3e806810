"""What the engines of workers hold beside the version that they serve: what they are told, and what they say.

    hold --HeldVersions--> workers --their next refit--> RefitDone: what they hold

The versions that workers are told to hold stay live (`versions`), however many newer ones are published. What a worker
says counts only for versions that it has served and that are still live. In a run in which engines hold one version
nothing of this is sent.
Not here: which versions to hold (`core/tinker/held_snapshots`), who writes with them (`work/ranking`).
"""

from collections.abc import Sequence

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.protocol.control_messages import HeldVersions, VersionKey


class Holding:
    """See the module docstring. most: engines hold at most this many versions, the served one included."""

    def __init__(self, members: Membership, versions: PublishedVersions, most: int) -> None:
        self._members, self._versions, self._most = members, versions, most

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

    def spread(self, version: Version) -> bool:
        """Whether every worker that serves a version holds this one; also if it is not live."""
        key = self._versions.numbered(version)
        serving = (peer.engine for peer in self._members.workers() if peer.service.active)
        return key is None or all(key in each.held for each in serving if each.serving is not None)

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

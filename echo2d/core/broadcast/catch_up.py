"""Catch-ups as they go: whoever needs one is given it and told so; those that nobody gets on with end.

    begins with its first taker --> ordered of the seed, aside --> goes on while newer versions spread
        ends when nobody takes it: they have verified it, are lost, or take something else, because
            - it is of an older version, and they failed to apply it or are quarantined
            - it is of an older version, and the disk has no room for the copies that it needs
            - the seed cannot make it

Not here: which form suits whom (`catch_up_policy`), and the version that spreads (`publishing`: the `main` of all
calls).
"""

from collections.abc import Collection, Iterator, Sequence

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.announcer import Announcer
from echo2d.core.broadcast.catch_up_policy import FULL_LAG_MAX, CatchUpPolicy, DeltaRoute, is_stuck
from echo2d.core.broadcast.events import BroadcastAction
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.events import Note, VersionPublished
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions, key_of
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.weights.delta_chain import DELTAS_KEPT_MAX, KeptDelta


class CatchUps:
    """See the module docstring."""

    def __init__(
        self,
        rules: RunRules,
        *,
        members: Membership,
        versions: PublishedVersions,
        statistics: Statistics,
        announcer: Announcer,
    ) -> None:
        self._rules, self._members, self._versions, self._statistics = (
            rules,
            members,
            versions,
            statistics,
        )
        self._announcer = announcer
        self._policy = CatchUpPolicy(versions, self._begin)
        self._begun: list[
            tuple[Transmission, DeltaRoute]
        ] = []  # that the seed is still to be told of

    def __iter__(self) -> Iterator[Transmission]:
        return iter(self._policy)

    def apart(self, peer: PeerId) -> bool:
        """Whether `main` is not for this peer."""
        return self._policy.apart(peer)

    def takes(self, peer: PeerId) -> Transmission | None:
        return self._policy.takes(peer)

    def takers(self, transmission: Transmission) -> list[Peer]:
        """Those who take this catch-up, or help with it."""
        return [
            peer
            for peer in self._members.receivers()
            if self._policy.concerns(transmission, peer.peer)
        ]

    # --- what happens

    def settle(
        self, peer: Peer, main: Transmission | None, *, renewed: bool = False
    ) -> list[BroadcastAction]:
        """The form that suits the peer, as far as it is known, and a place in its plan; what it leaves is told so."""
        before = self._policy.takes(peer.peer) or main
        assigned = self._policy.assign(peer, main)
        taken = assigned if self._policy.apart(peer.peer) else main
        actions = [] if before is None or before is taken else self._leave(before, peer)
        for transmission, way in self._begun:
            actions.append(
                Note("catch_up", f"version {transmission.record.version} goes to {peer.name} {way}")
            )
            actions += self._announcer.order(transmission, aside=True)
        self._begun.clear()
        return (
            actions
            if taken is None
            else [*actions, *self._announcer.place(taken, peer, renewed=renewed)]
        )

    def settle_all(self, main: Transmission | None) -> list[BroadcastAction]:
        """Another version or form spreads."""
        return [action for peer in self._members.receivers() for action in self.settle(peer, main)]

    def verified(self, peer: Peer, main: Transmission | None) -> list[BroadcastAction]:
        """The peer has verified something."""
        return [] if self._policy.is_settled(peer, main) else self.settle(peer, main)

    def deltas_kept(self, deltas: Sequence[KeptDelta]) -> None:
        """The seed can compose deltas of these."""
        self._policy.deltas = tuple(deltas[:DELTAS_KEPT_MAX]) if self._rules.delta else ()

    def form_encoded(self, transmission: Transmission) -> None:
        """It is whole at the seed."""
        if transmission.base is None and transmission.totals is not None:
            self._policy.full_took(transmission.totals.wire_bytes, transmission.totals.full_bytes)

    def lost(self, peer: PeerId) -> None:
        self._policy.lost(peer)

    def revoked(self, keys: Collection[VersionKey]) -> None:
        for transmission in [each for each in self if key_of(each.record) in keys]:
            self._policy.give_up(transmission)

    def has_first_root(self, transmission: Transmission) -> None:
        """Those who have its version help with it."""
        self._policy.help(transmission, self._members.receivers())

    def cannot_be_made(self, transmission: Transmission) -> None:
        """The seed cannot encode it: those who wait for it take something else."""
        self._policy.give_up(transmission)

    def cannot_be_delta(self, record: VersionPublished) -> None:
        """A delta form of this version could not be encoded: none of it is begun again."""
        self._policy.cannot_be_delta(record)

    def promote(self, record: VersionPublished) -> Transmission | None:
        """The full form of this version, if it is a catch-up: from now on it is for everybody."""
        return self._policy.promote(record)

    # --- those that end

    def free(self, main: Transmission | None, needed: Collection[str]) -> list[BroadcastAction]:
        """Of older versions: who does not get on is given the newest, and copies that do not fit are not waited for.

        needed: the snapshot copies that others need.
        """
        return [*self._free_stuck(main), *self._free_outdated(main), *self._free_disk(needed)]

    def paths(self) -> list[str]:
        """The snapshot copies that are still needed."""
        return self._policy.paths()

    def end_idle(self, main: Transmission | None) -> list[BroadcastAction]:
        """Those that nobody takes any more make room for whoever waits."""
        actions: list[BroadcastAction] = []
        idle = self._policy.idle()
        for transmission in idle:
            self._policy.end(transmission)
            had = [
                peer
                for peer in self._members
                if peer.kind == "seed" or transmission.has_place(peer.peer)
            ]
            actions += self._announcer.forget(transmission, had)
        if idle:
            waiting = [self._members.get(peer) for peer in self._policy.waiting()]
            settled = [
                self.settle(peer, main) for peer in waiting if peer is not None and peer.alive
            ]
            actions += [action for each in settled for action in each]
        return actions

    # --- inside

    def _begin(self, record: VersionPublished, way: DeltaRoute) -> Transmission:
        """Nobody waits for it, so it has no time."""
        transmission = Transmission.start(
            record, self._rules, self._announcer.secret, now=0.0, base=way.base, via=way.via
        )
        self._begun.append((transmission, way))
        return transmission

    def _leave(self, transmission: Transmission, peer: Peer) -> list[BroadcastAction]:
        """It misses what comes, and with it all below it; but for who has the whole form, and passes that on."""
        if not transmission.has_place(peer.peer) or peer.peer in transmission.verified:
            return []
        return [
            *self._announcer.edges(transmission.remove(peer.peer)),
            *self._announcer.forget(transmission, [peer]),
        ]

    def _free_stuck(self, main: Transmission | None) -> list[BroadcastAction]:
        actions: list[BroadcastAction] = []
        for transmission in [
            each for each in self if main is not None and each.record != main.record
        ]:
            for peer in [self._members.get(taker) for taker in self._policy.takers(transmission)]:
                if peer is not None and is_stuck(peer, transmission):
                    actions += self.settle(peer, main)
        return actions

    def _free_outdated(self, main: Transmission | None) -> list[BroadcastAction]:
        transmission = None if main is None else self._policy.outdated(main)
        if transmission is None:
            return []
        self._policy.give_up(transmission)
        reason = f"it is {FULL_LAG_MAX} publishes old, and others wait"
        text = f"version {transmission.record.version} is not sent on: {reason}"
        return [self._statistics.fault("catch_up", text)]

    def _free_disk(self, needed: Collection[str]) -> list[BroadcastAction]:
        """The oldest go first; one of which all copies are needed anyway would free nothing."""
        notes: list[BroadcastAction] = []
        for transmission in sorted(self, key=lambda each: each.record.publish_seq):
            if self._versions.fit([*needed, *self.paths()], self._rules.disk_bytes_max):
                break
            if not transmission.copies() <= {*needed}:
                self._policy.give_up(transmission)
                reason = "run.disk_bytes_max has no room for its copies"
                text = f"version {transmission.record.version} is not sent on: {reason}"
                notes.append(self._statistics.fault("disk", text))
        return notes

    def check(self) -> None:
        self._policy.check()
        assert not self._begun

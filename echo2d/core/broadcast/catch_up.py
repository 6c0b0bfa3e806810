"""Runs the catch-ups: forms for peers that cannot use the spreading one.

    begins with its first taker --> the seed encodes it after the spreading form --> continues while
        newer versions spread --> ends when no peer takes it

A peer stops taking a catch-up when it has verified the version or is lost. It takes another form
when
  - the catch-up is of an older version, and the peer failed to apply it or is quarantined;
  - the catch-up is of an older version, and the disk has no room for its snapshot copies;
  - the seed cannot encode it.

`main` is the transmission that spreads (`publishing`).
Not here: which form suits a peer (`catch_up_policy`).
"""

from collections.abc import Collection, Iterator, Sequence

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.announcer import Announcer
from echo2d.core.broadcast.catch_up_policy import FULL_LAG_MAX, CatchUpPolicy, DeltaRoute, is_stuck
from echo2d.core.broadcast.events import BroadcastAction
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.events import Note, VersionPublished
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions, key_of
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.rules.run import RunRules
from echo2d.core.weights.kept_deltas import DELTAS_KEPT_MAX, KeptDelta


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
        # New catch-ups that the seed has not been ordered to encode yet.
        self._begun: list[tuple[Transmission, DeltaRoute]] = []

    def __iter__(self) -> Iterator[Transmission]:
        return iter(self._policy)

    def __len__(self) -> int:
        return len(self._policy)

    def apart(self, peer: PeerId) -> bool:
        """Whether the peer takes a catch-up instead of `main`, or waits for one."""
        return self._policy.apart(peer)

    def takes(self, peer: PeerId) -> Transmission | None:
        """The catch-up that this peer takes."""
        return self._policy.takes(peer)

    def takers(self, transmission: Transmission) -> list[Peer]:
        """The alive peers that take this catch-up, or help with it."""
        return [
            peer
            for peer in self._members.receivers()
            if self._policy.concerns(transmission, peer.peer)
        ]

    # --- what happens

    def settle(
        self, peer: Peer, main: Transmission | None, *, renewed: bool = False
    ) -> list[BroadcastAction]:
        """Give the peer the form that suits it, its newest root, and a place in its plan.

        If it took another form before, it leaves the plan of that form.
        """
        before = self._policy.takes(peer.peer) or main
        assigned = self._policy.assign(peer, main)
        taken = assigned if self._policy.apart(peer.peer) else main
        actions = [] if before is None or before is taken else self._leave(before, peer)
        for transmission, route in self._begun:
            version = transmission.record.version
            actions.append(Note("catch_up", f"version {version} goes to {peer.name} {route}"))
            actions += self._announcer.order(transmission, aside=True)
        self._begun.clear()
        return (
            actions
            if taken is None
            else [*actions, *self._announcer.place(taken, peer, renewed=renewed)]
        )

    def settle_all(self, main: Transmission | None) -> list[BroadcastAction]:
        """Another version or form spreads: settle every peer again."""
        return [action for peer in self._members.receivers() for action in self.settle(peer, main)]

    def verified(self, peer: Peer, main: Transmission | None) -> list[BroadcastAction]:
        """The peer has verified a version, and perhaps can use another form now."""
        return [] if self._policy.is_settled(peer, main) else self.settle(peer, main)

    def deltas_kept(self, deltas: Sequence[KeptDelta]) -> None:
        """The seed has kept these deltas, and can compose other deltas from them."""
        self._policy.deltas = (
            tuple(deltas[:DELTAS_KEPT_MAX]) if self._rules.dissemination.delta else ()
        )

    def form_encoded(self, transmission: Transmission) -> None:
        """A form is whole at the seed: learn how large a full form is."""
        if transmission.base is None and transmission.totals is not None:
            self._policy.full_took(transmission.totals.wire_bytes, transmission.totals.full_bytes)

    def lost(self, peer: PeerId) -> None:
        self._policy.lost(peer)

    def revoked(self, keys: Collection[VersionKey]) -> None:
        for transmission in [each for each in self if key_of(each.record) in keys]:
            self._policy.give_up(transmission)

    def has_first_root(self, transmission: Transmission) -> None:
        """A catch-up has got its first root: peers that have its version help to send it."""
        self._policy.help(transmission, self._members.receivers())

    def cannot_be_made(self, transmission: Transmission) -> None:
        """The seed cannot encode this catch-up: its takers wait for another one."""
        self._policy.give_up(transmission)

    def cannot_be_delta(self, record: VersionPublished) -> None:
        """A delta of this version could not be encoded: begin no other delta of it."""
        self._policy.cannot_be_delta(record)

    def promote(self, record: VersionPublished) -> Transmission | None:
        """If the full form of this version is a catch-up, return it: it becomes the spreading form."""
        return self._policy.promote(record)

    # --- ends

    def free(self, main: Transmission | None, needed: Collection[str]) -> list[BroadcastAction]:
        """Give up catch-ups of older versions that are stuck, too old, or too large for the disk.

        needed: the paths of the snapshot copies that are needed for other purposes.
        """
        return [*self._free_stuck(main), *self._free_outdated(main), *self._free_disk(needed)]

    def paths(self) -> list[str]:
        """The paths of the snapshot copies that catch-ups still need."""
        return self._policy.paths()

    def end_idle(self, main: Transmission | None) -> list[BroadcastAction]:
        """End the catch-ups without takers, and start others for the peers that wait."""
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

    def _begin(self, record: VersionPublished, route: DeltaRoute) -> Transmission:
        """Begin a catch-up. Nothing waits for it, so it does not matter when it began."""
        transmission = Transmission.start(
            record, self._rules, self._announcer.secret, now=0.0, base=route.base, via=route.via
        )
        self._begun.append((transmission, route))
        return transmission

    def _leave(self, transmission: Transmission, peer: Peer) -> list[BroadcastAction]:
        """The peer no longer takes this form: the plan closes the gap, and the peer forgets the form.

        A peer that has verified the version stays, because it has the whole form and passes it on.
        """
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
        reason = f"it is {FULL_LAG_MAX} publishes old, and other peers wait"
        text = f"version {transmission.record.version} is not sent on: {reason}"
        return [self._statistics.fault("catch_up", text)]

    def _free_disk(self, needed: Collection[str]) -> list[BroadcastAction]:
        """Give up the oldest catch-ups until the copies fit on the disk.

        A catch-up stays if all its copies are needed anyway: giving it up would free nothing.
        """
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

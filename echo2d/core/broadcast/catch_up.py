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
from echo2d.core.broadcast.catch_up_policy import FULL_LAG_MAX, CatchUps, Way, is_stuck
from echo2d.core.broadcast.events import BroadcastAction
from echo2d.core.broadcast.transmission import Spread
from echo2d.core.cluster.events import Note, VersionPublished
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Figures
from echo2d.core.cluster.versions import Versions, key_of
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.weights.delta_chain import DELTAS_KEPT_MAX, KeptDelta


class CatchingUp:
    """See the module docstring."""

    def __init__(
        self,
        rules: RunRules,
        *,
        members: Membership,
        versions: Versions,
        figures: Figures,
        announcer: Announcer,
    ) -> None:
        self._rules, self._members, self._versions, self._figures = rules, members, versions, figures
        self._announcer = announcer
        self._catch_ups = CatchUps(versions, self._begin)
        self._begun: list[tuple[Spread, Way]] = []  # that the seed is still to be told of

    def __iter__(self) -> Iterator[Spread]:
        return iter(self._catch_ups)

    def apart(self, peer: PeerId) -> bool:
        """Whether `main` is not for this peer."""
        return self._catch_ups.apart(peer)

    def takes(self, peer: PeerId) -> Spread | None:
        return self._catch_ups.takes(peer)

    def takers(self, spread: Spread) -> list[Peer]:
        """Those who take this catch-up, or help with it."""
        return [peer for peer in self._members.receivers() if self._catch_ups.concerns(spread, peer.peer)]

    # --- what happens

    def settle(self, peer: Peer, main: Spread | None, *, renewed: bool = False) -> list[BroadcastAction]:
        """The form that suits the peer, as far as it is known, and a place in its plan; what it leaves is told so."""
        before = self._catch_ups.takes(peer.peer) or main
        assigned = self._catch_ups.assign(peer, main)
        taken = assigned if self._catch_ups.apart(peer.peer) else main
        actions = [] if before is None or before is taken else self._leave(before, peer)
        for spread, way in self._begun:
            actions.append(Note("catch_up", f"version {spread.record.version} goes to {peer.name} {way}"))
            actions += self._announcer.order(spread, aside=True)
        self._begun.clear()
        return actions if taken is None else [*actions, *self._announcer.place(taken, peer, renewed=renewed)]

    def settle_all(self, main: Spread | None) -> list[BroadcastAction]:
        """Another version or form spreads."""
        return [action for peer in self._members.receivers() for action in self.settle(peer, main)]

    def verified(self, peer: Peer, main: Spread | None) -> list[BroadcastAction]:
        """The peer has verified something."""
        return [] if self._catch_ups.is_settled(peer, main) else self.settle(peer, main)

    def deltas_kept(self, deltas: Sequence[KeptDelta]) -> None:
        """The seed can compose deltas of these."""
        self._catch_ups.deltas = tuple(deltas[:DELTAS_KEPT_MAX]) if self._rules.delta else ()

    def form_encoded(self, spread: Spread) -> None:
        """It is whole at the seed."""
        if spread.base is None and spread.totals is not None:
            self._catch_ups.full_took(spread.totals.wire_bytes, spread.totals.full_bytes)

    def lost(self, peer: PeerId) -> None:
        self._catch_ups.lost(peer)

    def revoked(self, keys: Collection[VersionKey]) -> None:
        for spread in [each for each in self if key_of(each.record) in keys]:
            self._catch_ups.give_up(spread)

    def has_first_root(self, spread: Spread) -> None:
        """Those who have its version help with it."""
        self._catch_ups.help(spread, self._members.receivers())

    def cannot_be_made(self, spread: Spread) -> None:
        """The seed cannot encode it: those who wait for it take something else."""
        self._catch_ups.give_up(spread)

    def cannot_be_delta(self, record: VersionPublished) -> None:
        """A delta form of this version could not be encoded: none of it is begun again."""
        self._catch_ups.cannot_be_delta(record)

    def promote(self, record: VersionPublished) -> Spread | None:
        """The full form of this version, if it is a catch-up: from now on it is for everybody."""
        return self._catch_ups.promote(record)

    # --- those that end

    def free(self, main: Spread | None, needed: Collection[str]) -> list[BroadcastAction]:
        """Of older versions: who does not get on is given the newest, and copies that do not fit are not waited for.

        needed: the snapshot copies that others need.
        """
        return [*self._free_stuck(main), *self._free_outdated(main), *self._free_disk(needed)]

    def paths(self) -> list[str]:
        """The snapshot copies that are still needed."""
        return self._catch_ups.paths()

    def end_idle(self, main: Spread | None) -> list[BroadcastAction]:
        """Those that nobody takes any more make room for whoever waits."""
        actions: list[BroadcastAction] = []
        idle = self._catch_ups.idle()
        for spread in idle:
            self._catch_ups.end(spread)
            had = [peer for peer in self._members if peer.kind == "seed" or spread.has_place(peer.peer)]
            actions += self._announcer.forget(spread, had)
        if idle:
            waiting = [self._members.get(peer) for peer in self._catch_ups.waiting()]
            settled = [self.settle(peer, main) for peer in waiting if peer is not None and peer.alive]
            actions += [action for each in settled for action in each]
        return actions

    # --- inside

    def _begin(self, record: VersionPublished, way: Way) -> Spread:
        """Nobody waits for it, so it has no time."""
        spread = Spread.start(record, self._rules, self._announcer.secret, now=0.0, base=way.base, via=way.via)
        self._begun.append((spread, way))
        return spread

    def _leave(self, spread: Spread, peer: Peer) -> list[BroadcastAction]:
        """It misses what comes, and with it all below it; but for who has the whole form, and passes that on."""
        if not spread.has_place(peer.peer) or peer.peer in spread.verified:
            return []
        return [*self._announcer.edges(spread.remove(peer.peer)), *self._announcer.forget(spread, [peer])]

    def _free_stuck(self, main: Spread | None) -> list[BroadcastAction]:
        actions: list[BroadcastAction] = []
        for spread in [each for each in self if main is not None and each.record != main.record]:
            for peer in [self._members.get(taker) for taker in self._catch_ups.takers(spread)]:
                if peer is not None and is_stuck(peer, spread):
                    actions += self.settle(peer, main)
        return actions

    def _free_outdated(self, main: Spread | None) -> list[BroadcastAction]:
        spread = None if main is None else self._catch_ups.outdated(main)
        if spread is None:
            return []
        self._catch_ups.give_up(spread)
        text = f"version {spread.record.version} is not sent on: it is {FULL_LAG_MAX} publishes old, and others wait"
        return [self._figures.fault("catch_up", text)]

    def _free_disk(self, needed: Collection[str]) -> list[BroadcastAction]:
        """The oldest go first; one of which all copies are needed anyway would free nothing."""
        notes: list[BroadcastAction] = []
        for spread in sorted(self, key=lambda each: each.record.publish_seq):
            if self._versions.fit([*needed, *self.paths()], self._rules.disk_bytes_max):
                break
            if not spread.copies() <= {*needed}:
                self._catch_ups.give_up(spread)
                text = f"version {spread.record.version} is not sent on: run.disk_bytes_max has no room for its copies"
                notes.append(self._figures.fault("disk", text))
        return notes

    def check(self) -> None:
        self._catch_ups.check()
        assert not self._begun

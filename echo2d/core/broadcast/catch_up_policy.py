"""Decides which form of a version each peer takes while the spreading one is a delta.

    the peer only passes on, has the delta's base, or has the version --> the spreading form
    it has a version whose copy is kept --------------> a delta from that version        }
    it has a version from which kept deltas lead on --> these deltas, composed into one  } catch-ups
    it has anything else, or nothing -----------------> the full form                    }

A catch-up is a form like any other: it is signed segment by segment, verified frame by frame, and
passed on by the peers that take it. It continues while newer versions spread, so that a slow
newcomer gets a whole version in the end, and takes deltas from then on. There are at most FULLS_MAX
full catch-ups and DELTAS_MAX deltas at a time; a peer that can use none of them waits until one ends.
Peers that have the version help with its full form: they encode it again from their own snapshot,
which relieves the seed.

Also here: the base of the next delta (`choose_base`), and the form that takes the fewest bytes
(`choose_route`).
Not here: what is sent to peers (`catch_up`), and what a form is (`transmission`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from echo2d.core.base.ids import Digest, FormId, PeerId, PublishSeq
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.membership import PEERS_MAX
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import PublishedVersions, key_of
from echo2d.core.weights.kept_deltas import KeptDelta, chain_bytes, shortest_chain

# Each full form costs the seed one encoding and at most one copy on its uplink. All newcomers that
# take the same version share the form.
FULLS_MAX = 2
# A full form that is this many publishes old is given up when other peers wait (I6).
FULL_LAG_MAX = 8
# Each delta costs an encoding, and hardly any bytes.
DELTAS_MAX = 2
# Each helper spends half a core on encoding for as long as the transfer takes.
HELPERS_MAX = 2


@dataclass(frozen=True, slots=True)
class DeltaRoute:
    """How a version is sent: as a delta from `base`, or in full."""

    # The most bytes that it takes on the wire, as far as that is known.
    bytes_max: int
    base: VersionPublished | None = None
    # If the delta is composed of kept deltas, the digests of the snapshots between them.
    via: tuple[Digest, ...] | None = None

    def __str__(self) -> str:
        how = "in full" if self.base is None else f"as a delta from version {self.base.version}"
        made = "" if self.via is None else f", composed of {len(self.via) + 1}"
        return f"{how}{made}, at most {self.bytes_max / 1e6:.1f} MB"


MakeTransmission = Callable[[VersionPublished, DeltaRoute], Transmission]


def choose_route(
    record: VersionPublished,
    stands: VersionPublished | None,
    *,
    copies: Sequence[VersionPublished],
    deltas: Sequence[KeptDelta],
    full_bytes: int,
) -> DeltaRoute:
    """The route with the fewest bytes for a peer that has the version `stands`.

    full_bytes: the size of the full form. A delta from a kept copy is never larger than a composed
    delta, which also contains changes that were undone meanwhile. Such a delta is also never larger
    than the full form, because no chunk takes more bytes in a delta than in the full form.
    """
    full = DeltaRoute(full_bytes)
    if stands is None or stands.digest == record.digest:
        return full
    chain = shortest_chain(deltas, stands.digest, record.digest)
    composed = (
        full
        if chain is None
        else DeltaRoute(chain_bytes(chain), stands, tuple(each.made for each in chain[:-1]))
    )
    if stands in copies:
        return DeltaRoute(min(composed.bytes_max, full_bytes), stands)
    return min(full, composed, key=lambda route: route.bytes_max)


def choose_base(
    copies: Iterable[VersionPublished], workers: Sequence[Peer]
) -> VersionPublished | None:
    """The newest kept version that at least half of the workers have verified; None: send in full.

    If there are no workers, it is the newest copy, because most workers that return have it.
    """
    for record in copies:
        if 2 * sum(peer.engine.stands == key_of(record) for peer in workers) >= len(workers):
            return record
    return None


class CatchUpPolicy:
    """See the module docstring. make: begins a catch-up."""

    def __init__(self, versions: PublishedVersions, make: MakeTransmission) -> None:
        self._versions, self._make = versions, make
        self._transmissions: dict[FormId, Transmission] = {}
        self._takes: dict[PeerId, FormId] = {}
        self._helps: dict[PeerId, FormId] = {}
        self._waiting: dict[PeerId, None] = {}
        # The size of the last full form, as a share of its snapshot.
        self._full_share = 1.0
        # The deltas that the seed has kept and from which it can compose others.
        self.deltas: tuple[KeptDelta, ...] = ()
        # The newest publish for which no delta could be made.
        self._in_full_only = PublishSeq(-1)

    def __iter__(self) -> Iterator[Transmission]:
        return iter(self._transmissions.values())

    def __len__(self) -> int:
        return len(self._transmissions)

    def apart(self, peer: PeerId) -> bool:
        """Whether the peer takes a catch-up, or waits for one."""
        return peer in self._takes or peer in self._waiting

    def is_settled(self, peer: Peer, main: Transmission | None) -> bool:
        """Whether the peer takes the spreading form, and can use it."""
        return not self.apart(peer.peer) and (main is None or _suits(main, peer))

    def takes(self, peer: PeerId) -> Transmission | None:
        return self._transmissions[self._takes[peer]] if peer in self._takes else None

    def concerns(self, transmission: Transmission, peer: PeerId) -> bool:
        """Whether the peer takes this catch-up, or helps with it."""
        return transmission.form in (self._takes.get(peer), self._helps.get(peer))

    def waiting(self) -> list[PeerId]:
        return list(self._waiting)

    def assign(self, peer: Peer, main: Transmission | None) -> Transmission | None:
        """The catch-up that the peer takes from now on; None: it takes `main`, or waits.

        A catch-up may begin with this peer.
        """
        present = self.takes(peer.peer)
        if main is None or _suits(main, peer):
            self.release(peer.peer)
            return None
        if present is None or not _suits(present, peer) or _is_over(present, peer, main):
            present = self._choose(peer, main)
        self.release(peer.peer)
        if present is None:
            self._waiting[peer.peer] = None
            return None
        self._transmissions[present.form] = present
        self._takes[peer.peer] = present.form
        return present

    def help(self, transmission: Transmission, peers: Iterable[Peer]) -> None:
        """Choose up to HELPERS_MAX peers that have a full form's version to help with it."""
        if transmission.base is None:
            having = [
                peer
                for peer in peers
                if peer.kind == "worker" and peer.engine.stands == key_of(transmission.record)
            ]
            able = [
                peer
                for peer in having
                if not (peer.reach.receive_only or peer.reach.quarantined or self.apart(peer.peer))
            ]
            helpers = sorted(able, key=lambda peer: -(peer.reach.uplink or 0.0))[:HELPERS_MAX]
            self._helps.update((peer.peer, transmission.form) for peer in helpers)

    def release(self, peer: PeerId) -> None:
        """The peer takes no catch-up, and does not wait for one."""
        self._takes.pop(peer, None)
        self._waiting.pop(peer, None)

    def lost(self, peer: PeerId) -> None:
        self.release(peer)
        self._helps.pop(peer, None)

    def end(self, transmission: Transmission) -> None:
        """End this catch-up: no peer takes it or helps with it any more."""
        del self._transmissions[transmission.form]
        self._takes = {
            peer: form for peer, form in self._takes.items() if form != transmission.form
        }
        self._helps = {
            peer: form for peer, form in self._helps.items() if form != transmission.form
        }

    def promote(self, record: VersionPublished) -> Transmission | None:
        """If the full form of this version is a catch-up, return it: it becomes the spreading form."""
        full = next(
            (
                transmission
                for transmission in self
                if transmission.record == record and transmission.base is None
            ),
            None,
        )
        if full is not None:
            self.end(full)
        return full

    def give_up(self, transmission: Transmission) -> None:
        """The peers that take this catch-up wait for another one."""
        for peer in self.takers(transmission):
            self.release(peer)
            self._waiting[peer] = None

    def cannot_be_delta(self, record: VersionPublished) -> None:
        """A delta of this version could not be encoded: begin no delta of this or an older version."""
        self._in_full_only = max(self._in_full_only, record.publish_seq)

    def full_took(self, wire_bytes: int, full_bytes: int) -> None:
        """A full form was encoded: remember its share of the snapshot."""
        self._full_share = wire_bytes / max(1, full_bytes)

    def outdated(self, main: Transmission) -> Transmission | None:
        """The full form to give up, so that peers that wait get another one.

        Without this, FULLS_MAX workers that never finish would keep all newcomers waiting.
        """
        fulls = sorted(
            (transmission for transmission in self if transmission.base is None),
            key=lambda each: each.record.publish_seq,
        )
        if not self._waiting or len(fulls) < FULLS_MAX:
            return None
        return (
            fulls[0]
            if main.record.publish_seq > fulls[0].record.publish_seq + FULL_LAG_MAX
            else None
        )

    def idle(self) -> list[Transmission]:
        """The catch-ups without takers."""
        taken = set(self._takes.values())
        return [transmission for transmission in self if transmission.form not in taken]

    def paths(self) -> list[str]:
        """The paths of the snapshot copies that catch-ups with takers need."""
        idle = [transmission.form for transmission in self.idle()]
        return [
            path
            for transmission in self
            if transmission.form not in idle
            for path in transmission.copies()
        ]

    def takers(self, transmission: Transmission) -> list[PeerId]:
        return [peer for peer, form in self._takes.items() if form == transmission.form]

    def _choose(self, peer: Peer, main: Transmission) -> Transmission | None:
        """The catch-up for this peer; None: it waits.

        A running delta that suits the peer comes first, because joining it costs nothing more. If there
        is none, the route with the fewest bytes is taken.
        """
        deltas = [transmission for transmission in self if transmission.base is not None]
        fulls = [transmission for transmission in self if transmission.base is None]
        under_way = [
            transmission
            for transmission in deltas
            if transmission.record == main.record and _suits(transmission, peer)
        ]
        if under_way:
            return under_way[0]
        may = main.record.publish_seq > self._in_full_only and len(deltas) < DELTAS_MAX
        route = choose_route(
            main.record,
            self._versions.live(peer.engine.stands) if may else None,
            copies=self._versions.copies(),
            deltas=self.deltas,
            full_bytes=int(main.record.full_bytes * self._full_share),
        )
        if route.base is not None:
            return self._make(main.record, route)
        present = next(
            (transmission for transmission in fulls if transmission.record == main.record), None
        )
        if present is None and len(fulls) < FULLS_MAX:
            return self._make(main.record, route)
        # A full form of an older version does not help: a peer that knows this version refuses it.
        return present

    def check(self) -> None:
        assert sum(transmission.base is None for transmission in self) <= FULLS_MAX
        assert sum(transmission.base is not None for transmission in self) <= DELTAS_MAX
        assert {*self._takes.values(), *self._helps.values()} <= self._transmissions.keys()
        assert not self._takes.keys() & self._waiting.keys()
        assert len(self._takes) + len(self._waiting) <= PEERS_MAX
        for form, transmission in self._transmissions.items():
            transmission.check()
            assert transmission.form == form


def _suits(transmission: Transmission, peer: Peer) -> bool:
    """Whether the peer can apply this form, has its version already, or only passes it on."""
    has = (
        key_of(transmission.record),
        None if transmission.base is None else key_of(transmission.base),
    )
    return transmission.base is None or peer.kind != "worker" or peer.engine.stands in has


def is_stuck(peer: Peer, transmission: Transmission) -> bool:
    """Whether the peer makes no progress with this catch-up."""
    return peer.reach.quarantined or peer.peer in transmission.failed


def _is_over(transmission: Transmission, peer: Peer, main: Transmission) -> bool:
    has = peer.engine.stands == key_of(transmission.record)
    return has or (transmission.record != main.record and is_stuck(peer, transmission))

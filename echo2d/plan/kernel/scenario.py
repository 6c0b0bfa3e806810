"""What is to be played: peers and their links, the form, the plan's shape, and what goes wrong. Plain data.

The same scenario can drive the simulation (`world`) and a laboratory of real sockets. Rates in bytes/s, times in
seconds from the moment the publish is accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from echo2d.core.topology.plan import STRIPES_MAX
from echo2d.registry import SHAPES

SEGMENT_BYTES = 64 << 20  # payload of one segment
TABLE_ROW_BYTES = 32  # of a segment's table, per frame
MBIT = 125_000.0  # bytes/s in one Mbit/s


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One peer's access link. latency_s: one way, from the peer to the middle of the network; between two peers, the
    sum of theirs. loss: share of the packets lost on the way in. joins_at_s: a newcomer, if above 0. corrupts_every: of
    so many frames that it sends the last is bad, if above 0.
    """

    uplink: float = 100 * MBIT
    downlink: float = 100 * MBIT
    latency_s: float = 0.0125
    loss: float = 0.0
    reachable: bool = True
    joins_at_s: float = 0.0
    corrupts_every: int = 0


@dataclass(frozen=True, slots=True)
class PeerCrash:
    """Peer number `peer` (0 is the seed) dies, and comes back with its disk as it was, or never.

    silent: nobody's connection breaks; the others notice only that nothing comes.
    """

    peer: int
    at_s: float
    back_s: float | None = None
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """peers[0] is the seed. encode_rate: None if the form is ready at the start. limit_s: longer counts as stuck.

    churn: so many of the peers fall silent for ever in a minute, one by one, each at a drawn moment at which another
    with a link like its comes; until all who were there from the start, and are still there, have everything.
    detect_s: until the others' connections to a dead peer break. silence_s: until the coordinator gives up on a peer
    that only falls silent. within_s: the seed is to send as few copies as take no longer by the plan; None: its bytes
    cost nothing.
    """

    peers: tuple[PeerSpec, ...]
    wire_bytes: int
    frame_bytes: int = 256 << 10
    shape: str = "auto"
    chains: int = 1
    within_s: float | None = None
    faults: tuple[PeerCrash, ...] = ()
    churn: float = 0.0
    encode_rate: float | None = None
    detect_s: float = 0.2
    silence_s: float = 6.0
    limit_s: float = 3600.0
    rng_seed: int = 0

    def __post_init__(self) -> None:
        assert len(self.peers) >= 2
        assert self.wire_bytes > 0
        assert 0 < self.frame_bytes <= SEGMENT_BYTES
        assert self.shape in SHAPES
        assert 1 <= self.chains <= STRIPES_MAX
        assert all(
            peer.uplink > 0 and peer.downlink > 0 and 0 <= peer.loss < 1 for peer in self.peers
        )
        assert 0 <= self.churn <= 1
        assert self.peers[0].reachable
        assert self.peers[0].joins_at_s == 0
        assert all(fault.peer < len(self.peers) for fault in self.faults)
        assert all(fault.back_s is not None for fault in self.faults if fault.peer == 0)

    @staticmethod
    def equal(count: int, spec: PeerSpec, **others: object) -> "Scenario":
        """A seed and `count` peers, all alike."""
        return Scenario((spec,) * (count + 1), **others)  # type: ignore[arg-type]

    def segments(self) -> Iterator[tuple[int, ...]]:
        """The payload frames' sizes, segment by segment."""
        for start in range(0, self.wire_bytes, SEGMENT_BYTES):
            length = min(SEGMENT_BYTES, self.wire_bytes - start)
            whole, rest = divmod(length, self.frame_bytes)
            yield (self.frame_bytes,) * whole + ((rest,) if rest else ())

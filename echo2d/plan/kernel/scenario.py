"""A scenario, as plain data: peers and their links, the form, the plan's shape, and faults.

The same scenario can drive the simulation (`world`) and a laboratory of real sockets. Rates are in bytes/s, times in
seconds after the publish was accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from echo2d.core.topology.plan import STRIPES_MAX
from echo2d.registry import SHAPES

SEGMENT_BYTES = 64 << 20  # payload of one segment
TABLE_ROW_BYTES = 32  # bytes per frame in a segment's table
MBIT = 125_000.0  # bytes/s in one Mbit/s


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One peer's access link."""

    uplink: float = 100 * MBIT
    downlink: float = 100 * MBIT
    latency_s: float = 0.0125  # one way, from the peer to the middle of the network
    loss: float = 0.0  # share of the packets to this peer that are lost
    reachable: bool = True
    joins_at_s: float = 0.0  # above 0: the peer joins later
    corrupts_every: int = 0  # above 0: of this many frames that the peer sends, one is bad


@dataclass(frozen=True, slots=True)
class PeerCrash:
    """Peer number `peer` (0 is the seed) dies. It comes back with its disk as it was, or never.

    silent: no connection breaks; the other peers notice only that nothing arrives.
    """

    peer: int
    at_s: float
    back_s: float | None = None
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One broadcast. peers[0] is the seed.

    churn: the share of the peers that fall silent for ever within a minute, each at a drawn moment. At the same moment
    a new peer with the same link joins. Churn ends when every peer that has been present since the start holds
    everything.
    """

    peers: tuple[PeerSpec, ...]
    wire_bytes: int
    frame_bytes: int = 256 << 10
    shape: str = "auto"
    chains: int = 1
    # The seed sends the fewest copies with which the plan takes at most this long. None: its bytes cost nothing.
    within_s: float | None = None
    faults: tuple[PeerCrash, ...] = ()
    churn: float = 0.0
    encode_rate: float | None = None  # None: the form is ready at the start
    detect_s: float = 0.2  # seconds until other peers' connections to a dead peer break
    silence_s: float = 6.0  # seconds until the coordinator gives up on a silent peer
    limit_s: float = 3600.0  # a longer broadcast counts as stuck
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
        """A scenario with a seed and `count` peers that all have the same link."""
        return Scenario((spec,) * (count + 1), **others)  # type: ignore[arg-type]

    def segments(self) -> Iterator[tuple[int, ...]]:
        """The sizes of the payload frames, segment by segment."""
        for start in range(0, self.wire_bytes, SEGMENT_BYTES):
            length = min(SEGMENT_BYTES, self.wire_bytes - start)
            whole, rest = divmod(length, self.frame_bytes)
            yield (self.frame_bytes,) * whole + ((rest,) if rest else ())

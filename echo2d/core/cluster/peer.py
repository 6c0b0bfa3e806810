"""What the coordinator knows about one peer: its identity, its engines, how it is reached, whether it may work.

part       what                                 written by
(itself)   its identity and its session         `membership`, from hellos and silences
engine     the versions that it serves, holds   its refits and heartbeats
reach      addresses and uplinks                `reachability`, `topology/uplink_rates`, `quarantine`
service    whether leases go to it              activation, the operator, the audit, and the ends of its leases
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import FormId, PeerId, SessionId
from echo2d.core.protocol.builds import OURS, Build
from echo2d.core.protocol.control_messages import Address, PeerKind, RefitDone, VersionKey

# Versions of which a worker may still be sending tokens; with adapters, S + 1 of them.
ACKNOWLEDGED_MAX = 80
# This many changes of session of one peer id within FLIP_WINDOW_S show that two daemons use one key.
FLIPS_MAX = 3
FLIP_WINDOW_S = 60.0
# A worker that failed a lease gets no other one for WORKER_REST_S, doubling with each failure in a row.
WORKER_REST_S = 1.0
# An accepted result makes up for this much of a failure.
FORGIVES = 1 / 32
REST_S_MAX = 30.0
FAILURES_MAX = 6.0  # after this many, a rest lasts REST_S_MAX

PeerState = Literal["joined", "suspected", "gone"]


@dataclass(slots=True)
class PeerEngine:
    """What the engines of a worker serve, and what they have done."""

    # The version that the engines serve; None: no version.
    serving: VersionKey | None = None
    # The versions that they hold beside it: leases may name them.
    beside: frozenset[VersionKey] = frozenset()
    # How many they hold at most, if these are fewer than the run wants.
    held_max: int | None = None
    # The versions that the engines have served or held since the daemon started, the latest one last (a set).
    acknowledged: dict[VersionKey, None] = field(default_factory=dict)
    # The verified version in the current slot, which deltas can build on.
    stands: VersionKey | None = None
    # Forms of which the worker holds frames.
    forms: frozenset[FormId] = frozenset()
    # Samples in the engines, as the worker's last heartbeat said.
    running: int = 0
    # Accepted results.
    accepted: int = 0
    # The next four fields are about the last refit, as `RefitDone` reports it.
    refit_pause_s: float | None = None
    recomputed_tokens: int | None = None
    recompute_s: float | None = None
    memory_ok: bool | None = None
    # Seconds that a version costs it on average, of which most are forgiven; None: not known.
    lost_s: float | None = None
    # The newest version that the engines have loaded, as its publish_seq.
    newest_seq: int = 0
    # When the engines were refitted last, in monotonic seconds.
    refitted_at: float | None = None
    # The bytes that new versions may take on the worker's disk, as its last heartbeat said.
    disk_free: int | None = None

    @property
    def held(self) -> frozenset[VersionKey]:
        """The versions that leases may name, the served one included."""
        return frozenset() if self.serving is None else self.beside | {self.serving}

    def serves(
        self,
        key: VersionKey | None,
        held: Sequence[VersionKey] = (),
        served: Sequence[VersionKey] = (),
    ) -> None:
        """The engines serve this version now, and hold these; None: they serve and hold nothing. served: before."""
        self.serving = key
        self.beside = frozenset() if key is None else frozenset(held) - {key}
        for each in (*served, *held, key):
            if each is not None:
                self.acknowledged.pop(each, None)
                self.acknowledged[each] = None
        keep_newest(self.acknowledged, ACKNOWLEDGED_MAX, self.held)

    def refitted(self, done: RefitDone, held: Sequence[VersionKey] = ()) -> None:
        """held: the versions of `done.held` that count."""
        # The time of a start is no refit pause.
        if self.serving is not None:
            self.refit_pause_s = done.pause_s
            self.recomputed_tokens, self.recompute_s = done.recomputed_tokens, done.recompute_s
        self.serves(VersionKey(done.version, done.digest), held)
        self.held_max = done.held_max
        self.memory_ok = done.memory_ok


@dataclass(slots=True)
class PeerReach:
    """How other peers reach this peer, and how fast it sends to them."""

    # The address at which the peer says that it can be dialled.
    listen: Address | None = None
    # Whether other peers can dial this peer; None: not known yet.
    reachable: bool | None = None
    # The secret with which the peer proves that it was dialled.
    dial_back_secret: bytes = b""
    # When the peer is dialled next; None: it is being dialled, or there is nothing to dial.
    dial_back_at: float | None = None
    # When the peer was dialled last.
    dialled_back_at: float | None = None
    # Bytes/s to plan with, as the peer and its receivers measured them.
    uplink: float | None = None
    # Bytes/s that the peer sends at most, as it says.
    uplink_limit: int | None = None
    # The peer says that it passes nothing on.
    receive_only: bool = False
    # The peer passed on bad frames, so it only receives.
    quarantined: bool = False


@dataclass(slots=True)
class PeerService:
    """Whether a worker gets leases, and if not, why."""

    # Activation has chosen the worker. A worker on standby only receives and passes on.
    active: bool = True
    # The worker announced that it will be taken away.
    leaving: bool = False
    # An operator has taken the worker out of service.
    cordoned: bool = False
    # The worker is to end once it holds nothing.
    draining: bool = False
    # Reports that no honest program sends; above 0, the worker does no work.
    misreports: int = 0
    # The worker gets no leases yet, because the audit has not learnt what honest answers look like.
    held_back: bool = False
    # This many of the worker's slots may be leased before its answers are audited; None: all of them.
    slots_allowed: int | None = None
    # Failed leases, less FORGIVES for each accepted result.
    failures: float = 0.0
    # The worker gets no leases before this time, in monotonic seconds.
    rest_until: float = 0.0

    @property
    def retiring(self) -> bool:
        """Whether the worker gets no more leases, and other workers are activated in its place."""
        return self.leaving or self.cordoned or self.misreports > 0

    def rest(self, now: float, *, at_least_s: float = 0.0) -> None:
        """It failed a lease and gets no others for a while.

        Leases that fail while it rests are not counted again: they have the same cause.
        """
        self.failures = min(FAILURES_MAX, self.failures + (now >= self.rest_until))
        rest_s = min(REST_S_MAX, WORKER_REST_S * 2.0 ** max(0.0, self.failures - 1.0))
        self.rest_until = max(self.rest_until, now + max(at_least_s, rest_s))

    def left_alone(self, samples: int) -> bool:
        """The worker did not work on these samples; `rest` has counted one. Returns whether it fails too often."""
        self.failures = min(FAILURES_MAX, self.failures + samples - 1)
        return self.failures > 2.0


@dataclass(slots=True)
class Peer:
    """See the module docstring."""

    peer: PeerId
    # The name that it gives itself.
    name: str
    kind: PeerKind
    # A different value in a hello means that its daemon was restarted.
    boot_id: str
    # Samples that its engines run at once; 0 for a peer without engines.
    slots: int
    # Its session; None: it has none now.
    session: SessionId | None
    # When a message came last, in monotonic seconds.
    heard_at: float
    state: PeerState = "joined"
    # The name of its access token.
    token: str = ""
    # The operator trusts its answers.
    trusted: bool = False
    # Its engine can score answers of others.
    scores: bool = False
    # Its quantization, as its hello says; empty: not quantized.
    quantization: str = ""
    # The build of its program.
    build: Build = OURS
    # Its price, as its owner states it.
    usd_per_h: float | None = None
    # When its session changed, in monotonic seconds.
    flips: deque[float] = field(default_factory=lambda: deque(maxlen=FLIPS_MAX))
    engine: PeerEngine = field(default_factory=PeerEngine)
    reach: PeerReach = field(default_factory=PeerReach)
    service: PeerService = field(default_factory=PeerService)

    @property
    def alive(self) -> bool:
        """It has a session, and is not suspected."""
        return self.state == "joined" and self.session is not None

    @property
    def address(self) -> Address | None:
        """The address at which other peers dial it. The seed is trusted to listen where it says."""
        return self.reach.listen if self.reach.reachable or self.kind == "seed" else None

    def succeeded(self) -> None:
        """One of its results was accepted."""
        self.engine.accepted += 1
        self.service.failures = max(0.0, self.service.failures - FORGIVES)

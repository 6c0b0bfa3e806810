"""The faults in a round of `echo2d bench broadcast`: peers die, fall silent, corrupt frames, join late.

A fault strikes once its time has come and the median peer has a given share of the version. Not here: the options, and
what is measured (`run`).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from echo2d.plan.kernel.scenario import PeerCrash, Scenario
from echo2d_lab.bench.lab.daemons import Swarm
from echo2d_lab.bench.lab.netlab import Lab, TrafficCounts

SPOIL_FROM = 0.1  # after this share of a version, the counters show which peer passes on most
SWING_S = 2.0  # seconds between two changes of the uplinks


@dataclass(frozen=True, slots=True)
class _Planned:
    """A fault of a peer (None: the busiest one), due once a time has passed and a share of the bytes has arrived."""

    strike: Callable[[int], None]
    node: int | None = None
    at_s: float = 0.0
    share: float = 0.0


class RoundFaults:
    """The planned faults of one round. culprits: the peers that they have struck so far, in this order.

    swing: every SWING_S each uplink becomes slower or faster by this share, at random.
    """

    def __init__(
        self, scenario: Scenario, lab: Lab, swarm: Swarm, *, swing: float, rng: random.Random
    ) -> None:
        self._scenario, self._lab, self._swarm = scenario, lab, swarm
        self._swing, self._swing_at, self._rng = swing, 0.0, rng
        self._planned: list[_Planned] = []
        self._spoiling: set[int] = set()
        self.culprits: list[int] = []

    @property
    def gone(self) -> set[int]:
        """The peers that may be unable to finish the round that they began."""
        return set(self.culprits) - self._spoiling

    # --- plans

    def plan(self, *, kill: float | None, partition: float | None, spoil: bool) -> None:
        """Plan the faults of the busiest fast peer, due when the median peer has a given share, and the scenario's
        faults, due at a given time.
        """
        for fault in self._scenario.faults:
            self._plan_scripted(fault)
        strikes = (
            (kill, self._kill),
            (partition, self._cut_off),
            (SPOIL_FROM if spoil else None, self._spoil),
        )
        self._planned += [
            _Planned(strike, share=share) for share, strike in strikes if share is not None
        ]

    def plan_newcomers(self) -> None:
        peers = enumerate(self._scenario.peers)
        self._planned += [
            _Planned(self._swarm.join, node, spec.joins_at_s)
            for node, spec in peers
            if spec.joins_at_s
        ]

    def _plan_scripted(self, fault: PeerCrash) -> None:
        self._planned.append(
            _Planned(self._cut_off if fault.silent else self._kill, fault.peer, fault.at_s)
        )
        if fault.back_s is not None:
            self._planned.append(_Planned(self._bring_back, fault.peer, fault.back_s))

    # --- strikes

    def make_due(
        self, elapsed_s: float, version_bytes: int, before: TrafficCounts, counts: TrafficCounts
    ) -> None:
        """Make all faults that are due. before: the counts at the start of the round."""
        if self._swing and elapsed_s >= self._swing_at:
            self._swing_at = elapsed_s + SWING_S
            for node in range(len(self._scenario.peers)):
                self._set_uplink(node, 1 + self._rng.choice((-self._swing, self._swing)))
        share = (
            median(come_bytes(node, before, counts) for node in range(1, len(counts.nodes)))
            / version_bytes
        )
        due = [each for each in self._planned if elapsed_s >= each.at_s and share >= each.share]
        for each in due:
            self._planned.remove(each)
            each.strike(self._busiest(before, counts) if each.node is None else each.node)

    def mend(self) -> None:
        """Bring back all peers, honest, for the next round: a new box replaces one that may be quarantined."""
        for node in range(len(self._scenario.peers)) if self._swing else ():
            self._set_uplink(node, 1.0)
        for node in range(1, len(self._scenario.peers)):
            self._bring_back(node)
        for node in self._spoiling:
            self._swarm.replace(node)

    def _set_uplink(self, node: int, times: float) -> None:
        spec = self._scenario.peers[node]
        self._lab.set_link(node, replace(spec, uplink=times * spec.uplink))

    def _busiest(self, before: TrafficCounts, counts: TrafficCounts) -> int:
        """The peer that has passed on most in this round, among the good peers with the fastest uplink."""
        good = set(range(1, len(counts.nodes))) - set(self.culprits)
        uplinks = {node: self._scenario.peers[node].uplink for node in good}
        fastest = [node for node, uplink in uplinks.items() if uplink == max(uplinks.values())]
        return max(
            fastest,
            key=lambda node: counts.nodes[node].up.link_bytes - before.nodes[node].up.link_bytes,
        )

    def _kill(self, node: int) -> None:
        self._swarm.kill(node)
        self.culprits.append(node)

    def _cut_off(self, node: int) -> None:
        self._lab.isolate(node)
        self.culprits.append(node)

    def _spoil(self, node: int) -> None:
        self._swarm.spoil(node)
        self._spoiling.add(node)
        self.culprits.append(node)

    def _bring_back(self, node: int) -> None:
        self._lab.isolate(node, on=False)
        if not self._swarm.runs(node):
            self._swarm.join(node)


def come_bytes(node: int, before: TrafficCounts, counts: TrafficCounts) -> int:
    """The bytes that the node has received between two counts."""
    return counts.nodes[node].down.payload_bytes - before.nodes[node].down.payload_bytes

"""Simulates a broadcast in virtual time: one real `Relay` per peer on a simulated `network`, and a stand-in for the
coordinator.

When a peer dies, everything that is under way to or from it is lost; its disk stays. The same scenario gives the same
trace, bit for bit. The module reads no real clock. Not here: bytes, hashing, the control link.
"""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from blake3 import blake3

from echo2d.core.base.ids import PeerId, SegmentId, frame_id
from echo2d.core.broadcast.transmission import LEARN_S
from echo2d.core.protocol.peer_messages import (
    FramesCancelled,
    FramesHeld,
    FramesWanted,
    RelayMessage,
    StreamEnded,
)
from echo2d.core.relay.events import (
    Accuse,
    ExpectPeer,
    ForgetPeer,
    FormArrived,
    FormComplete,
    FrameGone,
    FramesFound,
    Heard,
    PlanReceived,
    RelayAction,
    RelayDeadlinePassed,
    RelayEvent,
    ReportEdgeBroken,
    SendFrame,
    TableHeld,
    Tell,
)
from echo2d.core.relay.relay import Relay
from echo2d.core.topology.edges import edges_for
from echo2d.core.topology.plan import Job, PeerFacts, Plan
from echo2d.core.topology.uplink_rates import Rates
from echo2d.plan.broadcast.planner_stub import PlannerStub
from echo2d.plan.kernel.network import FORM, TIME_EPSILON_S, Node, SimNetwork
from echo2d.plan.kernel.scenario import PeerCrash, Scenario
from echo2d.plan.kernel.virtual_clock import Clock

_CHECK_EVERY = 1000  # events between two checks of a relay
CHECK_EVERY_LONG = 100_000  # for runs of minutes: a check is slow, because it looks at every frame

_STAMP = struct.Struct("<dHHI")
_KINDS = {
    kind: number for number, kind in enumerate((*RelayEvent.__args__, *RelayMessage.__args__))
}


class BroadcastStuckError(AssertionError):
    """A living peer did not receive everything in time."""


@dataclass(frozen=True, slots=True)
class BroadcastOutcome:
    """What one broadcast took, and what happened in it."""

    t_verify_s: float  # until every peer that was present from start to end held everything
    bound_s: float
    predicted_s: float
    arrived_s: dict[int, float]  # when each peer held everything
    verified_peers: int  # peers that hold everything and are still alive
    left: int  # peers that died
    seed_copies: float  # payload bytes that the seed sent, over those of the form
    duplicates: int  # payload frames that were received twice
    events: int
    generations: int
    quarantined: tuple[int, ...]  # peers that are in quarantine at the end
    trace: str  # digest of everything that happened, in order

    @property
    def ratio(self) -> float:
        return self.t_verify_s / self.bound_s

    def facts(self) -> dict[str, float | int]:
        """The figures, in the order in which they are shown."""
        return {
            "t_verify_s": self.t_verify_s,
            "bound_s": self.bound_s,
            "predicted_s": self.predicted_s,
            "ratio": self.ratio,
            "seed_copies": self.seed_copies,
            "verified_peers": self.verified_peers,
            "left": self.left,
            "refetched": self.duplicates,
            "generations": self.generations,
            "events": self.events,
        }


class World:
    """Simulates one scenario. check_every: events between two checks of a relay (all relays are checked at the end).

    rates: what the planner knows about the peers, to which this broadcast adds; None: the planner knows the real links.
    """

    def __init__(
        self, scenario: Scenario, *, check_every: int = _CHECK_EVERY, rates: Rates | None = None
    ) -> None:
        self._scenario = scenario
        self._check_every = check_every
        self._segments = tuple(scenario.segments())
        self._encoded = 0
        self._rates = rates
        self._one_plan = True  # whether the links carried frames of one plan only
        self._nodes = [Node(number, spec) for number, spec in enumerate(scenario.peers)]
        self._by_peer = {node.peer: node for node in self._nodes}
        job = Job(FORM, scenario.wire_bytes, scenario.frame_bytes)
        self._planner = PlannerStub(job, scenario.shape, scenario.chains, scenario.within_s)
        self._waiting: set[int] = set()  # living peers that do not hold the whole form
        self._to_come = 0  # scheduled starts and deaths
        self._left = 0
        self._chance = random.Random(f"churn {scenario.rng_seed}")
        self._clock = Clock()
        self._network = SimNetwork(
            self._clock, random.Random(scenario.rng_seed), self._segments, self._feed
        )
        self._events = 0
        self._trace = blake3()

    def run(self, told: Callable[[float], None] = lambda _: None) -> BroadcastOutcome:
        """Simulate until every living peer holds everything.

        told: is called now and then with the share of the predicted time that has passed. BroadcastStuckError: a peer
        does not receive everything; the text has the rng_seed.
        """
        present = [node for node in self._nodes if node.spec.joins_at_s == 0]
        for node in present:
            self._boot(node)
        for node in self._nodes:
            if node.spec.joins_at_s > 0:
                self._to_come += 1
                self._clock.after(node.spec.joins_at_s, self._come, node)
        for fault in self._scenario.faults:
            self._to_come += 1
            self._clock.after(fault.at_s, self._die, self._nodes[fault.peer], fault)
        self._update_facts(present)
        self._tell(self._planner.start(present[0].facts, [node.facts for node in present[1:]]))
        if (
            self._rates is not None
            and self._planner.plan is not None
            and self._planner.plan.is_guess
            and self._planner.plan.depends_on_rates
        ):
            self._clock.after(LEARN_S, self._learn, self._rates)
        self._encode(self._nodes[0].boots)
        self._schedule_churn()
        tell_at = 0
        while self._waiting or self._to_come:
            if not self._clock.step(self._scenario.limit_s):
                self._stuck()
            if self._events >= tell_at:
                # Progress is reported every 10,000 events.
                tell_at += 10_000
                told(self._clock.now / max(self._plan.predicted_s, TIME_EPSILON_S))
        if self._rates is not None:
            self._measure(self._rates)
        return self._outcome()

    def _learn(self, rates: Rates) -> None:
        """Plan again with the rates that were measured in the first seconds."""
        self._measure(rates)
        present = [node for node in self._nodes if node.relay is not None]
        self._update_facts(present)
        told = self._planner.learn(present[0].facts, [node.facts for node in present[1:]])
        self._tell(told)
        self._one_plan = not told

    def _update_facts(self, present: list[Node]) -> None:
        """If the planner plans by rates, give it the uplinks that they show."""
        if self._rates is None:
            return
        uplinks = self._rates.to_plan_with([node.peer for node in present])
        for node in present:
            node.facts = PeerFacts(node.peer, uplinks.get(node.peer), None, node.facts.address)

    def _measure(self, rates: Rates) -> None:
        """Add to the rates what both ends of every link report to the coordinator."""
        assert self._planner.plan is not None
        rates.begin(self._planner.plan if self._one_plan else None)
        for node in self._nodes:
            for peer, way in node.ways.items():
                rates.received(node.peer, peer, *way.meter.take())
            if node.relay is not None:
                rates.busy(node.peer, node.relay.busy.take(self._clock.now))
        rates.judge()

    def _outcome(self) -> BroadcastOutcome:
        for node in self._nodes:
            if node.relay is not None:
                node.relay.check()
        arrived = {
            node.number: node.arrived_s for node in self._nodes[1:] if node.arrived_s is not None
        }
        counted = self._counted()
        relays = [node.relay for node in self._nodes if node.relay is not None]
        transfers = [transfer for relay in relays if (transfer := relay.transfer(FORM)) is not None]
        return BroadcastOutcome(
            t_verify_s=max((arrived[node.number] for node in counted), default=0.0),
            bound_s=self._plan.bound_s,
            predicted_s=self._plan.predicted_s,
            arrived_s=arrived,
            verified_peers=sum(self._nodes[number].relay is not None for number in arrived),
            left=self._left,
            seed_copies=self._nodes[0].sent_bytes / self._scenario.wire_bytes,
            duplicates=sum(transfer.duplicates for transfer in transfers),
            events=self._events,
            generations=self._planner.generations,
            quarantined=tuple(
                node.number for node in self._nodes if node.peer in self._planner.quarantine
            ),
            trace=self._trace.hexdigest(),
        )

    def _counted(self) -> list[Node]:
        """The peers that were present at the start and still are."""
        return [
            node for node in self._nodes[1:] if node.spec.joins_at_s == 0 and node.relay is not None
        ]

    @property
    def _plan(self) -> Plan:
        assert self._planner.plan is not None
        return self._planner.plan

    def _stuck(self) -> None:
        left = ", ".join(map(str, sorted(self._waiting)))
        raise BroadcastStuckError(
            f"rng_seed={self._scenario.rng_seed}: peers {left} do not hold everything at {self._clock.now:.1f} s"
        )

    # the loop

    def _feed(self, node: Node, event: RelayEvent) -> None:
        """Let the node's relay handle the event, and perform its actions."""
        relay = node.relay
        if relay is None:
            return
        actions = relay.handle(event, now=self._clock.now)
        self._events += 1
        kind = type(event.message if isinstance(event, Heard) else event)
        self._trace.update(_STAMP.pack(self._clock.now, node.number, _KINDS[kind], len(actions)))
        for action in actions:
            self._perform(node, action)
        self._network.say_ready()
        self._set_alarm(node, relay)
        if self._events % self._check_every == 0:
            self._check_one()

    def _check_one(self) -> None:
        relay = self._nodes[self._events // self._check_every % len(self._nodes)].relay
        if relay is not None:
            relay.check()

    def _set_alarm(self, node: Node, relay: Relay) -> None:
        wake_at = relay.wake_at()
        if wake_at != node.alarm:
            node.alarm = wake_at
            if wake_at is not None:
                self._clock.at(wake_at, self._ring, node, relay, wake_at)

    def _ring(self, node: Node, relay: Relay, alarm: float) -> None:
        if node.relay is relay and node.alarm == alarm:
            self._feed(node, RelayDeadlinePassed())

    def _perform(self, node: Node, action: RelayAction) -> None:
        match action:
            case SendFrame():
                self._network.send_frame(node, action)
            case Tell(peer, message):
                if isinstance(message, StreamEnded):
                    self._by_peer[peer].note_ended(node.peer, message.stream)
                elif isinstance(message, FramesWanted):
                    self._by_peer[peer].note_repair(node.peer, message.stream)
                self._network.send(node, peer, Heard(node.peer, message), _frames_in(message))
            case ExpectPeer(edge):
                node.expected[edge.peer] = edge
                self._network.connect(node, self._by_peer[edge.peer])
            case ForgetPeer(peer):
                del node.expected[peer]
                self._network.disconnect(node, self._by_peer[peer])
            case ReportEdgeBroken() | Accuse():
                self._clock.after(self._control_s(node), self._handle_report, node.peer, action)
            case FormArrived():
                self._waiting.discard(node.number)
                node.arrived_s = self._clock.now if node.arrived_s is None else node.arrived_s
            case FrameGone():
                raise AssertionError("no peer loses frames in this simulation")
            case _:
                assert_never(action)

    # lives

    def _boot(self, node: Node) -> None:
        """Start the node's process, with its disk as it was."""
        node.boots += 1
        node.relay = Relay(node.peer)
        if node.number:
            self._waiting.add(node.number)
        for segment, sizes in enumerate(self._segments):
            frames = node.kept(segment)
            if frames:
                self._feed(node, TableHeld(FORM, SegmentId(segment), sizes))
                self._feed(node, FramesFound(FORM, frames[1:]))
        if self._encoded == len(self._segments):
            self._send_later(node, FormComplete(FORM, self._encoded))

    def _come(self, node: Node) -> None:
        """Start the node's process, and let the coordinator add it to the plan."""
        self._to_come -= 1
        self._enter(node)

    def _enter(self, node: Node) -> None:
        self._boot(node)
        if node.number == 0:
            others = [other.facts for other in self._nodes[1:] if other.relay is not None]
            self._tell(self._planner.start(node.facts, others))
            self._encode(node.boots)
        else:
            holders = [
                each.peer
                for each in self._nodes[1:]
                if each.relay is not None and each.arrived_s is not None
            ]
            self._tell(self._planner.came(node.facts, holders))

    def _die(self, node: Node, fault: PeerCrash) -> None:
        self._to_come -= 1
        if node.relay is None:
            return  # dead already, or not there yet
        self._kill(node, fault)
        if fault.back_s is not None:
            self._to_come += 1
            self._clock.at(max(self._clock.now, fault.back_s), self._come, node)

    def _schedule_churn(self) -> None:
        """Schedule the next leave and join. The time until then is exponential, because peers leave independently."""
        per_s = self._scenario.churn / 60.0 * (len(self._scenario.peers) - 1)
        if per_s:
            self._clock.after(self._chance.expovariate(per_s), self._churn)

    def _churn(self) -> None:
        if all(node.arrived_s is not None for node in self._counted()):
            return
        leaver = self._chance.choice([node for node in self._nodes[1:] if node.relay is not None])
        self._kill(leaver, PeerCrash(leaver.number, self._clock.now, silent=True))
        node = Node(len(self._nodes), replace(leaver.spec, joins_at_s=self._clock.now))
        self._nodes.append(node)
        self._by_peer[node.peer] = node
        self._enter(node)
        self._schedule_churn()

    def _kill(self, node: Node, fault: PeerCrash) -> None:
        assert node.relay is not None
        self._left += 1
        node.disk = node.relay.transfer(FORM)
        node.relay = node.alarm = None
        self._waiting.discard(node.number)
        for peer, way in node.ways.items():
            way.dead = True
            back = self._by_peer[peer].ways.get(node.peer)
            if back is not None:
                back.dead = True
                if not fault.silent:
                    self._clock.after(
                        self._scenario.detect_s, self._network.drop, back.source, back
                    )
        node.ways = {}
        node.expected = {}
        noticed = self._scenario.silence_s if fault.silent else self._scenario.detect_s
        if node.number:
            self._clock.after(noticed, self._lose, node, node.boots)

    def _encode(self, boots: int) -> None:
        """Encode the remaining segments: all at once, or, with an encode rate, one by one while the seed lives."""
        seed = self._nodes[0]
        while (
            boots == seed.boots and seed.relay is not None and self._encoded < len(self._segments)
        ):
            sizes = self._segments[self._encoded]
            if self._scenario.encode_rate is not None:
                self._clock.after(sum(sizes) / self._scenario.encode_rate, self._end_segment, boots)
                return
            self._add_segment(seed, sizes)

    def _end_segment(self, boots: int) -> None:
        seed = self._nodes[0]
        if boots == seed.boots and seed.relay is not None:
            self._add_segment(seed, self._segments[self._encoded])
            self._encode(boots)

    def _add_segment(self, seed: Node, sizes: tuple[int, ...]) -> None:
        segment = SegmentId(self._encoded)
        self._encoded += 1
        self._feed(seed, TableHeld(FORM, segment, sizes))
        self._feed(
            seed,
            FramesFound(FORM, tuple(frame_id(segment, index + 1) for index in range(len(sizes)))),
        )
        if self._encoded == len(self._segments):
            for node in self._nodes:
                self._send_later(node, FormComplete(FORM, self._encoded))

    # the coordinator

    def _control_s(self, node: Node) -> float:
        return node.spec.latency_s + self._scenario.peers[0].latency_s

    def _send_later(self, node: Node, event: RelayEvent) -> None:
        """Send an event from the coordinator to the peer. The event is lost if the peer's process dies before."""
        self._clock.after(self._control_s(node), self._hear, node, node.boots, event)

    def _hear(self, node: Node, boots: int, event: RelayEvent) -> None:
        if node.boots == boots:
            self._feed(node, event)

    def _tell(self, peers: set[PeerId]) -> None:
        for peer in sorted(peers):
            self._send_later(
                self._by_peer[peer], PlanReceived(edges_for(self._plan, peer, self._planner.secret))
            )

    def _lose(self, node: Node, boots: int) -> None:
        if node.boots == boots:
            self._tell(self._planner.went(node.peer))

    def _handle_report(self, reporter: PeerId, report: ReportEdgeBroken | Accuse) -> None:
        if isinstance(report, Accuse):
            self._tell(self._planner.accused(reporter, report.accused, self._clock.now))
        elif self._planner.broken(reporter, report):
            # The coordinator waits 0.6 s for more reports of broken edges.
            self._clock.after(0.6, self._decide)

    def _decide(self) -> None:
        self._tell(self._planner.decide())


def _frames_in(message: RelayMessage) -> int:
    """The number of frames that a message names."""
    match message:
        case FramesHeld(runs=runs):
            return sum(run.count for run in runs)
        case FramesWanted(frames=frames) | FramesCancelled(frames=frames):
            return len(frames)
        case _:
            return 0

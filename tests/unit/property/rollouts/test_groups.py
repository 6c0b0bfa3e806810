"""Groups and leases under any order of grants, results, silence and faults: nothing is lost, nothing counts twice."""

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2d.core.cluster.events import PeerDisconnected
from echo2d.core.protocol.control_messages import (
    Heartbeat,
    LeaseFailed,
    LeaseGranted,
    LeaseProgress,
    SampleAnswered,
)
from echo2d.core.rollouts.leases import STUCK_S
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, rules

NAMES = ("a", "b", "c")


class Machine(RuleBasedStateMachine):
    """Workers on version 0 and one batch after the other; only the paths of groups vary."""

    @initialize(
        group_size=st.integers(1, 4),
        slots=st.lists(st.integers(1, 6), min_size=3, max_size=3),
        bound=st.integers(0, 2),
        pairs=st.booleans(),
    )
    def begin(self, group_size: int, slots: list[int], bound: int, pairs: bool) -> None:
        self.world = World(
            rules(
                group_size=group_size,
                trajectories_per_step=2 * group_size,
                staleness_max=bound,
                tasks=tuple(replace(task, pairs=pairs) for task in rules().tasks),
                filter_zero_variance=False,
            )
        )
        self.world.connect("seed", kind="seed", slots=0)
        self.world.open_session()
        for name, count in zip(NAMES, slots, strict=True):
            self.world.connect(name, slots=count)
        self.world.publish(0)
        self.world.drain()
        for name in NAMES:
            self.world.refit(self.world.peers[name])

    def peer(self, data: st.DataObject) -> FakePeer:
        return self.world.peers[data.draw(st.sampled_from(NAMES))]

    @rule(data=st.data(), times=st.integers(1, 3))
    def generates(self, data: st.DataObject, times: int) -> None:
        peer = self.peer(data)
        if peer.open and peer.serving is not None:
            key, sample = data.draw(st.sampled_from(peer.open))
            result = peer.finish(key, sample)
            for _ in range(times):
                self.world.say(peer, result)

    @rule(data=st.data(), tokens=st.integers(1, 8), begins=st.booleans())
    def writes(self, data: st.DataObject, tokens: int, begins: bool) -> None:
        """Not always behind what it wrote before."""
        peer = self.peer(data)
        if peer.open and peer.serving is not None:
            key, sample = data.draw(st.sampled_from(peer.open))
            self.world.say(
                peer, peer.wrote(key, sample, *[5] * tokens, start=0 if begins else tokens)
            )

    @rule(data=st.data())
    def something_is_scored(self, data: st.DataObject) -> None:
        if self.world.pending:
            self.world.deliver(data.draw(st.integers(0, len(self.world.pending) - 1)))

    @rule(data=st.data())
    def fails(self, data: st.DataObject) -> None:
        peer = self.peer(data)
        for key in list(peer.leases)[:1]:
            peer.forget(key)
            self.world.say(peer, LeaseFailed(key.lease, key.attempt, "engine fault"))

    @rule(data=st.data(), forgets=st.booleans())
    def reconnects(self, data: st.DataObject, forgets: bool) -> None:
        peer = self.peer(data)
        self.world.handle(PeerDisconnected(peer.session, "reset"))
        for key in peer.held() if forgets else ():
            peer.forget(key)
        self.world.connect(peer.name)

    @rule(seconds=st.sampled_from([1.0, 4.0, 16.0]), silent=st.sampled_from([*NAMES, ""]))
    def time_passes(self, seconds: float, silent: str) -> None:
        for _ in range(4):
            self.world.pass_time(seconds / 4)
            for peer in [peer for name, peer in self.world.peers.items() if name != silent]:
                self.world.say(peer, Heartbeat(0))
                for key in list(peer.leases):
                    self.world.say(peer, LeaseProgress(key.lease, key.attempt, ()))

    @rule()
    def learner_asks(self) -> None:
        self.world.ask_batch(1)

    @invariant()
    def loads_fit(self) -> None:
        """A worker never holds more than its slots, unless a group is larger than all workers together."""
        if not hasattr(self, "world"):
            return
        status = self.world.state.status()
        size = self.world.rules.drawn(self.world.rules.tasks[0])
        for worker in status.workers:
            assert worker.leased <= max(worker.slots, size)

    @invariant()
    def grants_are_unique(self) -> None:
        """No attempt is given twice, to anyone; answers never outnumber results."""
        if not hasattr(self, "world"):
            return
        inboxes = [message for peer in self.world.peers.values() for message in peer.inbox]
        attempts = Counter((m.lease, m.attempt) for m in inboxes if isinstance(m, LeaseGranted))
        assert all(count == 1 for count in attempts.values())
        accepted = {
            (m.lease, m.attempt, m.sample)
            for m in inboxes
            if isinstance(m, SampleAnswered) and m.accepted
        }
        assert accepted <= {(key.lease, key.attempt, sample) for key, sample in self.world.kept}

    def teardown(self) -> None:
        """Everything that was admitted can be finished, and batch 1 comes."""
        if not hasattr(self, "world"):
            return
        self.world.pass_time(STUCK_S + 1.0)  # the longest rest is over
        for name in NAMES:
            self.world.connect(name)
        request = self.world.ask_batch(1)
        for _ in range(40):
            self.world.work()
            if request in self.world.replies:
                break
            self.world.pass_time(1.0)
        assert request in self.world.replies


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30)

"""Calls that name their version, under any order of events: they get its tokens alone, and none waits for ever.

Workers load versions late, skip some, come and go; versions are revoked and published again. `World` checks that a
lease names only a version that its worker holds; `check()` runs after every event.
"""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import PeerDisconnected
from echo2d.core.coordinator.events import CoordinatorAction, CoordinatorEvent, DeadlinePassed
from echo2d.core.protocol.control_messages import Goodbye, Heartbeat, LeaseFailed, RefitFailed
from echo2d.core.rules.tasks import GatewayRules
from echo2d.core.work.calls.events import CallId, CallRefused, ChoiceGrew
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, rules
from tests.support.gateway import IDLE, exactly, hold

NAMES = ("a", "b")
MOST = 3
FOREVER_S = 1e6


class Held(World):
    """A world that keeps what callers are told."""

    def __init__(self) -> None:
        # By open call, the digest of the version that it names.
        self.calls: dict[CallId, bytes] = {}
        gateway = GatewayRules(1.0, FOREVER_S)
        super().__init__(
            rules(gateway=gateway, versions_held=MOST, tinker=("model",), tasks=(), **IDLE)
        )

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        actions = super().handle(event)
        for each in actions:
            if isinstance(each, CallRefused):
                self.calls.pop(each.call, None)
            elif isinstance(each, ChoiceGrew):
                assert {span.digest for span in each.spans} == {self.calls[each.call]}
                if each.finish is not None:
                    del self.calls[each.call]
        return actions


class HeldCalls(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = Held()
        self.world.connect("seed", kind="seed", slots=0)
        for name in NAMES:
            self.world.connect(name, slots=2)
        self.world.open_session()
        self.world.publish(0)
        self.newest = self.number = self.salt = 0
        self.settle()

    @property
    def workers(self) -> list[FakePeer]:
        return [self.world.peers[name] for name in NAMES]

    def settle(self) -> None:
        """Everything arrives, and every worker loads what it has received."""
        self.world.drain()
        while any(map(self.world.refit, self.workers)):
            self.world.drain()

    @rule(steps=st.integers(1, 3))
    def publish(self, steps: int) -> None:
        self.newest += steps
        self.world.publish(self.newest)

    @rule(versions=st.lists(st.integers(0, 5), max_size=MOST, unique=True))
    def hold(self, versions: list[int]) -> None:
        """The newest ones, counted from the newest."""
        hold(self.world, *(self.newest - each for each in versions if each <= self.newest))

    @rule(data=st.data())
    def hold_what_is_held(self, data: st.DataObject) -> None:
        numbers = sorted({key.version for peer in self.workers for key in peer.versions})
        count = min(MOST - 1, len(numbers))
        hold(self.world, *data.draw(st.permutations(numbers).map(lambda found: found[:count])))

    @rule()
    def load(self) -> None:
        self.settle()

    @rule(name=st.sampled_from(NAMES), count=st.integers(0, 6))
    def something_arrives(self, name: str, count: int) -> None:
        for _ in range(min(count, len(self.world.pending))):
            self.world.deliver()
        if not self.world.peers[name].closed:
            self.world.refit(self.world.peers[name])

    @rule(back=st.integers(0, 4), choices=st.integers(1, 2))
    def ask(self, back: int, choices: int) -> None:
        version = max(0, self.newest - back)
        key = self.world.state._versions.numbered(Version(version))
        self.number += 1
        call = replace(exactly(self.number, version), caller=f"c{self.number % 3}")
        if key is not None:
            self.world.calls[call.call] = key.digest
        self.world.handle(call)

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(0, 2))
    def write(self, name: str, tokens: int) -> None:
        peer = self.world.peers[name]
        if peer.open and peer.serving is not None and not peer.closed:
            key, sample = peer.open[0]
            said = peer.wrote(key, sample, *range(7, 7 + tokens)) if tokens else None
            written = peer.leases[key].written
            self.world.say(
                peer, said or peer.finish(key, sample, tokens=(9,) * (2 - written) + (1,))
            )

    @rule(name=st.sampled_from(NAMES))
    def give_back(self, name: str) -> None:
        peer = self.world.peers[name]
        if peer.leases and not peer.closed:
            key = next(iter(peer.leases))
            peer.forget(key)
            self.world.say(peer, LeaseFailed(*key, "no memory"))

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["cut", "bye", "lost", "restart"]))
    def trouble(self, name: str, how: str) -> None:
        world, peer = self.world, self.world.peers[name]
        if how == "cut":
            world.handle(PeerDisconnected(peer.session, "reset"))
        elif how == "bye":
            world.say(peer, Goodbye("SIGTERM"))
        elif how == "lost" and peer.serving is not None and not peer.closed:
            lost, peer.serving, peer.ready = peer.serving, None, peer.serving
            for key in list(peer.leases):
                peer.forget(key)
            world.say(peer, RefitFailed(*lost, None, "out of memory"))
        elif how == "restart":
            peer.beside = ()
            for key in list(peer.leases):
                peer.forget(key)
            world.connect(name, boot_id=f"b{world.now}")

    @rule(name=st.sampled_from(NAMES))
    def return_after_a_while(self, name: str) -> None:
        self.world.pass_time(31.0)  # so that no peer flaps
        self.world.connect("seed", kind="seed")
        self.world.connect(name)

    @rule(back=st.integers(0, 3))
    @precondition(lambda self: self.newest > 0)
    def revoke(self, back: int) -> None:
        """Another learner publishes other bytes under this number, and then the newest number again."""
        self.salt += 1
        self.world.open_session()
        self.world.publish(max(0, self.newest - back), salt=self.salt)
        self.newest += 1
        self.world.publish(self.newest)

    @rule(seconds=st.sampled_from([0.5, 7.0, 16.0]), heartbeats=st.booleans())
    def time_passes(self, seconds: float, *, heartbeats: bool) -> None:
        for peer in self.world.peers.values():
            if heartbeats and not peer.closed:
                self.world.say(peer, Heartbeat(0))
        self.world.pass_time(seconds)

    def teardown(self) -> None:
        """With workers that answer and newer versions that arrive, every call ends."""
        world = self.world
        world.pass_time(200.0)
        world.connect("seed", kind="seed", boot_id="last")
        for name in NAMES:
            world.connect(name, boot_id="last")
        self.settle()
        for _ in range(8):
            hold(world)
            self.newest += 1
            world.publish(self.newest)
            self.settle()
            for peer in self.workers:
                while peer.open:
                    key, sample = peer.open[0]
                    world.say(peer, peer.finish(key, sample))
            world.pass_time(2.0)
            for peer in self.workers:
                world.say(peer, Heartbeat(0))
            world.handle(DeadlinePassed())
        assert not world.calls


TestHeldCalls = HeldCalls.TestCase

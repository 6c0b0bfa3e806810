"""The whole machine under any order of events: the invariants I1, I4, I5 hold, and it can always go on.

`World` checks frozen batches, answers and acknowledgements; `check()` runs after every event.
"""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from echo2d.core.base.ids import RequestId
from echo2d.core.cluster.events import PeerDisconnected, PeerRevoked, RemovalPlanned, Reply
from echo2d.core.coordinator.events import DeadlinePassed, RequestGone, WorkerOrder, WorkerOrdered
from echo2d.core.protocol.control_messages import (
    Goodbye,
    Heartbeat,
    HeldLease,
    LeaseFailed,
    LeaseProgress,
)
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, rules, train

NAMES = ("a", "b", "c")
KINDS = ("good", "bad", "twice", "changed", "stranger")


CASES = [(s, k, mode) for s in range(5) for k in range(1, s + 2) for mode in ("drop", "mask")]
SIZES = [
    (4, 2, 4),
    (8, 4, 3),
    (6, 1, 2),
    (8, 4, 16),
    (3, 3, 1),
]  # R, group size, slots of each of two workers


@pytest.mark.parametrize("number", range(len(CASES)))
def test_ideal_workers_never_wait_for_ever(number: int) -> None:
    staleness_max, kappa, over_stale = CASES[number]
    trajectories, group_size, slots = SIZES[number % len(SIZES)]
    world = World(
        rules(
            staleness_max=staleness_max,
            publish_every=kappa,
            over_stale=over_stale,
            trajectories_per_step=trajectories,
            group_size=group_size,
        )
    )
    world.connect("seed", kind="seed", slots=0)
    world.connect("a", slots=slots)
    world.connect("b", slots=slots)
    train(world, 30, kappa=kappa, prefetch=number % 3 == 0)
    assert sorted(world.trained) == list(range(1, 31))


def test_a_resumed_run_whose_first_batch_is_refused_goes_on() -> None:
    world = World(rules(staleness_max=1))
    world.connect("seed", kind="seed", slots=0)
    world.connect("a")
    train(world, 12)
    world.open_session(2)
    assert world.refuse(3, *world.ledger.frozen[3].groups[:1]).body == {"replaced": 1}
    world.trained.clear()
    train(world, 12, start=2)
    assert sorted(world.trained) == list(range(3, 15))


class Machine(RuleBasedStateMachine):
    """Peers that come, go, lie and forget; a learner that restarts; a coordinator that is killed."""

    @initialize(
        staleness=st.integers(0, 3),
        kappa=st.integers(1, 4),
        sizes=st.sampled_from([(4, 2), (2, 2), (6, 3), (3, 1)]),
        over_stale=st.sampled_from(["drop", "mask"]),
        variance=st.booleans(),
    )
    def begin(
        self, staleness: int, kappa: int, sizes: tuple[int, int], over_stale: str, variance: bool
    ) -> None:
        self.kappa = min(kappa, staleness + 1)
        self.world = World(
            rules(
                staleness_max=staleness,
                publish_every=self.kappa,
                trajectories_per_step=sizes[0],
                group_size=sizes[1],
                over_stale=over_stale,
                filter_zero_variance=variance,
            )
        )
        self.bad_rewards = 0
        self.salt = 0
        self.world.reward = self.reward
        self.world.connect("seed", kind="seed", slots=0)
        self.world.connect("a", slots=4)
        self.open_session(0)
        self.settles()

    def reward(self, cursor: int, sample: int) -> float | None:
        if self.bad_rewards:
            self.bad_rewards -= 1
            return None
        return float(cursor % 3 == 0 or sample % 2)

    # --- learner

    def open_session(self, step: int) -> None:
        """It makes other weights than the one before, but for what it resumes from."""
        self.step, self.salt = step, self.salt + 1
        self.batches: dict[int, RequestId] = {}
        assert self.world.open_session(step).status == 200
        assert self.world.publish(step, salt=self.salt).status == 200
        self.published = step

    @rule(back=st.integers(0, 3))
    def learner_restarts(self, back: int) -> None:
        self.open_session(max(self.world.ledger.checkpoint, self.step - back))

    @rule(ahead=st.integers(1, 2))
    def learner_asks(self, ahead: int) -> None:
        step = self.step + ahead
        if step not in self.batches or self.batches[step] in self.world.replies:
            self.batches[step] = self.world.ask_batch(step)

    @rule()
    def long_poll_ends(self) -> None:
        for request in self.batches.values():
            if request not in self.world.replies:
                self.world.handle(RequestGone(request))
        self.batches.clear()

    def taken(self, step: int) -> Reply | None:
        return self.world.replies.get(self.batches.get(step, RequestId(0)))

    @rule(again=st.booleans())
    def learner_commits(self, *, again: bool) -> None:
        reply = self.taken(self.step + 1)
        if (
            reply is None
            or reply.digest is None
            or reply.digest != self.world.digests[self.step + 1]
        ):
            return
        for _ in range(1 + again):
            assert self.world.commit(self.step + 1, reply.digest).status == 200
        self.step += 1
        if self.step - self.published >= self.kappa:
            assert self.world.publish(self.step, salt=self.salt).status == 200
            self.published = self.step

    @rule(data=st.data())
    def learner_refuses(self, data: st.DataObject) -> None:
        frozen = self.world.ledger.frozen.get(self.step + data.draw(st.integers(1, 2)))
        if frozen is None or frozen.refusals >= 3:
            return
        group = data.draw(st.sampled_from(frozen.groups))
        assert self.world.refuse(frozen.step, group).status == 200
        self.batches.pop(frozen.step, None)

    @rule()
    def learner_checkpoints(self) -> None:
        assert self.world.checkpoint(self.step).status == 200

    # --- what is under way

    @precondition(lambda self: self.world.pending)
    @rule(data=st.data(), count=st.integers(1, 8))
    def something_arrives(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.world.pending))):
            self.world.deliver(data.draw(st.integers(0, len(self.world.pending) - 1)))

    @rule()
    def settles(self) -> None:
        """All but generation."""
        self.world.drain()
        while any(self.world.refit(peer) for peer in self.world.peers.values()):
            self.world.drain()

    @rule()
    def trains_one_step(self) -> None:
        self.learner_asks(1)
        self.world.work()
        self.learner_commits(again=False)
        self.settles()

    @rule(seconds=st.sampled_from([0.1, 2.0, 7.0, 16.0, 70.0]), heartbeats=st.booleans())
    def time_passes(self, seconds: float, heartbeats: bool) -> None:
        for _ in range(4):
            self.world.pass_time(seconds / 4)
            for peer in self.world.peers.values() if heartbeats else ():
                self.world.say(peer, Heartbeat(0))

    @rule()
    def early_timer(self) -> None:
        self.world.handle(DeadlinePassed())

    # --- peers

    def a_peer(self, data: st.DataObject) -> FakePeer:
        return self.world.peers[data.draw(st.sampled_from(sorted(self.world.peers)))]

    @rule(name=st.sampled_from(NAMES), slots=st.integers(1, 5), boot=st.sampled_from(["b", "c"]))
    def connects(self, name: str, slots: int, boot: str) -> None:
        self.world.connect(name, slots=slots, boot_id=boot)

    @rule(boot=st.sampled_from(["b", "c"]))
    def seed_connects(self, boot: str) -> None:
        self.world.connect("seed", kind="seed", slots=0, boot_id=boot)

    @rule(data=st.data(), how=st.sampled_from(["cut", "bye", "revoked", "removal"]))
    def leaves(self, data: st.DataObject, how: str) -> None:
        peer = self.a_peer(data)
        if how == "cut":
            self.world.handle(PeerDisconnected(peer.session, "reset"))
        elif how == "bye":
            self.world.say(peer, Goodbye("stopping"))
        elif how == "removal":
            self.world.handle(RemovalPlanned(peer.peer, "its time ends"))
        else:
            self.world.handle(PeerRevoked(peer.peer))

    @rule(data=st.data(), order=st.sampled_from(["cordon", "uncordon", "drain", "hand over"]))
    def is_ordered(self, data: st.DataObject, order: str) -> None:
        peer, hand_over = self.a_peer(data).peer, order == "hand over"
        what: WorkerOrder = "drain" if hand_over else order  # type: ignore[assignment]
        self.world.call(lambda number: WorkerOrdered(number, peer, what, hand_over))

    @rule(data=st.data())
    def refits(self, data: st.DataObject) -> None:
        self.world.refit(self.a_peer(data))

    @rule(data=st.data(), kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=8))
    def generates(self, data: st.DataObject, kinds: list[str]) -> None:
        for kind in kinds:
            able = [
                peer for peer in self.world.peers.values() if peer.open and peer.serving is not None
            ]
            if able:
                peer = data.draw(st.sampled_from(able))
                key, sample = data.draw(st.sampled_from(peer.open))
                self.result(peer, key, sample, kind)

    def result(self, peer: FakePeer, key: HeldLease, sample: int, kind: str) -> None:
        result = peer.finish(key, sample, tokens=(99,) if kind == "bad" else None)
        sender = self.world.peers["seed"] if kind == "stranger" else peer
        self.world.say(sender, result)
        if kind == "twice":
            self.world.say(peer, result)
        if kind == "changed":
            self.world.say(peer, replace(result, finish="length"))

    @rule(data=st.data(), tokens=st.integers(1, 8), begins=st.booleans())
    def writes(self, data: st.DataObject, tokens: int, begins: bool) -> None:
        able = [
            peer for peer in self.world.peers.values() if peer.open and peer.serving is not None
        ]
        if able:
            peer = data.draw(st.sampled_from(able))
            key, sample = data.draw(st.sampled_from(peer.open))
            self.world.say(
                peer, peer.wrote(key, sample, *[5] * tokens, start=0 if begins else tokens)
            )

    @rule(data=st.data())
    def reports(self, data: st.DataObject) -> None:
        peer = self.a_peer(data)
        for key in list(peer.leases):
            self.world.say(peer, LeaseProgress(key.lease, key.attempt, ()))

    @rule(data=st.data())
    def gives_back(self, data: st.DataObject) -> None:
        peer = self.a_peer(data)
        for key in list(peer.leases)[:1]:
            peer.forget(key)
            self.world.say(peer, LeaseFailed(key.lease, key.attempt, "engine fault"))

    @rule()
    def a_reward_fails(self) -> None:
        self.bad_rewards += 1

    @rule()
    def coordinator_is_killed(self) -> None:
        self.world.crash()
        self.batches.clear()

    def teardown(self) -> None:
        """Whatever happened: with ideal peers the run goes on."""
        if not hasattr(self, "world") or self.world.stopped:
            return
        self.bad_rewards = 0
        self.world.reward = lambda cursor, sample: float(sample % 2)
        self.world.pass_time(100.0)
        for name in NAMES:
            self.world.connect(name, slots=4, boot_id="last")
        self.world.connect("seed", kind="seed", slots=0, boot_id="last")
        train(self.world, 4, start=self.step, kappa=self.kappa)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)

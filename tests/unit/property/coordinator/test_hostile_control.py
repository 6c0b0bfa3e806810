"""Any message that passes the codec, in any state of the coordinator, during honest work.

The coordinator reacts, refuses or closes the session, and never does anything else; `World` and `check()` check the
invariants after every event. At the end honest peers train as if nothing had happened (I6).
"""

import random
from typing import Any, get_args

from echo2d.core.base.ids import SessionId
from echo2d.core.cluster.events import PeerConnected, PeerDisconnected, PeerSaid
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    TO_COORDINATOR,
    EncodeFailed,
    FormEncoded,
    Hello,
    LeaseGranted,
    PlanEdges,
    SegmentEncoded,
    ToCoordinator,
)
from echo2d.core.work.training.accepted_results import ANSWERED_MAX
from echo2d.errors import PeerFault
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, train, version_key
from tests.support.fuzz import Fuzz, Invent, assert_bounded, damaged

KINDS = get_args(ToCoordinator)
SEED_ONLY = (SegmentEncoded, FormEncoded, EncodeFailed)
BYTES_MAX = 4 << 20  # of one world: a few dozen groups, peers and faults
WORLD_MESSAGES = 2000  # then another one


class Hostile:
    """One world with a seed, two honest workers and a hostile one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.refused, self.heard = rng, 0, 0
        self.world = World()
        for name, kind, slots in (
            ("seed", "seed", 0),
            ("a", "worker", 4),
            ("b", "worker", 2),
            ("evil", "worker", 4),
        ):
            self.world.connect(name, kind=kind, slots=slots)  # type: ignore[arg-type]  # the literals above
        self.world.open_session(0)
        self.world.publish(0)
        self.step, self.batch = 0, self.world.ask_batch(1)
        self.corpus: list[bytes] = []

    def pools(self) -> dict[str, Any]:
        """What the fields of a message may name in this state; the private parts are what an insider could know."""
        world, evil = self.world, self.world.peers["evil"]
        leases = [
            m
            for peer in world.peers.values()
            for m in peer.inbox[-40:]
            if isinstance(m, LeaseGranted)
        ]
        plans = [
            m for peer in world.peers.values() for m in peer.inbox[-40:] if isinstance(m, PlanEdges)
        ]
        keys = [version_key(step, salt) for step in range(self.step + 2) for salt in (0, 1)]
        return {
            "lease": [each.lease for each in leases],
            "attempt": (0, 1),
            "sample": (0, 1),
            "form": [each.form for each in plans],
            "plan": [each.plan for each in plans],
            "generation": [each.generation for each in plans],
            "peer": [peer.peer for peer in world.peers.values()],
            "accused": [peer.peer for peer in world.peers.values()],
            "version": range(self.step + 2),
            "digest": [key.digest for key in keys],
            "serving": [*keys, None],
            "protocol": (OURS.protocol,),
            "oldest": (OURS.oldest,),
            "run_id": (world.rules.run_id, None),
            "kind": ("worker", "worker", "relay"),
            "leases": [evil.held()],
        }

    def attack(self) -> None:
        """One message, from the hostile worker or, rarely, from one that was honest so far."""
        rng, peers = self.rng, self.world.peers
        peer = peers["evil"] if rng.random() < 0.9 else peers[rng.choice(sorted(peers))]
        message = self.message()
        if isinstance(message, Hello):
            self.hello(peer, message)
        elif message is not None and not (peer.kind == "seed" and isinstance(message, SEED_ONLY)):
            self.world.handle(PeerSaid(peer.session, message))
            self.heard += 1
        if peer.closed:
            self.world.connect(peer.name, kind=peer.kind, boot_id=rng.choice("bcd"))

    def hello(self, peer: FakePeer, hello: Hello) -> None:
        if (hello.kind == "seed") != (
            peer.kind == "seed"
        ):  # the session refuses it: it knows the credential's role
            self.refused += 1
            return
        self.world.now += rng_pause(self.rng)
        peer.session, peer.closed = SessionId(peer.session + 1_000_000), False
        self.world.handle(PeerConnected(peer.session, peer.peer, hello))

    def message(self) -> ToCoordinator | None:
        """Invented, or damaged on its way; None: the codec refuses it."""
        rng = self.rng
        data = TO_COORDINATOR.encode(Invent(rng, self.pools()).message(rng.choice(KINDS)))
        self.corpus = [*self.corpus[-50:], data]
        if rng.random() < 0.4:
            data = damaged(rng, rng.choice(self.corpus), self.corpus)
        try:
            message: ToCoordinator = TO_COORDINATOR.decode(data)
        except PeerFault:
            self.refused += 1
            return None
        return message

    def live(self) -> None:
        """Something honest happens, or time passes."""
        rng, world = self.rng, self.world
        match rng.randrange(8):
            case 0 | 1 if world.pending:
                world.deliver(rng.randrange(len(world.pending)))
            case 2:
                world.pass_time(rng.choice((0.1, 3.0, 20.0)))
            case 3:
                self.cut(world.peers[rng.choice(("a", "b", "evil"))])
            case 4:
                self.train()
            case _:
                for name in ("a", "b"):
                    world.refit(world.peers[name])
                    self.generate(world.peers[name])

    def generate(self, peer: FakePeer) -> None:
        if peer.open and peer.serving is not None:
            key, sample = peer.open[0]
            self.world.say(peer, peer.finish(key, sample))

    def cut(self, peer: FakePeer) -> None:
        self.world.handle(PeerDisconnected(peer.session, "reset"))
        self.world.connect(peer.name)

    def train(self) -> None:
        world, reply = self.world, self.world.replies.get(self.batch)
        if reply is not None and reply.digest is not None:
            self.step += 1
            world.commit(self.step, reply.digest)
            world.publish(self.step)
            world.checkpoint(self.step)
            self.batch = world.ask_batch(self.step + 1)

    def recovers(self) -> None:
        """Whatever was said: with honest peers the run goes on."""
        world = self.world
        world.handle(PeerDisconnected(world.peers["evil"].session, "reset"))
        del world.peers["evil"]
        world.pending = [event for event in world.pending if not isinstance(event, PeerSaid)]
        world.pass_time(200.0)
        for name in ("seed", "a", "b"):
            world.connect(
                name, kind="seed" if name == "seed" else "worker", slots=4, boot_id="last"
            )
        train(world, 3, start=self.step)


def rng_pause(rng: random.Random) -> float:
    """Between two hellos; without any, they are two daemons that share a key."""
    return rng.choice((0.0, 1.0, 30.0))


def test_the_coordinator_survives_any_message_in_any_state(fuzz: Fuzz) -> None:
    hostile, refused, heard = Hostile(fuzz.rng), 0, 0
    for number in fuzz.share(0.25):
        hostile.attack()
        if fuzz.rng.random() < 0.3:
            hostile.live()
        if number % 500 == 499:
            assert_bounded(hostile.world.state, items_max=ANSWERED_MAX, total_max=BYTES_MAX)
        if number % WORLD_MESSAGES == WORLD_MESSAGES - 1:
            assert hostile.world.stopped is None
            hostile.recovers()
            refused, heard, hostile = (
                refused + hostile.refused,
                heard + hostile.heard,
                Hostile(fuzz.rng),
            )
    hostile.recovers()
    assert min(refused + hostile.refused, heard + hostile.heard) > len(fuzz.share(0.25)) // 10

"""Any message of the coordinator's end that passes the codec, in any state of a worker that goes on working.

The worker obeys, refuses with a note or gives the lease back; `check()` runs after every event, and nothing piles up.
"""

import random
from typing import Any, get_args

from echo2d.core.base.ids import (
    Epoch,
    Generation,
    PeerId,
    PlanId,
    PublishSeq,
    version_label,
)
from echo2d.core.protocol.control_messages import (
    TO_PEER,
    Finish,
    HeldLease,
    PlanEdges,
    ToPeer,
    Welcome,
)
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.relay import events as relay_events
from echo2d.core.relay.relay import Relay
from echo2d.core.worker.events import (
    AbortGeneration,
    ApplyCancelled,
    ApplyForm,
    CancelApply,
    ControlDown,
    ControlUp,
    CoordinatorSaid,
    EngineRefitted,
    LabelSpan,
    RefitEngines,
    RootVerified,
    SampleProgressed,
    SendControl,
    ShutDown,
    StartGeneration,
)
from echo2d.core.worker.state import WorkerAction, WorkerEvent, WorkerState
from echo2d.errors import PeerFault
from tests.support.fuzz import Fuzz, Invent, assert_bounded, damaged
from tests.support.worker import RUN, a_key, a_lease, a_root, a_snapshot

ME, OTHERS = PeerId("b" * 32), (PeerId("a" * 32), PeerId("c" * 32))
KINDS = get_args(ToPeer)
ITEMS_MAX = 1 << 17  # bytes of the longest prompt, which is hostile; every table is far shorter
BYTES_MAX = 64 << 20  # leases and results at their limits
TOKENS = 4
WORKER_MESSAGES = 2000  # then another one


class Hostile:
    """A worker whose disk and engine take their time, as a real shell's do: no answer comes amid a turn's actions."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.refused, self.said, self.seq = rng, 0.0, 0, 0, 0
        self.state = WorkerState(Relay(ME), RUN, slots=3, publish_seq=PublishSeq(0), standing=())
        self.roots = {a_root(0).form: a_root(0)}
        self.label: str | None = None
        self.generating: dict[HeldLease, dict[int, int]] = {}
        self.applying: ApplyForm | None = None
        self.cancelled = False
        self.refitting: RefitEngines | None = None
        self.slot = "a"  # the current one
        self.stopped = False
        self.corpus: list[bytes] = []
        self.welcome()
        self.publish()
        self.apply()
        self.refit()

    def on(self, event: WorkerEvent) -> None:
        todo = self.state.handle(event, now=self.now)
        self.state.check()
        for action in todo:
            self.perform(action)
        if self.applying is not None and self.refitting is not None:
            assert self.refitting.path == self.slot, "an engine reads the slot that is written"

    def perform(self, action: WorkerAction) -> None:
        match action:
            case StartGeneration(lease):
                self.generating[HeldLease(lease.lease, lease.attempt)] = dict.fromkeys(
                    lease.samples, 0
                )
            case AbortGeneration(lease, attempt):
                self.generating.pop(HeldLease(lease, attempt), None)
            case ApplyForm():
                assert self.applying is None
                self.applying, self.cancelled = action, False
            case CancelApply(form):
                assert self.applying is not None
                assert self.applying.form == form
                self.cancelled = True
            case RefitEngines():
                assert self.refitting is None
                self.refitting = action
            case SendControl():
                self.said += 1
            case ShutDown():
                self.stopped = True
            case _:
                pass

    # --- honest

    def welcome(self) -> None:
        hello = self.state.hello(kind="worker", name="box", boot_id="b", listen=None, forms=())
        self.on(ControlUp(Welcome(ME, RUN, Epoch(1), PublishSeq(0), 2.0, hello.leases[::2], ())))

    def publish(self) -> None:
        self.seq += 1
        root = a_root(self.rng.randrange(4), seq=self.seq)
        self.roots[root.form] = root
        self.on(RootVerified(root))
        self.on(CoordinatorSaid(PlanEdges(root.form, PlanId(self.seq), Generation(1), (), ())))

    def apply(self) -> None:
        """The apply under way ends; one that was cancelled may have been done before."""
        order, self.applying = self.applying, None
        if order is not None and self.cancelled and self.rng.random() < 0.5:
            self.on(ApplyCancelled(order.form))
        elif order is not None:
            self.slot = "b" if self.slot == "a" else "a"
            self.on(a_snapshot(self.roots[order.form], self.slot))

    def refit(self) -> None:
        """The refit under way ends."""
        order, self.refitting = self.refitting, None
        if order is not None:
            self.label = version_label(order.version, order.digest)
            self.on(EngineRefitted(order.version, order.digest, 0.1, memory_ok=True))

    def write(self) -> None:
        """A token of one running sample."""
        if not self.generating or self.label is None:
            return
        key = self.rng.choice(list(self.generating))
        samples = self.generating[key]
        sample, at = self.rng.choice(sorted(samples.items()))
        samples[sample], finished = at + 1, at + 1 >= TOKENS
        if finished:
            del samples[sample]
        if not samples:
            del self.generating[key]
        span = LabelSpan(at, at + 1, self.label)
        finish: Finish | None = "stop" if finished else None
        self.on(SampleProgressed(key.lease, key.attempt, sample, (7,), (-1.0,), (span,), finish))

    def live(self) -> None:
        match self.rng.randrange(8):
            case 0:
                self.publish()
            case 1:
                self.on(ControlDown())
                self.welcome()
            case 2:
                self.now += self.rng.choice((0.5, 2.0, 130.0))
                self.on(relay_events.RelayDeadlinePassed())
            case 3:
                self.apply()
            case 4:
                self.refit()
            case _:
                self.write()

    # --- hostile

    def attack(self) -> None:
        message = self.message()
        if message is not None:
            self.on(CoordinatorSaid(message))

    def message(self) -> ToPeer | None:
        rng = self.rng
        made = (
            a_lease(rng.randrange(40), attempt=0, samples=range(rng.randint(1, 3)), tokens=TOKENS)
            if rng.random() < 0.2
            else Invent(rng, self.pools()).message(rng.choice(KINDS))
        )
        data = TO_PEER.encode(made)
        self.corpus = [*self.corpus[-50:], data]
        if rng.random() < 0.4:
            data = damaged(rng, rng.choice(self.corpus), self.corpus)
        try:
            message: ToPeer = TO_PEER.decode(data)
        except PeerFault:
            self.refused += 1
            return None
        return message

    def pools(self) -> dict[str, Any]:
        keys = [a_key(version) for version in range(4)]
        return {
            "form": list(self.roots),
            "version": range(4),
            "versions": [tuple(keys[: self.rng.randrange(3)])],
            "digest": [key.digest for key in keys],
            "lease": range(40),
            "attempt": (0, 1),
            "sample": (0, 1, 2),
            "samples": [(0,), (0, 1), (0, 0), ()],
            "prompt": [pack_tokens([3, 4])],
            "max_new_tokens": (TOKENS,),
            "oldest": range(3),
            "peer": [*OTHERS, ME],
            "parent": [*OTHERS, None],
            "children": [(), OTHERS[:1], OTHERS],
            "secret": [bytes(32)],
            "stripe": (0, 1),
            "weight": (1.0, 0.5),
            "plan": range(self.seq + 3),
            "generation": range(3),
        }


def test_a_worker_survives_any_message_in_any_state(fuzz: Fuzz) -> None:
    hostile, refused, said = Hostile(fuzz.rng), 0, 0
    for number in fuzz.share(0.25):
        hostile.attack()
        if fuzz.rng.random() < 0.5:
            hostile.live()
        if number % 500 == 499:
            assert_bounded(hostile.state, items_max=ITEMS_MAX, total_max=BYTES_MAX)
        if hostile.stopped or number % WORKER_MESSAGES == WORKER_MESSAGES - 1:
            refused, said = refused + hostile.refused, said + hostile.said
            hostile = Hostile(fuzz.rng)
    assert min(refused, said) > len(fuzz.share(0.25)) // 50

"""Which prompts trusted workers read in place of the learner."""

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Epoch, PeerId, RequestId, SessionId, Version
from echo2d.core.cluster.events import PeerConnected, PublishAsked, Send
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import key_of
from echo2d.core.protocol.control_messages import PromptRead, ReadPrompt
from echo2d.core.tinker import held_snapshots
from echo2d.core.tinker.events import (
    CancelSample,
    ClientAsked,
    ClientCall,
    DrawSample,
    EndSession,
    OpenSampler,
    OpenSession,
    OperationAsked,
    OperationEnded,
    SampleAsked,
    SampleEnded,
    SampleOrder,
    SamplerName,
    SessionName,
    TinkerEvent,
)
from echo2d.core.tinker.figures import Prices
from echo2d.core.tinker.futures import Failed, FutureId
from echo2d.core.tinker.operations import ModelId
from echo2d.core.tinker.prompt_orders import READ_S_MAX, READER_REST_S
from echo2d.core.tinker.samplers import READ_BYTES_MAX
from echo2d.errors import PeerFault
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, messages
from tests.support.gateway import gateway_world, held_world
from tests.support.hello import HELLO
from tests.support.tinker_world import (
    BASE,
    ORDER,
    TinkerWorld,
    drawn,
    result_of,
    sampled,
    sampler_of,
)

PROMPT = replace(ORDER, scored=b"asked", scores_bytes=10)


class ReadersWorld(TinkerWorld):
    """Two clients sample the base model. The learner is busy unless a test lets it take an order."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = 0
        self.orders: list[tuple[PeerId, ReadPrompt]] = []
        for caller in ("ann", "bob"):
            session = SessionName(caller)
            self.body(caller, OpenSession(session))
            self.body(caller, OpenSampler(SamplerName(f"{caller}:0"), session, BASE, None))
        self.learn()

    def handle(self, *events: TinkerEvent) -> None:
        super().handle(*events)
        self.turn()

    def turn(self) -> None:
        """What the coordinator does after each event."""
        self.take(self.service.read_prompts(now=self.now))

    def take(self, actions: list[Any]) -> None:
        for each in actions:
            if isinstance(each, Send):
                assert isinstance(each.message, ReadPrompt)
                peer = self.members.of_session(each.session)
                assert peer is not None
                self.orders.append((peer.peer, each.message))
        super().take([each for each in actions if not isinstance(each, Send)])

    def join(self, name: str, *, trusted: bool = True, **hello: Any) -> Peer:
        """A worker, which holds what is published."""
        self.sessions += 1
        said = replace(HELLO, **{"scores": True, **hello})
        event = PeerConnected(SessionId(self.sessions), PeerId(name), said, trusted)
        joined, _ = self.members.connected(event, now=self.now)
        assert joined is not None
        self.service.prompts.joined(joined.peer)
        self.load(joined.peer)
        return joined.peer

    def load(self, peer: Peer) -> None:
        copies = self.versions.copies()
        if copies:
            peer.engine.serves(key_of(copies[0]), [*map(key_of, copies)])
        self.turn()

    def prompt(self, number: int, caller: str = "ann", order: SampleOrder = PROMPT) -> FutureId:
        if order.scored:
            order = replace(order, scored=order.scored + bytes([number]))
        call = SampleAsked(SamplerName(f"{caller}:0"), number, digest_of(b"%d" % number), 2, order)
        return FutureId(self.body(caller, call)["request_id"])

    def step(self) -> str | None:
        """The learner does what is next. Returns what that was."""
        order = self.next_order()
        if order is None:
            return None
        if order["kind"] == "publish":
            version = order["arguments"]["version"]
            digest, path = digest_of(b"%d" % version), f"versions/{version}"
            self.versions.publish(
                PublishAsked(RequestId(0), Epoch(1), Version(version), digest, path, 10)
            )
        self.end(order, result_of(order))
        return str(order["kind"])

    def read(self, peer: Peer, *, fault: str = "", order: ReadPrompt | None = None) -> None:
        """The worker answers its newest order, or this one."""
        asked = order or [each for name, each in self.orders if name == peer.peer][-1]
        said = PromptRead(asked.order, b"scores", fault)
        self.take(self.service.prompt_read(peer, said, now=self.now))
        self.turn()

    def unscored(self) -> list[int]:
        found = self.service.status(Prices(0.0, 0.0), now=self.now)
        return [each.unscored for each in found.sessions]


def held() -> tuple[ReadersWorld, Peer]:
    """A worker that holds the base model."""
    world = ReadersWorld()
    worker = world.join("a")
    future = world.prompt(0, order=ORDER)
    assert world.step() == "publish"
    world.load(worker)
    assert drawn(world) == [(future, 1)]
    world.handle(SampleEnded(future, b"tokens "))
    return world, worker


def test_a_trusted_worker_reads_a_prompt_while_the_learner_is_busy() -> None:
    world, worker = held()
    future = world.prompt(1)
    ((name, order),) = world.orders
    assert (name, order.version, order.call) == ("a", 1, b"asked\1")
    assert world.unscored() == [1, 0]
    assert world.step() is None, "the learner has nothing to do"
    world.read(worker)
    assert world.unscored() == [0, 0]
    assert drawn(world) == [(future, 1)]
    world.handle(SampleEnded(future, b"tokens "))
    assert world.result("ann", future) == b"tokens scores"


def test_a_worker_reads_one_prompt_at_a_time_and_callers_take_turns() -> None:
    world, worker = held()
    for number in (1, 2):
        world.prompt(number)
    world.prompt(3, "bob")
    for _ in range(2):
        world.read(worker)
    calls = [order.call for _, order in world.orders]
    assert calls == [b"asked\1", b"asked\3", b"asked\2"]
    other = world.join("b")
    world.prompt(4)
    assert world.orders[-1][0] == other.peer


def test_an_idle_learner_reads_prompts_as_well() -> None:
    world, _ = held()
    for number in (1, 2):
        world.prompt(number)
    order = world.next_order()
    assert order is not None
    assert (order["kind"], order["body"]) == ("score", b"asked\2")


def no_prompts() -> dict[str, dict[str, Any]]:
    return {
        "untrusted": {"trusted": False},
        "quantized": {"quantization": "int8"},
        "server": {"scores": False},
        "relay": {"kind": "relay"},
    }


@pytest.mark.parametrize("name", no_prompts())
def test_only_trusted_workers_that_can_score_in_full_precision_read_prompts(name: str) -> None:
    world = ReadersWorld()
    world.members._quantized = True
    worker = world.join("a", **no_prompts()[name])
    world.prompt(0, order=ORDER)
    world.step()
    world.load(worker)
    world.prompt(1)
    assert world.orders == []
    assert world.step() == "score"
    with pytest.raises(PeerFault, match="only trusted workers read prompts"):
        world.service.prompt_read(worker, PromptRead(1, b""), now=world.now)


def test_a_worker_that_is_taken_away_or_out_of_service_gets_no_prompt() -> None:
    world, worker = held()
    worker.service.cordoned = True
    world.prompt(1)
    assert world.orders == []
    worker.service.cordoned = False
    world.turn()
    assert len(world.orders) == 1


def fails(world: ReadersWorld, worker: Peer) -> None:
    world.read(worker, fault="no memory")


def is_late(world: ReadersWorld, worker: Peer) -> None:
    wakes_at = world.service.wake_at()
    assert wakes_at == world.now + READ_S_MAX
    world.now = wakes_at
    world.turn()


def is_cut(world: ReadersWorld, worker: Peer) -> None:
    assert worker.session is not None
    world.members.disconnected(worker.session)
    world.turn()


def is_suspected(world: ReadersWorld, worker: Peer) -> None:
    world.now += 60.0
    world.members.deadlines(now=world.now)
    world.turn()


def starts_again(world: ReadersWorld, worker: Peer) -> None:
    world.join("a")


@pytest.mark.parametrize("failure", [fails, is_late, is_cut, is_suspected, starts_again])
def test_the_learner_reads_what_a_worker_could_not(failure: Any) -> None:
    world, worker = held()
    future = world.prompt(1)
    given = world.orders[-1][1]
    failure(world, worker)
    assert len(world.orders) == 1
    assert world.step() == "score"
    world.read(worker, order=given)
    assert drawn(world) == [(future, 1)], "an answer that comes too late changes nothing"


def test_an_idle_learner_is_told_at_once_what_a_worker_could_not_read() -> None:
    world, worker = held()
    world.prompt(1)
    request = RequestId(10_000)
    world.handle(OperationAsked(request, Epoch(1)))
    assert request not in world.answers
    is_cut(world, worker)
    assert world.answers[request].status == 200


def test_a_worker_that_failed_rests_and_a_silent_one_is_asked_again_when_it_answers() -> None:
    world, worker = held()
    for number in (1, 2, 3):
        world.prompt(number)
    fails(world, worker)
    assert len(world.orders) == 1
    assert world.service.wake_at() == world.now + READER_REST_S
    world.now += READER_REST_S
    world.turn()
    assert len(world.orders) == 2
    is_late(world, worker)
    world.now += 2 * READ_S_MAX
    world.turn()
    assert len(world.orders) == 2
    world.read(worker)
    assert len(world.orders) == 3


def test_the_answer_to_another_order_changes_nothing() -> None:
    world, worker = held()
    world.prompt(1)
    order = world.orders[-1][1]
    world.read(worker, order=replace(order, order=order.order + 1))
    assert world.unscored() == [1, 0]
    world.read(worker)
    assert world.unscored() == [0, 0]


def test_a_client_may_need_a_prompt_no_longer_that_a_worker_reads() -> None:
    world, worker = held()
    futures = [world.prompt(number) for number in (1, 2)]
    world.asked("ann", CancelSample(futures[0]))
    assert world.result("ann", futures[0])["error"] == "it was cancelled"
    world.read(worker)
    assert drawn(world) == []
    world.asked("ann", EndSession(SessionName("ann")))
    world.read(worker)
    assert (drawn(world), world.step()) == ([], "keep")


def test_a_prompt_has_its_weights_published_if_a_worker_could_read_it() -> None:
    world = ReadersWorld()
    future = world.prompt(1)
    worker = world.join("a")
    assert world.step() == "publish"
    world.load(worker)
    assert [each for each, _ in world.orders] == ["a"]
    world.read(worker)
    assert drawn(world) == [(future, 1)]


def test_a_prompt_that_no_worker_could_read_needs_no_weights_yet() -> None:
    world = ReadersWorld()
    world.join("a", trusted=False)
    world.prompt(1)
    assert [world.step(), world.step()] == ["score", "publish"]


def test_weights_that_cannot_be_published_fail_the_prompts_that_wait_for_them() -> None:
    world = ReadersWorld()
    future = world.prompt(1)
    world.join("a")
    order = world.next_order()
    assert order is not None
    world.end(order, Failed("the disk is full", "server"))
    assert "the disk is full" in world.result("ann", future)["error"]
    assert world.step() is None


def test_the_weights_of_a_prompt_that_is_being_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_snapshots, "HELD_MAX", 1)
    world, worker = held()
    world.prompt(1)
    model = world.session(name="s3")
    other = sampler_of(world, model, 1, "s3:sample:0")
    sampled(world, other, 1)
    assert world.step() is None
    world.read(worker)
    ((future, _),) = drawn(world)
    world.handle(SampleEnded(FutureId(future), b"tokens "))
    assert world.step() == "publish"


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"scores_bytes": READ_BYTES_MAX}, True),
        ({"scores_bytes": READ_BYTES_MAX + 1}, False),
        ({"scored": bytes(READ_BYTES_MAX)}, False),
    ],
)
def test_a_question_or_answer_that_fits_in_no_message_is_for_the_learner(
    change: dict[str, Any], fits: bool
) -> None:
    world, _ = held()
    world.prompt(1, order=replace(PROMPT, **change))
    assert len(world.orders) == fits
    assert world.step() == (None if fits else "score")


def learner_does(world: World, kind: str) -> None:
    """The learner is given an order of this kind, and does it."""
    epoch = world.ledger.epoch
    body = world.call(lambda number: OperationAsked(number, epoch)).body
    assert isinstance(body, bytes)
    order = msgpack.unpackb(body)
    assert order["kind"] == kind
    if kind == "publish":
        world.publish(order["arguments"]["version"])
    model, number = ModelId(order["model"]), order["number"]
    world.call(lambda request: OperationEnded(request, epoch, 0.0, model, number, {}))


def test_the_coordinator_gives_a_prompt_to_a_worker_once_it_holds_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The bytes of other runs are batches.
    monkeypatch.setattr(World, "_check_batch", lambda *_: None)
    world, (stranger,) = held_world(2)
    world.peers["box"] = FakePeer("box", "worker", 2, SessionId(0), trusted=True, scores=True)
    box, session, sampler = world.connect("box"), SessionName("s"), SamplerName("s:0")
    calls: list[ClientCall] = [
        OpenSession(session),
        OpenSampler(sampler, session, "model", None),
        SampleAsked(sampler, 1, digest_of(b""), 2, PROMPT),
    ]
    for call in calls:
        world.call(lambda number: ClientAsked(number, "ann", 0.0, call))  # noqa: B023 - called here
    learner_does(world, "keep")
    learner_does(world, "publish")
    world.drain()
    assert messages(box, ReadPrompt) == []
    world.refit(stranger)
    world.refit(box)
    (order,) = messages(box, ReadPrompt)
    assert (order.version, order.call) == (1, b"asked")
    assert messages(stranger, ReadPrompt) == []
    draws = world.say(box, PromptRead(order.order, b"scores"))
    assert [each.version for each in draws if isinstance(each, DrawSample)] == [1]
    world.say(stranger, PromptRead(order.order, b"scores"))
    assert stranger.closed, "it is not trusted"


def test_a_run_without_clients_has_no_prompts() -> None:
    world, (worker,) = gateway_world(2)
    world.say(worker, PromptRead(1, b""))
    assert worker.closed

"""The training service of the Tinker API with clients and a learner, without HTTP and models."""

from itertools import count
from typing import Any

import msgpack

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import Epoch, PublishSeq, RequestId
from echo2d.core.cluster.events import Persist, Reply
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.tinker.events import (
    AwaitResult,
    CheckpointSaved,
    ClientAsked,
    ClientCall,
    DrawSample,
    GiveOperation,
    KeptClients,
    ModelMade,
    OpenSession,
    OperationAsked,
    OperationEnded,
    OperationLost,
    OperationTaken,
    SampleAsked,
    SampleOrder,
    SamplerName,
    SessionName,
    StepSaved,
    StopSample,
    Submit,
    TinkerEvent,
)
from echo2d.core.tinker.futures import Failed, FutureId, Outcome
from echo2d.core.tinker.operations import ModelId, Operation, OperationKind
from echo2d.core.tinker.service import TinkerService
from tests.support.tinker_samplers import ObedientWorkers

BASE = "org/base"
WALL = 1_700_000_000.0
GONE = 0  # a request that was never answered


class TinkerWorld:
    """A service, its clients, and a learner that runs what it is given."""

    def __init__(self, *kept: ModelMade | CheckpointSaved) -> None:
        models = [each for each in kept if isinstance(each, ModelMade)]
        saved = [each for each in kept if isinstance(each, CheckpointSaved)]
        clients = KeptClients(models=tuple(models), checkpoints=tuple(saved))
        self.now = 0.0
        self.versions = PublishedVersions((), PublishSeq(0))
        self.members, self.workers = Membership("r", 1.0), ObedientWorkers()
        self.service = TinkerService(
            [BASE], self.members, self.versions, clients, self.workers, now=self.now
        )
        self.requests = count(1)
        self.answers: dict[int, Reply] = {}
        self.records: list[Any] = []
        self.bodies: dict[tuple[str, int], bytes] = {}
        # Orders whose bodies have left the ledger.
        self.lost: list[OperationLost] = []
        # What workers were asked to draw, or to draw no longer.
        self.draws: list[DrawSample | StopSample] = []
        # What the learner has run: (model, number, kind).
        self.ran: list[tuple[str, int, str]] = []
        self.fails: set[tuple[str, int]] = set()

    def take(self, actions: list[Any]) -> None:
        """What a turn of the coordinator's loop does: first all records become durable."""
        self.persist([action.record for action in actions if isinstance(action, Persist)])
        for action in actions:
            if isinstance(action, Reply | GiveOperation):
                assert action.request not in self.answers, "answered twice"
                self.answers[action.request] = self.told(action)
            elif not isinstance(action, Persist):
                self.draws.append(action)
        self.service.check()

    def persist(self, records: list[Any]) -> None:
        self.records += records
        for each in records:
            if isinstance(each, OperationTaken):
                self.bodies[each.operation.model, each.operation.number] = each.operation.body

    def told(self, action: Reply | GiveOperation) -> Reply:
        if isinstance(action, Reply):
            return action
        body = self.body_of(action.model, action.number)
        if body is None:
            self.lost.append(OperationLost(action.model, action.number))
            return Reply(action.request, 204, {})
        return Reply(action.request, 200, pack({**action.order, "body": body}))

    def body_of(self, model: ModelId, number: int) -> bytes | None:
        return self.bodies[model, number]

    def handle(self, *events: TinkerEvent) -> None:
        """One turn."""
        self.take([each for event in events for each in self.service.handle(event, now=self.now)])
        while self.lost:
            self.take(self.service.handle(self.lost.pop(), now=self.now))

    def ask(self, caller: str, call: ClientCall) -> int:
        request = next(self.requests)
        self.handle(ClientAsked(RequestId(request), caller, WALL + self.now, call))
        return request

    def asked(self, caller: str, call: ClientCall) -> Reply:
        return self.answers[self.ask(caller, call)]

    def body(self, caller: str, call: ClientCall) -> dict[str, Any]:
        found = self.asked(caller, call)
        assert found.status == 200, found
        assert isinstance(found.body, dict)
        return found.body

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.service.advance(now=self.now))

    # --- a client

    def session(self, caller: str = "ann", name: str = "s1") -> ModelId:
        """Open a session with one model, and return the model."""
        self.body(caller, OpenSession(SessionName(name)))
        model = ModelId(f"{name}:train:0")
        self.create(caller, model)
        self.learn()
        return model

    def create(self, caller: str, model: ModelId, base: str = BASE, rank: int = 8) -> FutureId:
        layers = ["train_attn", "train_mlp"]
        said = {"base": base, "rank": rank, "seed": 1, "layers": layers, "metadata": '{"of": 1}'}
        return self.submit(caller, model, 0, "create", said)

    def submit(
        self,
        caller: str,
        model: ModelId,
        number: int,
        kind: OperationKind = "forward_backward",
        said: dict[str, Any] | None = None,
        fault: str | None = None,
        body: bytes = b"",
    ) -> FutureId:
        digest = digest_of(f"{kind}{said}".encode() + body)
        adds = kind == "forward_backward"
        operation = Operation(model, number, kind, digest, said or {}, body, fault=fault, adds=adds)
        return FutureId(self.body(caller, Submit(operation))["request_id"])

    def save(
        self,
        caller: str,
        model: ModelId,
        number: int,
        name: str,
        kind: str = "weights",
        **more: Any,
    ) -> str:
        path = f"tinker://{model}/{kind}/{name}"
        said = {
            "type": "save_weights",
            "path": path,
            "overwrite": False,
            "ttl_s": None,
            "sampler": None,
        }
        future = self.submit(caller, model, number, "save", {**said, "metadata": "{}", **more})
        self.learn()
        assert self.result(caller, future) == {"type": "save_weights", "path": path}
        return path

    def result(self, caller: str, future: FutureId) -> Any:
        return self.asked(caller, AwaitResult(future)).body

    # --- the learner

    def next_order(self, *saved: StepSaved) -> dict[str, Any] | None:
        request = next(self.requests)
        self.handle(OperationAsked(RequestId(request), Epoch(1), saved))
        if request not in self.answers:
            self.service.request_gone(RequestId(request))
            return None
        found = self.answers[request]
        if found.status == 204:
            return None
        assert isinstance(found.body, bytes)
        order: dict[str, Any] = msgpack.unpackb(found.body)
        return order

    def end(self, order: dict[str, Any], result: Outcome) -> None:
        request = next(self.requests)
        model, number = ModelId(order["model"]), order["number"]
        asked = OperationEnded(RequestId(request), Epoch(1), WALL + self.now, model, number, result)
        self.handle(asked)
        assert self.answers[request].status == 200

    def folders(self) -> list[str]:
        """Of the checkpoints that were saved."""
        return [each.folder for each in self.records if isinstance(each, CheckpointSaved)]

    def compute(self, order: dict[str, Any]) -> Outcome:
        return result_of(order)

    def learn(self) -> list[dict[str, Any]]:
        """Run all that waits, and return the orders."""
        orders = []
        while (order := self.next_order()) is not None:
            orders.append(order)
            self.ran.append((order["model"], order["number"], order["kind"]))
            failed = (order["model"], order["number"]) in self.fails
            self.end(order, Failed("bad data") if failed else self.compute(order))
        return orders


def result_of(order: dict[str, Any]) -> Outcome:
    match order["kind"]:
        case "forward_backward":
            return b"result of " + bytes(order["body"])
        case "optim_step":
            return {"metrics": {"norm": 1.0}}
        case "save":
            return {"bytes": 100, "steps": 3}
        case "score":
            return b"scores"
        case "score_sample":
            return bytes(order["body"]) + b"with top tokens "
    return {}


ORDER = SampleOrder(b"\x01\0\0\0", 2, 8, WHOLE, (), (), None)


def sampler_of(
    world: TinkerWorld,
    model: ModelId,
    number: int,
    name: str = "s1:sample:0",
    *,
    follows: bool = False,
) -> SamplerName:
    """A sampler of the model's present weights."""
    path = f"tinker://{model}/sampler_weights/{number}"
    said = {"type": "save_weights_for_sampler", "path": path, "overwrite": False, "ttl_s": None}
    more = {"metadata": "{}", "sampler": name, "follows": follows}
    future = world.submit("ann", model, number, "save", {**said, **more})
    world.learn()
    told = world.result("ann", future)
    assert told == {"type": "save_weights_for_sampler", "sampling_session_id": name}
    return SamplerName(name)


def sampled(
    world: TinkerWorld,
    sampler: SamplerName,
    number: int,
    order: SampleOrder = ORDER,
    said: bytes = b"",
) -> FutureId:
    call = SampleAsked(sampler, number, digest_of(said), order.count, order)
    body = world.body("ann", call)
    assert len(body["sample_sequence_ids"]) == order.count
    return FutureId(body["request_id"])


def drawn(world: TinkerWorld) -> list[tuple[str, int]]:
    """What workers were asked to draw since the last look: the futures, and the versions."""
    found = [(each.future, each.version) for each in world.draws if isinstance(each, DrawSample)]
    world.draws.clear()
    return [(str(future), int(version)) for future, version in found]

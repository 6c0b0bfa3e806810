"""A coordinator in memory that serves clients of the Tinker API, and a learner that runs what it is told to."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import RequestId
from echo2d.core.cluster.events import Reply
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.rules.prices import NamedPrice, Price
from echo2d.core.rules.run import ActivationTable
from echo2d.core.status.schema import SessionStatus, TinkerStatus
from echo2d.core.tinker.events import (
    AwaitResult,
    ClientAsked,
    ClientCall,
    DrawSample,
    GiveOperation,
    OpenSampler,
    OpenSession,
    OperationAsked,
    OperationEnded,
    SampleAsked,
    SampleEnded,
    SampleOrder,
    SamplerName,
    SessionName,
    Submit,
)
from echo2d.core.tinker.futures import Failed, FutureId, Outcome
from echo2d.core.tinker.held_snapshots import HELD_MAX
from echo2d.core.tinker.operations import ModelId, Operation, OperationKind
from tests.support.coordinator_world import RULES, World

BASE = "org/base"
LEARNER_USD_PER_H = 8.0
PRICED = replace(
    RULES,
    tasks=(),
    tinker=(BASE,),
    versions_held=HELD_MAX,
    prices=(NamedPrice("*", Price(usd_per_h=2.0)),),
    activation=ActivationTable(learner_usd_per_h=LEARNER_USD_PER_H),
)
FREE_RUN = replace(RULES, tasks=(), tinker=(BASE,), versions_held=HELD_MAX)


class ClientWorld(World):
    """drawn: what workers were asked to draw. given: orders whose body is in the ledger. tokens, seconds: what the
    learner says of a step. fails: kinds of operations that fail.
    """

    def __init__(self, *, priced: bool = True) -> None:
        self.drawn: list[DrawSample] = []
        self.given: dict[RequestId, dict[str, Any]] = {}
        self.tokens, self.seconds = 100, 3.0
        self.fails: set[str] = set()
        super().__init__(PRICED if priced else FREE_RUN)
        self.connect("seed", kind="seed")
        self.connect("gpu-1")
        self.open_session()

    def _perform(self, action: CoordinatorAction) -> None:
        if isinstance(action, DrawSample):
            self.drawn.append(action)
        elif isinstance(action, GiveOperation):
            self.given[action.request] = dict(action.order)
        super()._perform(action)

    def _check_batch(self, reply: Reply) -> None:
        """The learner's orders are no batches."""

    # --- clients

    def client(self, caller: str, session: str) -> None:
        self.told(caller, OpenSession(SessionName(session)))

    def told(self, caller: str, call: ClientCall) -> Any:
        reply = self.call(lambda number: ClientAsked(number, caller, 1e9 + self.now, call))
        assert reply.status == 200, reply
        return reply.body

    def submit(
        self,
        caller: str,
        model: str,
        number: int,
        kind: OperationKind,
        said: dict[str, Any] | None = None,
    ) -> None:
        body = b"four" if kind == "forward_backward" else b""
        digest = digest_of(f"{kind} {said}".encode())
        operation = Operation(
            ModelId(model), number, kind, digest, said or {}, body, len(body), None, bool(body)
        )
        self.told(caller, Submit(operation))

    def model(self, caller: str, session: str, number: int = 0) -> str:
        """Make a model of rank 8."""
        model = f"{session}:train:{number}"
        layers = ["train_attn", "train_mlp"]
        said = {"base": BASE, "rank": 8, "seed": 1, "layers": layers, "metadata": "{}"}
        self.submit(caller, model, 0, "create", said)
        self.learn()
        return model

    def save(self, caller: str, model: str, number: int) -> None:
        said = {
            "type": "save_weights", "path": f"tinker://{model}/weights/{number}", "overwrite": False, "ttl_s": None,
            "metadata": "{}", "sampler": None,
        }  # fmt: skip
        self.submit(caller, model, number, "save", said)

    def sampler(self, caller: str, session: str, path: str | None = None) -> SamplerName:
        """A sampler of the base model, or of a checkpoint."""
        name = SamplerName(f"{session}:sample:{0 if path is None else 1}")
        base = BASE if path is None else None
        self.told(caller, OpenSampler(name, SessionName(session), base, path))
        return name

    def sample(
        self, caller: str, sampler: SamplerName, number: int, *, scored: bool = False
    ) -> None:
        """Ask for two sequences."""
        prompt = b"\1\0\0\0"
        order = SampleOrder(prompt, 2, 4, WHOLE, (), (), None, prompt if scored else b"")
        digest = digest_of(str(number).encode())
        self.told(caller, SampleAsked(sampler, number, digest, 2, order))

    def draw(self, tokens: int) -> None:
        """Workers end all that is drawn, each with this many tokens."""
        drawn, self.drawn = self.drawn, []
        for each in drawn:
            self.handle(SampleEnded(each.future, b"drawn", tokens=tokens))

    def result(self, caller: str, future: str) -> Any:
        return self.told(caller, AwaitResult(FutureId(future)))

    # --- the learner

    def orders(self) -> Iterator[dict[str, Any]]:
        """The learner's orders; each comes again until it has ended."""
        while True:
            asked = self.ask(lambda number: OperationAsked(number, self.ledger.epoch))
            if (given := self.given.get(asked)) is not None:
                yield given
            elif asked in self.replies:
                found = self.replies[asked]
                assert isinstance(found.body, bytes)
                yield msgpack.unpackb(found.body)
            else:
                return

    def learn(self) -> None:
        """Run all that waits for the learner."""
        for order in self.orders():
            model, number = ModelId(order["model"]), order["number"]
            result = self._result(order)
            if order["kind"] == "publish":
                self.publish(order["arguments"]["version"])
                self.drain()
                self.refit(self.peers["gpu-1"])
            self._end(model, number, result)

    def _end(self, model: ModelId, number: int, result: Outcome) -> None:
        epoch, wall_s = self.ledger.epoch, 1e9 + self.now
        self.call(lambda request: OperationEnded(request, epoch, wall_s, model, number, result))

    def _result(self, order: dict[str, Any]) -> Outcome:
        kind = order["kind"]
        if kind in self.fails:
            return Failed("bad data")
        if kind == "optim_step":
            told = {"metrics": {"grad_norm": 1.0}}
            return {**told, "tokens": self.tokens, "seconds": self.seconds}
        if kind in ("forward_backward", "score"):
            return b"logprobs"
        return {"bytes": 7}

    # --- the status

    def clients(self) -> TinkerStatus:
        found = self.state.status(now=self.now).tinker
        assert found is not None
        return found

    def of(self, session: str) -> SessionStatus:
        (found,) = [each for each in self.clients().sessions if each.session == session]
        return found


def serving() -> ClientWorld:
    """Two clients: ann trains two models, and bob samples and waits."""
    world = ClientWorld()
    world.client("ann", "s1")
    world.client("bob", "s2")
    for number in range(2):
        model = world.model("ann", "s1", number)
        world.submit("ann", model, 1, "forward_backward")
        world.submit("ann", model, 2, "optim_step")
    world.save("ann", model, 3)
    world.learn()
    own = world.sampler("bob", "s2")
    world.sample("bob", own, 0)
    world.learn()
    world.draw(tokens=6)
    for number in range(1, 4):
        world.sample("bob", own, number, scored=number == 3)
    world.submit("ann", model, 4, "forward_backward")
    world.now += 60.0
    return world

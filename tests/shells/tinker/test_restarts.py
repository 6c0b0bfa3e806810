"""Coordinator and learner may be killed at any time: no call is lost, and none is applied twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from echo2d.core.base.ids import Epoch, PublishSeq, RequestId
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.tinker import learner_work
from echo2d.core.tinker.events import (
    AwaitResult,
    ClientAsked,
    EndSession,
    KeepSession,
    OpenSampler,
    OperationAsked,
    OperationTaken,
    SamplerName,
    SessionName,
    ShowModel,
    ShowSampler,
    StepSaved,
)
from echo2d.core.tinker.futures import RESULT_KEPT_S, Failed, FutureId, Outcome
from echo2d.core.tinker.operations import ModelId, OperationKind
from echo2d.core.tinker.service import TinkerService
from echo2d.store.ledger import Ledger
from tests.support.tinker_world import BASE, WALL, TinkerWorld

# What a model has learnt: the gradients of each step, as their bodies.
Learnt = tuple[tuple[bytes, ...], ...]


class KilledWorld(TinkerWorld):
    """A world whose ledger is real, with a learner that has memory and a disk."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        # The weights of each model, and the gradient since its last step.
        self.memory: dict[str, tuple[Learnt, tuple[bytes, ...]]] = {}
        self.disk: dict[str, Learnt] = {}
        # States that are on the disk, and were not told yet.
        self.saved: list[StepSaved] = []

    def persist(self, records: list[Any]) -> None:
        super().persist(records)
        self.ledger.append(records)

    def kill_coordinator(self) -> None:
        """Another coordinator begins from the ledger. Calls that wait are never answered."""
        kept = self.ledger.recover().clients
        self.versions = PublishedVersions((), PublishSeq(0))
        self.service = TinkerService(
            [BASE], Membership("r", 1.0), self.versions, kept, self.workers, now=self.now
        )
        self.service.check()

    def kill_learner(self) -> None:
        self.memory.clear()
        self.saved.clear()
        self.take(self.service.learner_began(now=self.now))

    def body_of(self, model: ModelId, number: int) -> bytes | None:
        return self.ledger.operation_body(model, number)

    def compute(self, order: dict[str, Any]) -> Outcome:
        model, said, folder = order["model"], order["arguments"], order["arguments"].get("folder")
        match order["kind"]:
            case "create":
                self.memory[model] = (), ()
            case "load":
                if folder not in self.disk:
                    return Failed("there is no such checkpoint")
                self.memory[model] = self.disk[folder], ()
            case "forward_backward":
                learnt, gradient = self.memory[model]
                if order["body"].startswith(b"bad"):
                    # A part of it may have been added.
                    self.memory[model] = learnt, (*gradient, b"half")
                    return Failed("bad data")
                self.memory[model] = learnt, (*gradient, order["body"])
                return b"result of " + bytes(order["body"])
            case "optim_step":
                learnt, gradient = self.memory[model]
                self.memory[model] = (*learnt, gradient), ()
                self.disk[folder] = self.memory[model][0]
                self.saved.append(StepSaved(ModelId(model), order["number"]))
                return {"metrics": {"steps": len(learnt) + 1.0}}
            case "discard":
                self.memory[model] = self.memory[model][0], ()
            case "save":
                self.disk[folder] = self.memory[model][0]
                return {"bytes": 100, "steps": len(self.memory[model][0])}
            case "keep":
                self.memory = {
                    name: self.memory[name] for name in self.memory if name in said["models"]
                }
                self.disk = {name: self.disk[name] for name in self.disk if name in said["folders"]}
        return {}


@contextmanager
def killed_world() -> Iterator[KilledWorld]:
    with Ledger.in_memory() as ledger:
        yield KilledWorld(ledger)


def work(world: KilledWorld, rng: Random, kills: float) -> None:
    """The learner works until nothing is left, killed and interrupted with this probability at each turn."""
    while True:
        told = [*world.saved] if rng.random() < 0.5 else []
        if (order := world.next_order(*told)) is None:
            return
        if told:
            del world.saved[: len(told)]
        before = rng.random() < kills
        if before:
            rng.choice((world.kill_learner, world.kill_coordinator))()
            continue
        result = world.compute(order)
        if rng.random() < kills:
            # It is done, but the coordinator never hears of it, or has just heard.
            if rng.random() < 0.5:
                world.end(order, result)
            rng.choice((world.kill_learner, world.kill_coordinator))()
            continue
        world.end(order, result)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_killed_each_call_is_applied_once(seed: int) -> None:
    rng = Random(seed)
    with killed_world() as world:
        models = [world.session("ann", "s1"), world.session("bob", "s2")]
        expected: dict[str, list[tuple[bytes, ...]]] = {model: [] for model in models}
        gradients: dict[str, list[bytes]] = {model: [] for model in models}
        futures: dict[FutureId, tuple[str, Any]] = {}
        numbers = dict.fromkeys(models, 0)
        for turn in range(60):
            place = rng.randrange(2)
            model, caller = models[place], ("ann", "bob")[place]
            numbers[model] += 1
            kind: OperationKind = rng.choice(("forward_backward", "forward_backward", "optim_step"))
            body = b""
            want: Any = None
            if kind == "forward_backward":
                body = rng.choice((b"bad", b"good", b"good")) + b"%d" % turn
                gradients[model].append(body)
                want = b"result of " + body
                if body.startswith(b"bad"):
                    want = {"error": "bad data", "category": "user"}
            elif any(each.startswith(b"bad") for each in gradients[model]):
                gradients[model].clear()
            else:
                expected[model].append(tuple(gradients[model]))
                gradients[model].clear()
                want = {"type": "optim_step", "metrics": {"steps": float(len(expected[model]))}}
            future = world.submit(caller, model, numbers[model], kind, body=body)
            if rng.random() < 0.2:
                # The client did not see the answer.
                world.kill_coordinator()
                assert world.submit(caller, model, numbers[model], kind, body=body) == future
            futures[future] = caller, want
            if rng.random() < 0.5:
                work(world, rng, kills=0.2)
            if rng.random() < 0.2:
                world.pass_time(rng.choice((1.0, 100.0)))
                for each in ("s1", "s2"):
                    world.body("ann" if each == "s1" else "bob", KeepSession(SessionName(each)))
        work(world, rng, kills=0.2)
        work(world, rng, kills=0.0)
        for model, caller in zip(models, ("ann", "bob"), strict=True):
            # An operation that makes the model be there.
            world.submit(caller, model, numbers[model] + 1, body=b"good")
            work(world, rng, kills=0.0)
            assert world.memory[model][0] == tuple(expected[model]), seed
        for future, (caller, want) in futures.items():
            found = world.asked(caller, AwaitResult(future)).body
            if want is None:
                assert isinstance(found, dict)
                assert "a part of its gradient failed" in found["error"]
            else:
                assert found == want


def test_sessions_and_samplers_are_there_after_a_restart_and_end_for_good() -> None:
    with killed_world() as world:
        model = world.session("ann", "s1")
        opened = OpenSampler(SamplerName("s1:sample:9"), SessionName("s1"), BASE, None)
        world.body("ann", opened)
        world.kill_coordinator()
        assert world.body("ann", ShowSampler(opened.sampler))["base_model"] == BASE
        assert world.body("ann", ShowModel(model))["lora_rank"] == 8
        world.body("ann", EndSession(SessionName("s1")))
        world.kill_coordinator()
        assert world.asked("ann", ShowSampler(opened.sampler)).status == 404
        assert world.asked("ann", KeepSession(SessionName("s1"))).status == 410


def test_bodies_of_saved_steps_are_not_in_the_ledger_any_more() -> None:
    with killed_world() as world:
        model = world.session("ann", "s1")
        kinds: list[OperationKind] = ["forward_backward", "optim_step", "forward_backward"]
        for number, kind in enumerate(kinds, 1):
            world.submit("ann", model, number, kind, body=b"%d" % number)
        work(world, Random(0), kills=0.0)
        world.next_order(*world.saved)
        assert world.ledger.operation_body(model, 1) in (None, b"")
        assert world.ledger.operation_body(model, 3) == b"3"
        assert any(isinstance(each, OperationTaken) for each in world.records)


def test_a_session_that_ends_while_the_learner_gets_its_operation_holds_up_nobody() -> None:
    with killed_world() as world:
        model, other = world.session("ann", "s1"), world.session("bob", "s2")
        world.submit("ann", model, 1, body=b"x")
        asked, ends = RequestId(next(world.requests)), RequestId(next(world.requests))
        end = ClientAsked(ends, "ann", WALL, EndSession(SessionName("s1")))
        world.handle(OperationAsked(asked, Epoch(1)), end)
        assert world.answers[asked].status == 204, "its body has gone"
        future = world.submit("bob", other, 1, body=b"y")
        work(world, Random(0), kills=0.0)
        assert world.result("bob", future) == b"result of y"


def test_a_session_that_ends_while_its_model_is_made_again_holds_up_nobody() -> None:
    with killed_world() as world:
        model, other = world.session("ann", "s1"), world.session("bob", "s2")
        world.submit("ann", model, 1, body=b"x")
        work(world, Random(0), kills=0.0)
        world.kill_learner()
        world.submit("ann", model, 2, body=b"y")
        order = world.next_order()
        while order is not None and order["kind"] != "create":
            world.end(order, world.compute(order))
            order = world.next_order()
        assert order is not None
        world.end(order, world.compute(order))
        world.body("ann", EndSession(SessionName("s1")))
        future = world.submit("bob", other, 1, body=b"z")
        work(world, Random(0), kills=0.0)
        assert world.result("bob", future) == b"result of z"


def test_a_refusal_that_is_forgotten_leaves_the_result_of_its_number() -> None:
    with killed_world() as world:
        model = world.session("ann", "s1")
        future = world.submit("ann", model, 1, body=b"good")
        refused = world.submit("ann", model, 1, body=b"other")
        work(world, Random(0), kills=0.0)
        assert "was used for another call" in world.result("ann", refused)["error"]
        world.pass_time(2 * RESULT_KEPT_S)
        world.kill_coordinator()
        assert world.result("ann", future) == b"result of good"


def test_gradients_that_are_refused_leave_no_bytes_in_the_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_work, "CALLER_KEPT_BYTES_MAX", 1)
    with killed_world() as world:
        model = world.session("ann", "s1")
        for number in range(1, 30):
            world.submit("ann", model, number, body=b"%d" % number)
        work(world, Random(0), kills=0.0)
        kept = [each for each in range(1, 30) if world.ledger.operation_body(model, each)]
        assert kept == []
        step = world.submit("ann", model, 30, "optim_step")
        work(world, Random(0), kills=0.0)
        assert "a part of its gradient failed" in world.result("ann", step)["error"]

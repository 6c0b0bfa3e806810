"""Any order of the records of clients of the Tinker API: the ledger agrees with a plain-Python model."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echo2d.core.base.ids import Digest
from echo2d.core.tinker.events import (
    CheckpointDropped,
    CheckpointSaved,
    GradientDropped,
    KeptClients,
    KeptOperation,
    ModelForgotten,
    ModelMade,
    OperationOver,
    OperationTaken,
    ResultForgotten,
    SamplerName,
    SamplerOpened,
    SamplerOver,
    SessionName,
    SessionOpened,
    SessionOver,
    StepSaved,
    TinkerRecord,
)
from echo2d.core.tinker.futures import Failed, Outcome
from echo2d.core.tinker.operations import ModelId, Operation, OperationKind
from echo2d.store.ledger import Ledger

NUMBERS = st.integers(0, 3)
DIGESTS = st.binary(min_size=32, max_size=32).map(Digest)
KINDS: st.SearchStrategy[OperationKind] = st.sampled_from(
    ["create", "load", "forward_backward", "optim_step", "save"]
)
TEXTS = st.text(st.characters())  # with surrogates, which JSON may hold
JSON = st.dictionaries(
    TEXTS,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
OUTCOMES: st.SearchStrategy[Outcome] = (
    JSON | st.binary() | st.builds(Failed, TEXTS, st.sampled_from(["user", "server"]))
)


class ClientsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.ledger = Ledger.open(self.path)
        self.waiting: list[TinkerRecord] = []
        self.model = KeptClients()
        self.bodies: dict[tuple[ModelId, int], bytes] = {}
        self.needed: set[tuple[ModelId, int]] = set()
        self.opened = 0
        # Models whose operations were looked through for those that nobody needs.
        self.looked: set[ModelId] = set()

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    def put(self, record: TinkerRecord, **changes: Any) -> None:
        self.waiting.append(record)
        self.model = replace(self.model, **changes)

    def models(self) -> st.SearchStrategy[ModelId]:
        sessions = [each.session for each in self.model.sessions]
        return st.sampled_from([ModelId(f"{session}:train:0") for session in sessions])

    def step(self, model: ModelId) -> int:
        return next((each.number for each in self.model.steps if each.model == model), -1)

    def change(self, record: TinkerRecord, changed: list[KeptOperation], **changes: Any) -> None:
        """Keep the operations that somebody still needs."""
        over: dict[ModelId, int] = {}
        for each in changed:
            if each.ended:
                model = each.operation.model
                over[model] = max(over.get(model, 0), each.operation.number)
        left = [
            each
            for each in changed
            if not each.ended
            or each.result is not None
            or (each.operation.model, each.operation.number) in self.needed
            or each.operation.number == over[each.operation.model]
            or each.operation.model not in self.looked
        ]
        left.sort(key=lambda each: (each.operation.model, each.operation.number))
        known = {(each.operation.model, each.operation.number) for each in left}
        self.bodies = {key: body for key, body in self.bodies.items() if key in known}
        self.put(record, operations=tuple(left), **changes)

    @initialize()
    def begin(self) -> None:
        self.open_session("a")
        self.open_session("b")

    @rule(caller=st.sampled_from("ab"))
    def open_session(self, caller: str) -> None:
        self.opened += 1
        # One name is the beginning of the next one.
        record = SessionOpened(SessionName("a" + "0" * self.opened), caller)
        self.put(record, sessions=(*self.model.sessions, record))

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data(), path=st.none() | st.just("tinker://a:train:0/weights/x"))
    def open_sampler(self, data: st.DataObject, path: str | None) -> None:
        session = data.draw(st.sampled_from(self.model.sessions)).session
        self.opened += 1
        name = SamplerName(f"{session}:sample:{self.opened}")
        whole = data.draw(st.booleans())
        record = SamplerOpened(name, "a", session, "folder", "base", path, whole=whole)
        self.put(record, samplers=(*self.model.samplers, record))

    @precondition(lambda self: self.model.samplers)
    @rule(data=st.data())
    def end_sampler(self, data: st.DataObject) -> None:
        over = data.draw(st.sampled_from(self.model.samplers))
        left = tuple(each for each in self.model.samplers if each != over)
        self.put(SamplerOver(over.sampler), samplers=left)

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        over = data.draw(st.sampled_from(self.model.sessions)).session

        def others(model: ModelId) -> bool:
            return model.partition(":")[0] != over

        self.change(
            SessionOver(over),
            [each for each in self.model.operations if others(each.operation.model)],
            sessions=tuple(each for each in self.model.sessions if each.session != over),
            samplers=tuple(each for each in self.model.samplers if each.session != over),
            steps=tuple(each for each in self.model.steps if others(each.model)),
        )

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data(), seed=st.integers(0, (1 << 63) - 1), optimizer=st.booleans())
    def make_model(self, data: st.DataObject, seed: int, *, optimizer: bool) -> None:
        model = data.draw(self.models())
        made = ModelMade(model, "a", 1.5, "base", 8, ("train_mlp",), "{}", seed, "f", optimizer)
        if model not in {each.model for each in self.model.models}:
            self.put(made, models=(*self.model.models, made))

    @precondition(lambda self: self.model.models)
    @rule(data=st.data(), name=st.sampled_from("xy"), expires_at=st.none() | st.floats(0, 1e9))
    def save(self, data: st.DataObject, name: str, expires_at: float | None) -> None:
        made = data.draw(st.sampled_from(self.model.models))
        path = f"tinker://{made.model}/weights/{name}"
        saved = CheckpointSaved(path, made.caller, 2.5, expires_at, "f", 9, made, "{}")
        others = (each for each in self.model.checkpoints if each.path != path)
        self.put(saved, checkpoints=(*others, saved))

    @precondition(lambda self: self.model.models)
    @rule(data=st.data())
    def forget_model(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.model.models))
        left = tuple(each for each in self.model.models if each != gone)
        self.put(ModelForgotten(gone.model), models=left)

    @precondition(lambda self: self.model.checkpoints)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        dropped = data.draw(st.sampled_from(self.model.checkpoints))
        left = tuple(each for each in self.model.checkpoints if each != dropped)
        self.put(CheckpointDropped(dropped.path), checkpoints=left)

    @precondition(lambda self: self.model.sessions)
    @rule(
        data=st.data(),
        kind=KINDS,
        digest=DIGESTS,
        arguments=JSON,
        body=st.binary(),
        fault=st.none() | TEXTS,
        adds=st.booleans(),
    )
    def take(self, data: st.DataObject, **facts: Any) -> None:
        model, number = data.draw(self.models()), data.draw(NUMBERS)
        known = {(each.operation.model, each.operation.number) for each in self.model.operations}
        if (model, number) in known or number <= self.step(model):
            return
        operation = Operation(model, number, **facts)
        self.bodies[model, number] = operation.body
        self.needed.add((model, number))
        bare = replace(operation, body=b"", body_bytes=len(operation.body))
        kept = KeptOperation(bare, None, ended=False, failed=False)
        self.change(OperationTaken(operation), [*self.model.operations, kept])

    def replaced(self, old: KeptOperation, new: KeptOperation) -> list[KeptOperation]:
        return [new if each == old else each for each in self.model.operations]

    @precondition(lambda self: not all(each.ended for each in self.model.operations))
    @rule(data=st.data(), result=OUTCOMES, told=st.booleans(), needed=st.booleans())
    def end(self, data: st.DataObject, result: Outcome, *, told: bool, needed: bool) -> None:
        open_ones = [each for each in self.model.operations if not each.ended]
        kept = data.draw(st.sampled_from(open_ones))
        ended = replace(kept, result=result, ended=True, failed=isinstance(result, Failed))
        key = kept.operation.model, kept.operation.number
        # After a later step was saved, or its gradient dropped, it is needed no longer.
        needed = needed and key in self.needed
        if not needed:
            self.needed.discard(key)
        if not needed or isinstance(result, Failed):
            self.bodies.pop(key, None)
        self.change(OperationOver(*key, result, needed), self.replaced(kept, ended))
        if told:
            self.forget_result(ended)

    @precondition(lambda self: any(each.result is not None for each in self.model.operations))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        told = [each for each in self.model.operations if each.result is not None]
        self.forget_result(data.draw(st.sampled_from(told)))

    def forget_result(self, kept: KeptOperation) -> None:
        record = ResultForgotten(kept.operation.model, kept.operation.number)
        self.looked = {record.model}
        self.change(record, self.replaced(kept, replace(kept, result=None)))
        self.looked = set()

    def needed_no_longer(self, model: ModelId, first: int, last: int) -> None:
        gone = {key for key in self.needed if key[0] == model and first <= key[1] <= last}
        self.needed -= gone
        self.bodies = {
            key: body
            for key, body in self.bodies.items()
            if key[0] != model or not first <= key[1] <= last
        }

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data(), first=NUMBERS, count=st.integers(0, 5))
    def drop_gradient(self, data: st.DataObject, first: int, count: int) -> None:
        model = data.draw(self.models())
        self.needed_no_longer(model, first, first + count)
        self.looked = {model}
        self.change(GradientDropped(model, first, first + count), list(self.model.operations))
        self.looked = set()

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data(), number=NUMBERS)
    def save_step(self, data: st.DataObject, number: int) -> None:
        model = data.draw(self.models())
        newest = StepSaved(model, max(number, self.step(model)))
        steps = {each.model: each for each in self.model.steps} | {model: newest}
        self.model = replace(self.model, steps=tuple(steps.values()))
        self.needed_no_longer(model, 0, number)
        self.looked = {model}
        self.change(StepSaved(model, number), list(self.model.operations))
        self.looked = set()

    @rule()
    def open_again(self) -> None:
        self.flush()
        self.ledger.close()
        self.ledger = Ledger.open(self.path)

    def flush(self) -> None:
        self.ledger.append(self.waiting)
        self.waiting.clear()

    @invariant()
    def agrees(self) -> None:
        self.flush()
        operations = [
            replace(each, needed=(each.operation.model, each.operation.number) in self.needed)
            for each in self.model.operations
        ]
        expected = replace(self.model, operations=tuple(operations))
        assert self.ledger.recover().clients == expected
        for each in self.model.operations:
            key = each.operation.model, each.operation.number
            assert self.ledger.operation_body(*key) == self.bodies.get(key)


TestLedgerOfClients = ClientsMachine.TestCase
TestLedgerOfClients.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)

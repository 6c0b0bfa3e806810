"""What the ledger keeps of the clients of the Tinker API."""

import asyncio
import math
import random
import sqlite3
import tracemalloc
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.coordinator.events import CoordinatorRecord
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
)
from echo2d.core.tinker.futures import Failed, Outcome
from echo2d.core.tinker.operations import ModelId, Operation, OperationKind
from echo2d.errors import OperatorFault, StoreFault
from echo2d.runtime.run_dir.ledger_thread import LedgerThread
from echo2d.store.ledger import Ledger
from tests.support.ledger_rows import change_rows

# The first is the beginning of the second.
SESSIONS = [SessionName(name) for name in ("a", "a0", "b")]
SESSION = SESSIONS[0]
MODEL = ModelId("a:train:0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def clients(path: Path, *records: CoordinatorRecord) -> KeptClients:
    """What a coordinator finds that starts after these records."""
    with Ledger.open(path) as ledger:
        ledger.append(records)
    with Ledger.open(path) as ledger:
        return ledger.recover().clients


def body_of(path: Path, number: int, model: ModelId = MODEL) -> bytes | None:
    with Ledger.open(path) as ledger:
        return ledger.operation_body(model, number)


def taken(
    number: int,
    body: bytes = b"body",
    model: ModelId = MODEL,
    kind: OperationKind = "forward_backward",
    arguments: Mapping[str, Any] | None = None,
) -> OperationTaken:
    operation = Operation(
        model, number, kind, digest_of(body), arguments or {}, body, adds=kind != "optim_step"
    )
    return OperationTaken(operation)


def over(model: ModelId, number: int, result: Outcome, *, needed: bool = True) -> OperationOver:
    return OperationOver(model, number, result, needed)


def kept(record: OperationTaken, result: Outcome | None = None, **facts: bool) -> KeptOperation:
    bare = replace(record.operation, body=b"", body_bytes=len(record.operation.body))
    return KeptOperation(bare, result, **{"ended": False, "failed": False, **facts})


def numbers(found: KeptClients) -> list[int]:
    return [each.operation.number for each in found.operations]


def opened(name: str, session: SessionName = SESSION, path: str | None = None) -> SamplerOpened:
    return SamplerOpened(SamplerName(name), "carol", session, "f" * 32, "base", path)


def test_sessions_and_samplers_come_back_in_their_order_until_they_are_over(path: Path) -> None:
    sessions = [SessionOpened(name, "carol") for name in reversed(SESSIONS)]
    samplers = [
        opened("b:sample:0", SESSIONS[2]),
        opened("a:sample:9", path="tinker://a:train:0/sampler_weights/x"),
        opened("a:sample:1"),
    ]
    found = clients(path, *sessions, *samplers)
    assert found == KeptClients(sessions=tuple(sessions), samplers=tuple(samplers))
    found = clients(path, SamplerOver(samplers[1].sampler), SessionOver(SESSIONS[2]))
    assert found == KeptClients(sessions=tuple(sessions[1:]), samplers=(samplers[2],))


def test_models_and_checkpoints_come_back_with_all_their_fields(path: Path) -> None:
    made = ModelMade(
        MODEL, "carol", 1.5, "base", 8, ("train_attn",), "{}", (1 << 63) - 1, "f" * 32, optimizer=True
    )  # fmt: skip
    plain = ModelMade(ModelId("a:train:1"), "carol", 2.0, "base", 8, (), '{"a": "ü"}')
    saved = CheckpointSaved("tinker://a:train:0/weights/x", "carol", 3.0, None, "g", 9, made, "{}")
    later = replace(saved, path="tinker://a:train:0/weights/y", expires_at=4.5)
    found = clients(path, made, plain, saved, later, replace(saved, bytes=10))
    assert found == KeptClients(models=(made, plain), checkpoints=(later, replace(saved, bytes=10)))
    assert clients(path, CheckpointDropped(later.path)).checkpoints == (replace(saved, bytes=10),)
    assert clients(path, ModelForgotten(plain.model)).models == (made,)


@pytest.mark.parametrize(
    "operation",
    [
        Operation(MODEL, 0, "create", digest_of(b"1"), {"rank": 8, "seed": -5, "layers": ["a"]}),
        Operation(MODEL, 0, "load", digest_of(b"2"), {"path": "\ud800 ü \0", "optimizer": True}),
        Operation(
            MODEL, (1 << 31) - 1, "optim_step", digest_of(b"3"), {"eps": 1e-12, "beta1": 0.1 + 0.2}
        ),
        Operation(MODEL, 7, "save", digest_of(b"4"), {"sampler": None}, fault="\ud800" * 5000),
        Operation(MODEL, 7, "forward_backward", digest_of(b"5"), body=b"\0" * 100, adds=True),
    ],
)
def test_an_operation_comes_back_as_it_was_without_its_body(
    path: Path, operation: Operation
) -> None:
    record = OperationTaken(operation)
    assert clients(path, record).operations == (kept(record),)
    assert body_of(path, operation.number) == operation.body


@pytest.mark.parametrize(
    "result",
    [
        b"",
        b"\xff\0" * 1000,
        b'{"type": "protobuf"}',
        {},
        {"type": "optim_step", "metrics": {"loss": 0.1 + 0.2, "n": -(1 << 70)}, "of": [None, ""]},
        {"failed": ["a", "user"], "name": "ü \ud800"},
        Failed("ü \ud800" * 5000),
        Failed("", "server"),
    ],
)
def test_a_result_comes_back_as_it_was(path: Path, result: Outcome) -> None:
    record, failed = taken(3), isinstance(result, Failed)
    found = clients(path, record, over(MODEL, 3, result))
    assert found.operations == (kept(record, result, ended=True, failed=failed),)
    (back,) = found.operations
    assert type(back.result) is type(result)
    found = clients(path, ResultForgotten(MODEL, 3))
    assert found.operations == (kept(record, ended=True, failed=failed),)
    assert body_of(path, 3) == (None if failed else b"body"), "it may have to run again"


def test_a_result_may_hold_numbers_that_are_none(path: Path) -> None:
    ended = over(MODEL, 3, {"loss": math.nan, "low": -math.inf})
    (found,) = clients(path, taken(3), ended).operations
    assert isinstance(found.result, dict)
    assert math.isnan(found.result["loss"])
    assert found.result["low"] == -math.inf


def test_operations_come_back_by_number_in_whatever_order_they_came(path: Path) -> None:
    other = ModelId("a:train:10")
    records = [taken(2), taken(0, model=other), taken(10), taken(1), taken(9)]
    found = clients(path, *records, over(MODEL, 2, {}), over(MODEL, 1, {}))
    assert numbers(found) == [1, 2, 9, 10, 0]
    assert [each.ended for each in found.operations] == [True, True, False, False, False]


def test_the_end_of_an_unknown_operation_changes_nothing(path: Path) -> None:
    found = clients(path, over(MODEL, 1, {}), ResultForgotten(MODEL, 2))
    assert found == KeptClients()


def test_a_number_is_taken_once(path: Path) -> None:
    with Ledger.open(path) as ledger, pytest.raises(StoreFault, match="UNIQUE"):
        ledger.append([taken(1), taken(1)])


def test_a_body_is_kept_until_a_later_step_is_saved(path: Path) -> None:
    body = random.Random(1).randbytes(1 << 20)
    records = [taken(1, body), taken(2, b"step", kind="optim_step"), taken(3, body[:1000])]
    clients(path, *records)
    assert body_of(path, 1) == body
    assert body_of(path, 3) == body[:1000]
    assert body_of(path, 4) is None
    assert body_of(path, 1, ModelId("a:train:1")) is None
    found = clients(path, StepSaved(MODEL, 2))
    # Their clients have no results yet.
    assert found.operations == tuple(
        kept(each, needed=each.operation.number > 2) for each in records
    )
    assert found.steps == (StepSaved(MODEL, 2),)
    assert [body_of(path, number) for number in (1, 2, 3)] == [None, None, body[:1000]]


def test_bodies_are_not_held_by_what_is_recovered(path: Path) -> None:
    size = 1 << 20
    clients(path, *(taken(number, bytes(size)) for number in range(8)))
    with Ledger.open(path) as ledger:
        tracemalloc.start()
        found = ledger.recover()
        held, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert numbers(found.clients) == list(range(8))
    assert held < size // 4
    assert most < 6 * size, "the checksums read one body after another"


@pytest.mark.parametrize("step_comes_last", [True, False])
def test_a_row_goes_when_nobody_needs_it(path: Path, *, step_comes_last: bool) -> None:
    rest: list[CoordinatorRecord] = [ResultForgotten(MODEL, 1), StepSaved(MODEL, 2)]
    clients(path, taken(1), taken(2), taken(3), taken(4), *(over(MODEL, at, b"r") for at in (1, 2)))
    found = clients(path, *(rest if step_comes_last else rest[::-1]))
    assert numbers(found) == [2, 3, 4]
    found = clients(path, ResultForgotten(MODEL, 2))
    assert numbers(found) == [2, 3, 4], "it says which numbers have ended"
    found = clients(path, *(over(MODEL, number, b"r") for number in (3, 4)))
    assert numbers(found) == [2, 3, 4]
    found = clients(path, *(ResultForgotten(MODEL, number) for number in (3, 4)))
    assert numbers(found) == [3, 4], "the learner may have to compute them again"
    assert numbers(clients(path, StepSaved(MODEL, 4))) == [4]


def test_a_gradient_that_was_dropped_is_needed_no_longer(path: Path) -> None:
    clients(path, *(taken(number) for number in (1, 2, 3, 4)))
    told = [ResultForgotten(MODEL, number) for number in (1, 2, 3, 4)]
    ended = [over(MODEL, number, b"r", needed=number < 4) for number in (1, 2, 3, 4)]
    assert numbers(clients(path, *ended, *told)) == [1, 2, 3, 4]
    assert body_of(path, 4) is None, "it is never computed again"
    found = clients(path, GradientDropped(MODEL, 2, 3))
    assert numbers(found) == [1, 4]
    assert (body_of(path, 1), body_of(path, 2)) == (b"body", None)


def test_a_step_of_one_model_leaves_the_rows_of_another(path: Path) -> None:
    other = ModelId("a:train:1")
    clients(path, taken(1), taken(1, model=other), over(other, 1, b"r"))
    found = clients(path, ResultForgotten(other, 1), StepSaved(MODEL, 5))
    assert [each.operation.model for each in found.operations] == [MODEL, other]


def test_a_saved_step_never_goes_back(path: Path) -> None:
    other = ModelId("a:train:1")
    found = clients(path, StepSaved(MODEL, 7), StepSaved(other, 1), StepSaved(MODEL, 4))
    assert found.steps == (StepSaved(MODEL, 7), StepSaved(other, 1))
    assert clients(path, StepSaved(MODEL, 9)).steps == (StepSaved(MODEL, 9), StepSaved(other, 1))


def test_a_session_that_is_over_takes_what_was_its_own(path: Path) -> None:
    records: list[CoordinatorRecord] = []
    for session in SESSIONS:
        models = [ModelId(f"{session}:train:{each}") for each in (0, 15)]
        records += [SessionOpened(session, "carol"), opened(f"{session}:sample:0", session)]
        for model in models:
            records += [
                ModelMade(model, "carol", 1.0, "base", 8, (), "{}"),
                taken(1, model=model),
                taken(3, model=model),
                over(model, 1, b"r"),
                StepSaved(model, 2),
            ]
    before = clients(path, *records)
    after = clients(path, SessionOver(SESSION))
    assert after == KeptClients(
        models=before.models,
        sessions=before.sessions[1:],
        samplers=before.samplers[1:],
        operations=tuple(
            each for each in before.operations if each.operation.model.partition(":")[0] != SESSION
        ),
        steps=before.steps[2:],
    )
    assert len(after.operations) == len(before.operations) - 4 == 8
    assert body_of(path, 3) is None
    assert body_of(path, 3, ModelId("a0:train:15")) == b"body"
    with closing(sqlite3.connect(path)) as database:
        (left,) = database.execute("SELECT count(*) FROM tinker_bodies").fetchone()
    assert left == 4


def test_the_end_of_a_session_reads_no_row_of_another_one(path: Path) -> None:
    Ledger.open(path).close()
    with closing(sqlite3.connect(path)) as database:
        for query in (
            "DELETE FROM tinker_samplers WHERE session = 'a'",
            "DELETE FROM tinker_operations WHERE model > 'a:' AND model < 'a;'",
            "DELETE FROM tinker_steps WHERE model > 'a:' AND model < 'a;'",
        ):
            plan = str(database.execute(f"EXPLAIN QUERY PLAN {query}").fetchall())
            assert "SEARCH" in plan
            assert "SCAN" not in plan


async def test_a_body_is_read_in_the_thread_of_the_ledger(path: Path) -> None:
    thread = LedgerThread(path)
    await thread.open()
    await thread.append([taken(1, b"\1" * 5000)])
    found = await asyncio.gather(*(thread.operation_body(MODEL, number) for number in (1, 2)))
    await thread.close()
    assert found == [b"\1" * 5000, None]


def refusal(path: Path) -> str:
    with Ledger.open(path) as ledger, pytest.raises(OperatorFault) as caught:
        ledger.recover()
    return str(caught.value)


def filled(path: Path) -> None:
    clients(
        path,
        SessionOpened(SESSION, "carol"),
        opened("a:sample:0"),
        taken(1),
        over(MODEL, 1, {}),
        taken(2),
        StepSaved(MODEL, 0),
    )


@pytest.mark.parametrize(
    ("statement", "row", "means"),
    [
        ("tinker_sessions SET caller = 'mallory'", "session='a' of tinker_sessions", "sessions"),
        ("tinker_samplers SET opened = X'90'", "sampler='a:sample:0' of tinker_samplers", "clients"),
        (
            "tinker_operations SET ended = 2 WHERE number = 1",
            "model='a:train:0' number=1 of tinker_operations",
            "another model than its client asked for",
        ),
        (
            "tinker_bodies SET body = X'00' WHERE number = 2",
            "model='a:train:0' number=2 of tinker_bodies",
            "another model than its client asked for",
        ),
        ("tinker_steps SET number = 1", "model='a:train:0' of tinker_steps", "another model"),
    ],
)  # fmt: skip
def test_a_damaged_row_of_a_client_is_refused_by_its_key(
    path: Path, statement: str, row: str, means: str
) -> None:
    filled(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"UPDATE {statement}")
        database.commit()
    found = refusal(path)
    assert f"row {row}: its values are not those that were written" in found
    assert means in found


@pytest.mark.parametrize(
    ("statement", "row", "why"),
    [
        ("tinker_sessions SET caller = X'05'", "session='a' of tinker_sessions", "caller"),
        ("tinker_samplers SET session = 'b'", "sampler='a:sample:0'", "another sampler's"),
        ("tinker_operations SET number = number + 5", "model='a:train:0' number=6", "another oper"),
        ("tinker_operations SET taken = X'90'", "model='a:train:0' number=1", "_Taken: expected"),
        ("tinker_operations SET ended = 3", "model='a:train:0' number=1", "ended: expected"),
        ("tinker_operations SET ended = 0", "model='a:train:0' number=1", "fits its result"),
        ("tinker_operations SET ended = 2", "model='a:train:0' number=1", "result: expected"),
        ("tinker_operations SET result = '[1'", "model='a:train:0' number=1", "of tinker_operat"),
        ("tinker_operations SET result = 7", "model='a:train:0' number=1", "result: expected"),
        ("tinker_steps SET number = -1", "model='a:train:0' number=-1", "StepSaved.number"),
    ],
)
def test_an_impossible_row_of_a_client_is_refused_by_its_key(
    path: Path, statement: str, row: str, why: str
) -> None:
    filled(path)
    change_rows(path, f"DELETE FROM tinker_bodies; UPDATE {statement}")
    found = refusal(path)
    assert f"row {row}" in found
    assert why in found

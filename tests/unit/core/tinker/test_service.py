"""The training service of the Tinker API: sessions, models, operations, results, checkpoints."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import RequestId
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.tinker import service as module
from echo2d.core.tinker.draw_queue import DRAW_RETRY_S
from echo2d.core.tinker.events import (
    AwaitResult,
    CancelSample,
    CheckpointDropped,
    ClientAsked,
    ClientCall,
    DeleteCheckpoint,
    EndSession,
    ExpireCheckpoint,
    KeepSession,
    ListCheckpoints,
    ListModels,
    OpenSampler,
    OpenSession,
    SampleAsked,
    SampleEnded,
    SampleOrder,
    SamplerName,
    SamplerOpened,
    SessionName,
    ShowCheckpoint,
    ShowModel,
    ShowQueue,
    ShowSampler,
    StopSample,
    Submit,
)
from echo2d.core.tinker.figures import Prices
from echo2d.core.tinker.futures import Failed, FutureId
from echo2d.core.tinker.operations import GAP_S, ModelId, Operation, OperationKind
from echo2d.core.tinker.service import SILENT_S
from tests.support.tinker_world import (
    BASE,
    ORDER,
    WALL,
    TinkerWorld,
    drawn,
    result_of,
    sampled,
    sampler_of,
)


def test_operations_run_in_order_and_their_results_are_told_to_who_waits() -> None:
    world = TinkerWorld()
    model = world.session()
    second = world.submit("ann", model, 2, "optim_step", {"learning_rate": 1.0})
    waiting = world.ask("ann", AwaitResult(second))
    first = world.submit("ann", model, 1, body=b"data")
    world.learn()
    assert [each[1:] for each in world.ran[-2:]] == [(1, "forward_backward"), (2, "optim_step")]
    assert world.answers[waiting].body == {"type": "optim_step", "metrics": {"norm": 1.0}}
    assert world.result("ann", first) == b"result of data"


def test_a_call_that_comes_again_gets_the_same_future_and_runs_once() -> None:
    world = TinkerWorld()
    model = world.session()
    assert world.submit("ann", model, 1) == world.submit("ann", model, 1)
    world.learn()
    assert world.submit("ann", model, 1) == f"{model}/1"
    world.learn()
    assert [each[1] for each in world.ran if each[0] == model] == [0, 1]


def test_another_call_under_the_same_number_fails_in_a_future_of_its_own() -> None:
    world = TinkerWorld()
    model = world.session()
    first = world.submit("ann", model, 1, body=b"a")
    other = world.submit("ann", model, 1, body=b"b")
    assert other != first
    assert world.result("ann", other)["error"] == "number 1 was used for another call"
    world.learn()
    assert world.result("ann", first) == b"result of a"


def test_a_failed_chunk_voids_the_next_optimizer_step_alone() -> None:
    world = TinkerWorld()
    model = world.session()
    world.fails = {(model, 1)}
    kinds: list[OperationKind] = [
        "forward_backward",
        "forward_backward",
        "optim_step",
        "optim_step",
    ]
    futures = [world.submit("ann", model, number, kind) for number, kind in enumerate(kinds, 1)]
    world.learn()
    assert [each[2] for each in world.ran[-4:]] == [
        "forward_backward", "forward_backward", "discard", "optim_step",
    ]  # fmt: skip
    told = [world.result("ann", future) for future in futures]
    assert told[0] == {"error": "bad data", "category": "user"}
    assert "a part of its gradient failed" in told[2]["error"]
    assert told[3]["metrics"] == {"norm": 1.0}


def test_a_number_that_never_comes_fails_in_its_future_and_drops_the_gradient() -> None:
    world = TinkerWorld()
    model = world.session()
    step = world.submit("ann", model, 2, "optim_step")
    assert world.service.wake_at() == GAP_S
    world.pass_time(GAP_S)
    world.learn()
    assert "a part of its gradient failed" in world.result("ann", step)["error"]
    assert world.ran[-1] == (model, 2, "discard")
    assert "has not come" in world.result("ann", FutureId(f"{model}/1"))["error"]


def test_a_faulty_call_never_reaches_the_learner() -> None:
    world = TinkerWorld()
    model = world.session()
    future = world.submit("ann", model, 1, "optim_step", fault="adam_params: expected an object")
    world.learn()
    assert world.result("ann", future)["error"] == "adam_params: expected an object"
    assert (model, 1, "optim_step") not in world.ran


def test_a_model_of_an_unknown_base_is_refused_in_its_future() -> None:
    world = TinkerWorld()
    world.body("ann", OpenSession(SessionName("s1")))
    future = world.create("ann", ModelId("s1:train:0"), base="org/other")
    world.learn()
    assert "expected one of org/base; found 'org/other'" in world.result("ann", future)["error"]
    step = world.submit("ann", ModelId("s1:train:0"), 1, "optim_step")
    world.learn()
    assert world.result("ann", step)["error"] == "the model was not made"


def test_a_session_ends_after_a_silence_and_with_it_its_models() -> None:
    world = TinkerWorld()
    model = world.session()
    world.pass_time(SILENT_S - 1)
    world.body("ann", KeepSession(SessionName("s1")))
    world.pass_time(SILENT_S - 1)
    assert world.asked("ann", KeepSession(SessionName("s1"))).status == 200
    world.pass_time(SILENT_S)
    assert world.asked("ann", KeepSession(SessionName("s1"))).status == 410
    digest = digest_of(b"")
    late = world.asked("ann", Submit(Operation(model, 1, "optim_step", digest)))
    assert late.status == 404


def test_what_waits_when_a_session_ends_fails_in_its_future() -> None:
    world = TinkerWorld()
    model = world.session()
    future = world.submit("ann", model, 1)
    world.body("ann", EndSession(SessionName("s1")))
    world.learn()
    assert "the session has ended" in world.result("ann", future)["error"]


@pytest.mark.parametrize("kept", [False, True], ids=["same process", "after a restart"])
def test_a_caller_sees_and_touches_nothing_of_another_one(kept: bool) -> None:
    world = TinkerWorld()
    model = world.session("ann", "s1")
    path = world.save("ann", model, 1, "one")
    future = world.submit("ann", model, 2)
    if kept:
        world = TinkerWorld(*world.records)
    world.session("bob", "s2")
    digest = digest_of(b"")
    foreign: list[ClientCall] = [
        KeepSession(SessionName("s1")),
        Submit(Operation(model, 3, "optim_step", digest)),
        Submit(Operation(ModelId("s1:train:7"), 0, "create", digest)),
        AwaitResult(future),
        ShowModel(model),
        ShowCheckpoint(path),
        DeleteCheckpoint(path),
        ExpireCheckpoint(path, 1.0),
    ]
    for call in foreign:
        assert world.asked("bob", call).status in (404, 410), call
    world.body("bob", EndSession(SessionName("s1")))
    assert [
        each["training_run_id"] for each in world.body("bob", ListModels(0, 9))["training_runs"]
    ] == ["s2:train:0"]
    assert world.body("bob", ListCheckpoints(None, 0, 9))["checkpoints"] == []
    assert world.body("bob", ListCheckpoints(model, 0, 9))["checkpoints"] == []
    said = {"path": path, "optimizer": False, "metadata": "{}"}
    loaded = world.submit("bob", ModelId("s2:train:1"), 0, "load", said)
    world.learn()
    assert world.result("bob", loaded)["error"] == f"no checkpoint {path}"
    # All of it is still there for its owner.
    assert world.body("ann", ShowCheckpoint(path))["lora_rank"] == 8
    if not kept:
        assert world.asked("ann", KeepSession(SessionName("s1"))).status == 200


def test_checkpoints_are_listed_expire_and_are_deleted_after_a_restart_too() -> None:
    world = TinkerWorld()
    model = world.session()
    one = world.save("ann", model, 1, "one")
    two = world.save("ann", model, 2, "two", ttl_s=50.0)
    three = world.save("ann", model, 3, "one", kind="sampler_weights")
    world = TinkerWorld(*world.records)
    listed = world.body("ann", ListCheckpoints(model, 0, 2))
    assert [each["tinker_path"] for each in listed["checkpoints"]] == [three, two]
    assert listed["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    assert listed["checkpoints"][0]["checkpoint_type"] == "sampler"
    world.body("ann", ExpireCheckpoint(one, 60.0))
    assert world.service.wake_at() == 50.0
    world.pass_time(50.0)
    assert world.records == [
        replace(world.records[0], expires_at=WALL + 60.0),
        CheckpointDropped(two),
    ]
    world.body("ann", DeleteCheckpoint(three))
    assert world.asked("ann", DeleteCheckpoint(three)).status == 404
    world.pass_time(10.0)
    assert world.body("ann", ListCheckpoints(None, 0, 9))["checkpoints"] == []


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "x" * 129, "é"])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    world = TinkerWorld()
    model = world.session()
    said = {
        "type": "save_weights",
        "overwrite": False,
        "ttl_s": None,
        "metadata": "{}",
        "sampler": None,
    }
    path = f"tinker://{model}/weights/{name}"
    future = world.submit("ann", model, 1, "save", {**said, "path": path})
    world.learn()
    assert "letters, digits" in world.result("ann", future)["error"]


def test_a_checkpoint_is_replaced_only_if_its_client_says_so() -> None:
    world = TinkerWorld()
    model = world.session()
    path = world.save("ann", model, 1, "one")
    (before,) = world.folders()
    said = {"type": "save_weights", "path": path, "ttl_s": None, "metadata": "{}", "sampler": None}
    refused = world.submit("ann", model, 2, "save", {**said, "overwrite": False})
    world.learn()
    assert "expected another name, or overwrite" in world.result("ann", refused)["error"]
    world.save("ann", model, 3, "one", overwrite=True)
    assert world.folders()[-1] != before


def test_a_checkpoint_for_samplers_has_no_optimizer_state_to_load() -> None:
    world = TinkerWorld()
    model = world.session()
    path = world.save("ann", model, 1, "one", kind="sampler_weights")
    said = {"path": path, "optimizer": True, "metadata": "{}"}
    future = world.submit("ann", ModelId("s1:train:1"), 0, "load", said)
    world.learn()
    assert "has no optimizer state" in world.result("ann", future)["error"]


@pytest.mark.parametrize(
    ("limit", "value"),
    [("CALLER_OPERATIONS_MAX", 3), ("CALLER_WAITING_BYTES_MAX", 250), ("CALLER_MODELS_MAX", 1)],
)
def test_a_greedy_caller_is_told_to_wait(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(module, limit, value)
    world = TinkerWorld()
    model = world.session()
    for number in range(2, 5):
        world.submit("ann", model, number, body=bytes(100))
    digest = digest_of(b"new")
    refused = {
        "CALLER_MODELS_MAX": Operation(ModelId("s1:train:1"), 0, "create", digest),
    }.get(limit, Operation(model, 9, "forward_backward", digest, body=bytes(100)))
    assert world.asked("ann", Submit(refused)).status == 429
    assert world.session("bob", "s2"), "another caller is served"


def test_sessions_of_a_caller_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALLER_SESSIONS_MAX", 2)
    world = TinkerWorld()
    for name in ("s1", "s2"):
        world.body("ann", OpenSession(SessionName(name)))
    assert world.asked("ann", OpenSession(SessionName("s3"))).status == 429


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_clients_learners_and_silences_answers_each_call_once(seed: int) -> None:
    """Each operation that ran ran once, and each future has one result."""
    random, world = Random(seed), TinkerWorld()
    models = {caller: world.session(caller, f"s-{caller}") for caller in ("ann", "bob", "eve")}
    pending = {caller: list(range(1, 25)) for caller in models}
    futures: list[tuple[str, FutureId]] = []
    world.fails = {(model, random.randrange(1, 25)) for model in models.values()}
    for _ in range(400):
        caller = random.choice(list(models))
        match random.randrange(6):
            case 0 | 1 | 2 if pending[caller]:
                place = random.randrange(min(4, len(pending[caller])))
                number = pending[caller].pop(place)
                kind: OperationKind = "optim_step" if number % 4 == 0 else "forward_backward"
                futures.append((caller, world.submit(caller, models[caller], number, kind)))
            case 3 if futures:
                world.ask(*(lambda each: (each[0], AwaitResult(each[1])))(random.choice(futures)))
            case 4:
                order = world.next_order()
                if order is not None and random.random() < 0.8:
                    world.ran.append((order["model"], order["number"], order["kind"]))
                    failed = (order["model"], order["number"]) in world.fails
                    world.end(order, Failed("bad data") if failed else result_of(order))
            case 5:
                world.pass_time(random.choice([0.0, 1.0, 10.0]))
    for caller, numbers in pending.items():
        futures += [(caller, world.submit(caller, models[caller], number)) for number in numbers]
    world.learn()
    ran = [each for each in world.ran if each[0]]
    assert len(ran) == len(set(ran)), f"seed {seed}"
    for model in models.values():
        numbers = [number for name, number, _ in ran if name == model]
        assert numbers == sorted(numbers), f"seed {seed}"
    told = [world.asked(caller, AwaitResult(future)) for caller, future in futures]
    assert all(each.status in (200, 410) for each in told), f"seed {seed}"


# --- samples


def test_a_sample_is_drawn_by_the_weights_of_its_sampler_alone() -> None:
    world = TinkerWorld()
    model = world.session()
    first = sampler_of(world, model, 1)
    step = world.submit("ann", model, 2, "optim_step")
    second = sampler_of(world, model, 3, "s1:sample:1")
    assert world.result("ann", step)["metrics"] == {"norm": 1.0}
    old, new = sampled(world, first, 1), sampled(world, second, 1)
    assert drawn(world) == []
    order = world.next_order()
    assert order is not None
    assert (order["kind"], order["arguments"]["version"]) == ("publish", 1)
    world.end(order, {})
    assert drawn(world) == [(old, 1)]
    world.handle(SampleEnded(old, b"tokens"))
    assert world.result("ann", old) == b"tokens"
    order = world.next_order()
    assert order is not None
    assert (order["kind"], order["arguments"]["version"]) == ("publish", 2)
    world.end(order, {})
    assert drawn(world) == [(new, 2)]


def test_the_folder_of_a_sampler_is_kept_as_long_as_its_session() -> None:
    world = TinkerWorld()
    model = world.session()
    sampler_of(world, model, 1)
    world.take(world.service.learner_began(now=world.now))
    order = world.next_order()
    assert order is not None
    assert len(order["arguments"]["folders"]) == 1
    world.end(order, {})
    world.body("ann", EndSession(SessionName("s1")))
    order = world.next_order()
    assert order is not None
    assert order["arguments"]["folders"] == []


def test_a_sample_of_a_lost_worker_is_drawn_again_and_its_number_names_one_call() -> None:
    world = TinkerWorld()
    sampler = sampler_of(world, world.session(), 1)
    future = sampled(world, sampler, 1)
    assert sampled(world, sampler, 1) == future
    world.learn()
    drawn(world)
    world.handle(SampleEnded(future, Failed("its worker has gone", "server"), again=True))
    assert drawn(world) == []
    world.pass_time(DRAW_RETRY_S)
    assert drawn(world) == [(future, 1)]
    world.handle(SampleEnded(future, Failed("bad", "server")))
    assert world.result("ann", future) == {"error": "bad", "category": "server"}
    other = sampled(world, sampler, 1, said=b"another prompt")
    assert world.result("ann", other)["error"] == "number 1 was used for another call"


def test_a_prompt_is_scored_before_its_sample_is_drawn() -> None:
    world = TinkerWorld()
    sampler = sampler_of(world, world.session(), 1)
    future = sampled(world, sampler, 1, replace(ORDER, scored=b"asked"))
    order = world.next_order()
    assert order is not None
    assert (order["kind"], order["body"]) == ("score", b"asked")
    # The learner dies, and the next one scores it.
    world.take(world.service.learner_began(now=world.now))
    while (order := world.next_order()) is not None:
        world.end(order, b"scores" if order["kind"] == "score" else {})
    assert drawn(world) == [(future, 1)]
    world.handle(SampleEnded(future, b"tokens "))
    assert world.result("ann", future) == b"tokens scores"


TOP = replace(ORDER, prompt=b"\1\0\0\0", sampling=Sampling(0.5), top_tokens=4)


def ordered(world: TinkerWorld, kind: str) -> dict[str, Any]:
    """The learner does all up to an order of this kind, which it is told."""
    while (order := world.next_order()) is not None and order["kind"] != kind:
        world.end(order, result_of(order))
    assert order is not None
    return order


def drawn_sequences(world: TinkerWorld, order: SampleOrder = TOP) -> FutureId:
    """A sample that workers have drawn, and whose sequences the learner must score."""
    sampler = sampler_of(world, world.session(), 1)
    future = sampled(world, sampler, 1, order)
    world.learn()
    assert drawn(world) == [(future, 1)]
    world.handle(SampleEnded(future, b"sequences ", tokens=5))
    return future


def test_sequences_are_scored_after_they_were_drawn() -> None:
    world = TinkerWorld()
    future = drawn_sequences(world, replace(TOP, scored=b"asked"))
    (session,) = world.service.status(Prices(0.0, 0.0), now=world.now).sessions
    assert (session.unscored, session.sampled_tokens) == (1, 5)
    order = ordered(world, "score_sample")
    said = {"folder": order["arguments"]["folder"], "prompt": TOP.prompt, "top_tokens": 4}
    assert order["arguments"] == {**said, "temperature": 0.5}
    (session,) = world.service.status(Prices(0.0, 0.0), now=world.now).sessions
    assert session.unscored == 1
    # The learner dies, and the next one scores them.
    world.take(world.service.learner_began(now=world.now))
    again = ordered(world, "score_sample")
    assert {**again, "number": 0} == {**order, "number": 0}
    world.end(again, result_of(again))
    assert world.result("ann", future) == b"sequences with top tokens scores"


def test_sequences_are_scored_under_the_weights_that_drew_them() -> None:
    world = TinkerWorld()
    model = world.session()
    sampler = sampler_of(world, model, 1, follows=True)
    future = sampled(world, sampler, 1, TOP)
    before = ordered(world, "publish")
    world.end(before, {})
    assert drawn(world) == [(future, 1)]
    # The sampler goes on to newer weights, and the learner frees what is not kept.
    sampler_of(world, model, 2, "s1:sample:1", follows=True)
    world.handle(SampleEnded(future, b"sequences "))
    world.take(world.service.learner_began(now=world.now))
    folder = before["arguments"]["folder"]
    assert folder in ordered(world, "keep")["arguments"]["folders"]
    newest = sampled(world, sampler, 2)
    order = ordered(world, "score_sample")
    assert (order["arguments"]["folder"], order["body"]) == (folder, b"sequences ")
    world.end(order, Failed("a rank failed", "server"))
    assert world.result("ann", future) == {"error": "a rank failed", "category": "server"}
    world.learn()
    assert [name for name, _ in drawn(world)] == [newest]


@pytest.mark.parametrize("given", [False, True], ids=["waits", "runs"])
@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "session ended"])
def test_a_client_may_need_sequences_no_longer_that_are_to_be_scored(
    given: bool, cancelled: bool
) -> None:
    world = TinkerWorld()
    future = drawn_sequences(world)
    order = ordered(world, "score_sample") if given else None
    world.body("ann", CancelSample(future) if cancelled else EndSession(SessionName("s1")))
    why = "it was cancelled" if cancelled else "the session has ended"
    assert why in world.result("ann", future)["error"]
    if order is not None:
        world.end(order, result_of(order))
    assert "score_sample" not in [each["kind"] for each in world.learn()]
    assert why in world.result("ann", future)["error"]
    assert drawn(world) == []


def test_weights_that_cannot_be_published_fail_what_waits_for_them() -> None:
    world = TinkerWorld()
    sampler = sampler_of(world, world.session(), 1)
    future = sampled(world, sampler, 1)
    order = world.next_order()
    assert order is not None
    world.end(order, Failed("the disk is full", "server"))
    assert "the disk is full" in world.result("ann", future)["error"]


def whole_model(world: TinkerWorld, name: str = "s1:train:1", caller: str = "ann") -> FutureId:
    return world.create(caller, ModelId(name), rank=0)


def test_one_model_of_full_weights_is_there_until_its_session_ends() -> None:
    world = TinkerWorld()
    world.session()
    made = whole_model(world)
    world.session("bob", "s2")
    refused = whole_model(world, "s2:train:1", "bob")
    world.learn()
    assert world.result("ann", made) == {"type": "create_model", "model_id": "s1:train:1"}
    assert world.result("bob", refused)["error"].startswith("one model of full weights")
    path = world.save("ann", ModelId("s1:train:1"), 1, "one")
    said = {"path": path, "optimizer": True, "metadata": "{}"}
    again = world.submit("ann", ModelId("s1:train:2"), 0, "load", said)
    world.learn()
    assert world.result("ann", again)["error"].startswith("one model of full weights")
    world.body("ann", EndSession(SessionName("s1")))
    later = whole_model(world, "s2:train:2", "bob")
    kinds = [order["kind"] for order in world.learn()]
    assert kinds == ["keep", "create"], "it is freed first"
    assert "error" not in world.result("bob", later)


def test_full_weights_are_named_as_such() -> None:
    world = TinkerWorld()
    world.session()
    whole_model(world)
    world.learn()
    shown = world.body("ann", ShowModel(ModelId("s1:train:1")))
    assert (shown["is_lora"], shown["lora_rank"]) == (False, None)
    path = world.save("ann", ModelId("s1:train:1"), 1, "one")
    shown = world.body("ann", ShowCheckpoint(path))
    assert (shown["is_lora"], shown["lora_rank"]) == (False, None)
    refused = world.asked(
        "ann", OpenSampler(SamplerName("s1:sample:9"), SessionName("s1"), None, path)
    )
    assert refused.status == 400
    assert "save_weights_for_sampler" in str(refused.body)


def test_a_sample_that_waits_for_full_weights_or_behind_them_is_told_so() -> None:
    world = TinkerWorld()
    adapter = world.session()
    whole_model(world)
    world.learn()
    samplers = (
        sampler_of(world, adapter, 1),
        sampler_of(world, adapter, 2, "s1:sample:1"),
        sampler_of(world, ModelId("s1:train:1"), 1, "s1:sample:2"),
    )
    opened = [each.whole for each in world.records if isinstance(each, SamplerOpened)]
    assert opened == [False, False, True]
    first, second, third = (sampled(world, each, 1) for each in samplers)

    def states() -> list[str]:
        calls = (ShowQueue(each) for each in (first, second, third))
        return [world.body("ann", each)["queue_state"] for each in calls]

    assert states() == ["active"] * 3, "nothing is served yet"
    world.learn()
    assert states() == ["active", "active", "paused_capacity"]
    world.handle(SampleEnded(first, b"one"))
    world.learn()
    world.handle(SampleEnded(second, b"two"))
    world.learn()
    waits = sampled(world, samplers[0], 2)
    assert world.body("ann", ShowQueue(third))["queue_state"] == "active", "it is drawn"
    told = world.body("ann", ShowQueue(waits))
    assert told["queue_state"] == "paused_capacity"
    assert "full weights" in told["queue_state_reason"]
    world.session("bob", "s2")
    assert world.body("bob", ShowQueue(waits)) == {"queue_state": "active"}


def test_samplers_of_the_base_and_of_checkpoints_are_opened_at_once() -> None:
    world = TinkerWorld()
    model = world.session()
    path = world.save("ann", model, 1, "one")
    session, name = SessionName("s1"), SamplerName("s1:sample:5")
    told = world.body("ann", OpenSampler(name, session, None, path))
    assert told == {"sampling_session_id": name}
    assert world.body("ann", ShowSampler(name))["model_path"] == path
    base = SamplerName("s1:sample:6")
    world.body("ann", OpenSampler(base, session, BASE, None))
    future = sampled(world, base, 1)
    order = world.next_order()
    assert order is not None
    assert (order["kind"], order["arguments"]["folder"]) == ("publish", "")
    world.end(order, {})
    assert drawn(world) == [(future, 1)]
    world.body("ann", CancelSample(future))
    assert world.draws == [StopSample(future)]
    assert world.result("ann", future)["error"] == "it was cancelled"
    for wrong in (
        OpenSampler(name, session, "org/x", None),
        OpenSampler(name, session, None, None),
    ):
        assert world.asked("ann", wrong).status == 400
    assert (
        world.asked("ann", OpenSampler(name, session, None, "tinker://x/weights/y")).status == 404
    )
    foreign: list[ClientCall] = [
        OpenSampler(SamplerName("s2:sample:0"), session, BASE, None),
        ShowSampler(name),
        SampleAsked(name, 9, digest_of(b""), 1, ORDER),
    ]
    world.session("bob", "s2")
    for call in foreign:
        assert world.asked("bob", call).status == 404, call
    stolen = OpenSampler(SamplerName("s2:sample:0"), SessionName("s2"), None, path)
    assert world.asked("bob", stolen).status == 404


def test_a_session_takes_its_samples_with_it() -> None:
    world = TinkerWorld()
    sampler = sampler_of(world, world.session(), 1)
    future = sampled(world, sampler, 1)
    world.learn()
    world.draws.clear()
    world.body("ann", EndSession(SessionName("s1")))
    assert world.draws == [StopSample(future)]
    assert "the session has ended" in world.result("ann", future)["error"]
    world.handle(SampleEnded(future, b"late"))


# --- what a client could do to others


def test_only_samples_are_cancelled() -> None:
    world = TinkerWorld()
    model = world.session()
    future = world.submit("ann", model, 1)
    world.body("ann", CancelSample(future))
    world.learn()
    assert world.result("ann", future) == b"result of "
    world.body("ann", CancelSample(future))


def test_a_sample_may_be_cancelled_while_its_prompt_is_scored() -> None:
    world = TinkerWorld()
    world.session("bob", "s2")
    sampler = sampler_of(world, world.session(), 1)
    future = sampled(world, sampler, 1, replace(ORDER, scored=b"asked"))
    order = world.next_order()
    assert order is not None
    world.body("bob", CancelSample(future))
    world.body("ann", CancelSample(future))
    assert world.result("ann", future)["error"] == "it was cancelled"
    world.take(world.service.learner_began(now=world.now))
    world.body("ann", EndSession(SessionName("s1")))
    world.learn()
    assert drawn(world) == []


def test_weights_are_drawn_from_while_others_are_published() -> None:
    world = TinkerWorld()
    model = world.session()
    first, second = sampler_of(world, model, 1), sampler_of(world, model, 2, "s1:sample:1")
    sampled(world, first, 1)
    world.learn()
    (one,) = drawn(world)
    new = sampled(world, second, 1)
    order = world.next_order()
    assert order is not None
    assert (order["kind"], world.workers.told) == ("publish", [(), (1,)])
    old = sampled(world, first, 2)
    assert drawn(world) == [(old, 1)]
    # The learner dies, and perhaps the version was accepted. So it is published again.
    world.take(world.service.learner_began(now=world.now))
    assert drawn(world) == []
    world.learn()
    assert (drawn(world), world.workers.told) == ([(new, 3)], [(), (1,), (1,)])
    world.handle(SampleEnded(FutureId(one[0]), b"tokens"))


def test_a_version_that_no_worker_holds_is_published_again() -> None:
    world = TinkerWorld()
    future = sampled(world, sampler_of(world, world.session(), 1), 1)
    world.learn()
    assert drawn(world) == [(future, 1)]
    refused = Failed("no worker serves version 1 any more", "server")
    world.handle(SampleEnded(future, refused, again=True, gone=True))
    world.learn()
    world.pass_time(DRAW_RETRY_S)
    assert drawn(world) == [(future, 2)]


def test_a_sampler_is_not_made_for_a_session_that_has_ended() -> None:
    world = TinkerWorld()
    model = world.session()
    path = f"tinker://{model}/sampler_weights/1"
    said = {"type": "save_weights_for_sampler", "path": path, "overwrite": False, "ttl_s": None}
    name = "s1:sample:0"
    future = world.submit("ann", model, 1, "save", {**said, "metadata": "{}", "sampler": name})
    order = world.next_order()
    assert order is not None
    world.body("ann", EndSession(SessionName("s1")))
    world.end(order, {"bytes": 1})
    assert "the session has ended" in world.result("ann", future)["error"]
    assert world.asked("ann", ShowSampler(SamplerName(name))).status == 404


def test_a_sample_number_that_was_forgotten_is_not_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SAMPLER_NUMBERS_MAX", 2)
    world = TinkerWorld()
    sampler = sampler_of(world, world.session(), 1)
    for number in (1, 2, 3):
        sampled(world, sampler, number)
    call = SampleAsked(sampler, 1, digest_of(b""), ORDER.count, ORDER)
    assert world.asked("ann", call).status == 410


def test_a_wall_clock_that_jumps_ahead_expires_nothing_until_it_has_stayed_so() -> None:
    world = TinkerWorld()
    model = world.session()
    world.save("ann", model, 1, "one", ttl_s=3600.0)

    def heartbeat(wall_s: float) -> None:
        keep = KeepSession(SessionName("s1"))
        request = RequestId(next(world.requests))
        world.handle(ClientAsked(request, "ann", wall_s, keep))

    heartbeat(WALL + 1e6)
    assert world.body("ann", ListCheckpoints(None, 0, 9))["checkpoints"], "it may be wrong"
    for _ in range(11):
        world.now += 60.0
        heartbeat(WALL + world.now + 1e6)
    assert not world.body("ann", ListCheckpoints(None, 0, 9))["checkpoints"]

"""What the learner does next, and what happens when it begins again."""

from dataclasses import replace

from echo2d.core.base.canonical import digest_of
from echo2d.core.tinker.checkpoints import state_folder
from echo2d.core.tinker.events import (
    DeleteCheckpoint,
    EndSession,
    OpenSampler,
    OpenSession,
    SampleAsked,
    SampleEnded,
    SamplerName,
    SamplerOpened,
    SessionName,
    ShowModel,
    StepSaved,
)
from echo2d.core.tinker.futures import Failed, FutureId
from echo2d.core.tinker.learner_work import KEEP_EVERY_S, RESTORES_MAX
from echo2d.core.tinker.operations import ModelId, OperationKind
from tests.support.tinker_world import BASE, ORDER, TinkerWorld, drawn, sampled, sampler_of


def test_the_learner_gets_the_same_operation_until_it_has_answered() -> None:
    world = TinkerWorld()
    model = world.session()
    world.submit("ann", model, 1)
    order = world.next_order()
    assert order is not None
    assert world.next_order() == order
    world.end(order, b"one")
    world.end(order, b"two")
    assert world.result("ann", FutureId(f"{model}/1")) == b"one"


def test_callers_take_turns_however_much_one_of_them_asks_for() -> None:
    world = TinkerWorld()
    ann, bob = world.session("ann", "s1"), world.session("bob", "s2")
    for number in range(1, 20):
        world.submit("ann", ann, number)
    for number in range(1, 3):
        world.submit("bob", bob, number)
    world.ran.clear()
    world.learn()
    assert [each[0] for each in world.ran[:4]].count(bob) == 2


def test_a_learner_that_begins_again_makes_the_model_again_before_its_next_operation() -> None:
    world = TinkerWorld()
    model = world.session()
    kinds: list[OperationKind] = ["forward_backward", "optim_step", "forward_backward"]
    for number, kind in enumerate(kinds, 1):
        world.submit("ann", model, number, kind, body=b"%d" % number)
    world.learn()
    running = world.submit("ann", model, 4)
    assert world.next_order() is not None
    world.take(world.service.learner_began(now=world.now))
    world.ran.clear()
    world.learn()
    assert [each[1:] for each in world.ran if each[0]] == [
        (0, "create"), (1, "forward_backward"), (2, "optim_step"), (3, "forward_backward"),
        (4, "forward_backward"),
    ]  # fmt: skip
    assert world.result("ann", running) == b"result of "


def test_a_learner_that_begins_again_makes_all_models_again_before_a_new_one() -> None:
    """So that the new one does not take their memory."""
    world = TinkerWorld()
    models = [world.session("ann", "s1"), world.session("bob", "s2")]
    world.learn()
    world.take(world.service.learner_began(now=world.now))
    world.ran.clear()
    added = world.session("eve", "s3")
    world.learn()
    created = [name for name, _, kind in world.ran if kind == "create"]
    assert sorted(created[:2]) == sorted(models)
    assert created[2:] == [added]


def test_after_a_saved_step_only_what_came_later_is_computed_again() -> None:
    world = TinkerWorld()
    model = world.session()
    kinds: list[OperationKind] = ["forward_backward", "optim_step"]
    for number, kind in enumerate([*kinds, *kinds, "forward_backward"], 1):
        world.submit("ann", model, number, kind)
    world.learn()
    states = [state_folder(model, number) for number in (2, 4)]
    world.next_order(StepSaved(model, 2))
    assert world.records[-1] == StepSaved(model, 2)
    world.take(world.service.learner_began(now=world.now))
    keeps = world.next_order()
    assert keeps is not None
    assert keeps["arguments"] == {"folders": sorted(states), "models": [model]}
    world.end(keeps, {})
    world.ran.clear()
    world.submit("ann", model, 6, "optim_step")
    load = world.next_order()
    assert load is not None
    assert load["arguments"] == {"folder": states[0], "optimizer": True}
    world.learn()
    assert [each[1:] for each in world.ran if each[0]] == [
        (2, "load"), (3, "forward_backward"), (4, "optim_step"), (5, "forward_backward"),
        (6, "optim_step"),
    ]  # fmt: skip


def test_a_step_is_believed_to_be_saved_only_if_it_has_ended() -> None:
    world = TinkerWorld()
    model = world.session()
    world.submit("ann", model, 1, "optim_step")
    order = world.next_order()
    assert order is not None
    world.next_order(StepSaved(model, 1), StepSaved(ModelId("s9:train:0"), 1))
    assert not any(isinstance(each, StepSaved) for each in world.records)


def test_a_model_that_cannot_be_computed_again_is_lost_and_says_why() -> None:
    world = TinkerWorld()
    model = world.session()
    path = world.save("ann", model, 1, "one")
    world.submit("ann", model, 2)
    world.learn()
    world.take(world.service.learner_began(now=world.now))
    world.fails = {(model, 0)}
    futures = [world.submit("ann", model, number) for number in (3, 4)]
    world.learn()
    for future in futures:
        assert "cannot compute this model again" in world.result("ann", future)["error"]
    loaded = ModelId("s1:train:1")
    future = world.submit(
        "ann", loaded, 0, "load", {"path": path, "optimizer": True, "metadata": "{}"}
    )
    world.learn()
    assert world.result("ann", future) == {
        "type": "load_weights", "model_id": loaded, "path": path,
    }  # fmt: skip
    assert world.body("ann", ShowModel(loaded))["lora_rank"] == 8


def test_what_a_model_was_loaded_from_is_kept_until_a_step_is_saved() -> None:
    world = TinkerWorld()
    model = world.session()
    path = world.save("ann", model, 1, "one")
    (folder,) = world.folders()
    loaded = ModelId("s1:train:1")
    said = {"path": path, "optimizer": False, "metadata": "{}"}
    world.submit("ann", loaded, 0, "load", said)
    world.learn()
    world.body("ann", DeleteCheckpoint(path))
    world.submit("ann", loaded, 1, "optim_step")
    keeps = world.next_order()
    assert keeps is not None
    assert keeps["arguments"]["folders"] == [folder]
    world.end(keeps, {})
    world.take(world.service.learner_began(now=world.now))
    world.submit("ann", loaded, 2, "optim_step")
    orders = world.learn()
    (again,) = (each for each in orders if each["kind"] == "load")
    assert again["arguments"] == {"folder": folder, "optimizer": False}
    state = state_folder(loaded, 2)
    world.next_order(StepSaved(loaded, 2))
    world.take(world.service.learner_began(now=world.now))
    keeps = world.next_order()
    assert keeps is not None
    assert keeps["arguments"]["folders"] == [state]


def test_a_model_that_is_made_while_the_learner_dies_is_made_by_the_next_one() -> None:
    world = TinkerWorld()
    world.body("ann", OpenSession(SessionName("s1")))
    future = world.create("ann", ModelId("s1:train:0"))
    keeps = world.next_order()
    assert keeps is not None
    world.end(keeps, {})
    assert world.next_order() is not None
    world.take(world.service.learner_began(now=world.now))
    world.learn()
    assert world.result("ann", future)["model_id"] == "s1:train:0"


def test_the_learner_is_told_which_models_and_folders_to_keep() -> None:
    world = TinkerWorld()
    model = world.session()
    path = world.save("ann", model, 1, "one")
    (folder,) = world.folders()
    world.take(world.service.learner_began(now=world.now))
    order = world.next_order()
    assert order is not None
    assert order["kind"] == "keep"
    assert order["arguments"] == {"folders": [folder], "models": [model]}
    world.end(order, {})
    world.body("ann", DeleteCheckpoint(path))
    world.body("ann", EndSession(SessionName("s1")))
    order = world.next_order()
    assert order is not None
    assert order["arguments"] == {"folders": [], "models": []}


def test_a_report_that_comes_late_does_not_end_another_order() -> None:
    world = TinkerWorld()
    sampler = sampler_of(world, world.session(), 1)
    world.take(world.service.learner_began(now=world.now))
    keeps = world.next_order()
    assert keeps is not None
    world.end(keeps, {})
    future = sampled(world, sampler, 1)
    publishes = world.next_order()
    assert publishes is not None
    world.end(keeps, {})
    assert drawn(world) == []
    world.end(publishes, {})
    assert drawn(world) == [(future, 1)]


def test_the_learner_may_begin_again_after_a_session_has_ended_in_the_middle_of_an_operation() -> (
    None
):
    world = TinkerWorld()
    model = world.session()
    running, waiting = world.submit("ann", model, 1), world.submit("ann", model, 5)
    assert world.next_order() is not None
    world.body("ann", EndSession(SessionName("s1")))
    assert "the session has ended" in world.result("ann", waiting)["error"]
    world.take(world.service.learner_began(now=world.now))
    assert "the session has ended" in world.result("ann", running)["error"]
    world.learn()


def test_a_step_that_cannot_run_leaves_no_gradient_behind() -> None:
    world = TinkerWorld()
    model = world.session()
    world.submit("ann", model, 1)
    wrong = world.submit("ann", model, 2, "optim_step", fault="beta1: expected a number")
    world.submit("ann", model, 3)
    right = world.submit("ann", model, 4, "optim_step")
    world.learn()
    kinds = [kind for name, _, kind in world.ran if name == model]
    assert kinds == ["create", "forward_backward", "discard", "forward_backward", "optim_step"]
    assert world.result("ann", wrong)["error"] == "beta1: expected a number"
    assert world.result("ann", right)["metrics"] == {"norm": 1.0}


def test_samplers_that_follow_a_model_go_on_to_its_newest_weights_and_others_do_not() -> None:
    world = TinkerWorld()
    model = world.session()
    snapshot = sampler_of(world, model, 1, "s1:sample:0")
    first = sampler_of(world, model, 2, "s1:sample:1", follows=True)
    before = sampled(world, first, 1)
    while (order := world.next_order()) is not None:
        world.end(order, {})
    drawn(world)
    second = sampler_of(world, model, 3, "s1:sample:2", follows=True)
    found = [each for each in world.records if isinstance(each, SamplerOpened)]
    folders = {each.sampler: each.folder for each in found}
    assert folders[snapshot] != folders[first] == folders[second]
    world.handle(SampleEnded(before, b"tokens"))
    # The next sample of the old one waits for the new weights.
    sampled(world, first, 2)
    assert drawn(world) == []
    order = world.next_order()
    assert order is not None
    while order["kind"] != "publish":
        world.end(order, {})
        order = world.next_order()
        assert order is not None
    assert order["arguments"]["folder"] == folders[second]


def test_sequences_say_which_weights_drew_them_and_old_ones_may_be_refused() -> None:
    world = TinkerWorld()
    model = world.session()
    sampler = sampler_of(world, model, 1)
    call = SampleAsked(sampler, 1, digest_of(b""), 2, ORDER)
    names = world.body("ann", call)["sample_sequence_ids"]
    assert names == ["s1:sample:0/1/0@0.3", "s1:sample:0/1/1@0.3"]
    world.submit("ann", model, 2)
    orders = world.learn()
    assert [each["arguments"] for each in orders if each["kind"] == "forward_backward"] == [
        {"staleness_max": None}
    ]


def test_a_learner_that_fails_to_make_a_model_again_may_try_it_some_times() -> None:
    world = TinkerWorld()
    model = world.session()
    world.submit("ann", model, 1)
    world.learn()
    world.take(world.service.learner_began(now=world.now))
    future = world.submit("ann", model, 2, body=b"two")
    tries = 0
    while (order := world.next_order()) is not None:
        makes = order["kind"] == "create"
        tries += makes
        full = Failed("out of memory", "server")
        world.end(order, full if makes and tries < RESTORES_MAX else world.compute(order))
    assert tries == RESTORES_MAX
    assert world.result("ann", future) == b"result of two"


def test_a_sampler_whose_name_is_in_use_is_not_opened_for_other_weights() -> None:
    world = TinkerWorld()
    model = world.session()
    opened = OpenSampler(SamplerName("s1:sample:0"), SessionName("s1"), BASE, None)
    assert world.asked("ann", opened).status == world.asked("ann", opened).status == 200
    path = f"tinker://{model}/sampler_weights/1"
    said = {"type": "save_weights_for_sampler", "path": path, "overwrite": False, "ttl_s": None}
    more = {"metadata": "{}", "sampler": opened.sampler, "follows": False}
    future = world.submit("ann", model, 1, "save", {**said, **more})
    world.learn()
    assert "is open already" in world.result("ann", future)["error"]
    other = replace(opened, path=world.save("ann", model, 2, "one"), base=None)
    assert world.asked("ann", other).status == 400


def test_states_of_older_steps_are_freed_now_and_then() -> None:
    world = TinkerWorld()
    model = world.session()
    for number in (1, 2):
        world.submit("ann", model, number, "optim_step")
    world.learn()
    assert world.next_order(StepSaved(model, 1)) is None
    world.pass_time(KEEP_EVERY_S)
    order = world.next_order(StepSaved(model, 2))
    assert order is not None
    assert order["kind"] == "keep"
    assert order["arguments"]["folders"] == [state_folder(model, 2)]

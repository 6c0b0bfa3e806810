"""What the status says of clients: steps, tokens, what waits, and what each session costs."""

import pytest

from echo2d.core.status.schema import HeldWeights
from echo2d.core.tinker.events import EndSession, SessionName
from tests.support.tinker_clients import BASE, LEARNER_USD_PER_H, ClientWorld, serving

WORKER_USD_PER_H = 2.0


def test_a_step_counts_its_tokens_and_its_time_for_the_model_its_session_and_its_caller() -> None:
    world = serving()
    session = world.of("s1")
    assert (session.caller, session.steps, session.trained_tokens, session.train_s) == (
        "ann", 2, 200, 6.0,
    )  # fmt: skip
    assert [(each.model, each.rank, each.steps) for each in session.models] == [
        ("s1:train:0", 8, 1),
        ("s1:train:1", 8, 1),
    ]
    ann, bob = world.clients().callers
    assert (ann.steps, ann.trained_tokens, bob.steps) == (2, 200, 0)


def test_a_step_whose_gradient_is_dropped_counts_nothing() -> None:
    world = ClientWorld()
    world.client("ann", "s1")
    model = world.model("ann", "s1")
    world.fails = {"forward_backward"}
    world.submit("ann", model, 1, "forward_backward")
    world.submit("ann", model, 2, "optim_step")
    world.learn()
    assert (world.of("s1").steps, world.of("s1").trained_tokens) == (0, 0)


def test_the_client_is_not_told_what_the_learner_reports_for_the_status() -> None:
    world = ClientWorld()
    world.client("ann", "s1")
    model = world.model("ann", "s1")
    world.submit("ann", model, 1, "optim_step")
    world.learn()
    assert world.result("ann", f"{model}/1") == {
        "type": "optim_step",
        "metrics": {"grad_norm": 1.0},
    }


def test_what_waits_is_shown_for_each_session() -> None:
    world = serving()
    ann, bob = world.of("s1"), world.of("s2")
    assert (ann.operations_waiting, ann.bytes_waiting, ann.checkpoints) == (1, 4, 1)
    assert [each.operations_waiting for each in ann.models] == [0, 1]
    assert (bob.samplers, bob.sequences, bob.sampled_tokens) == (1, 2, 6)
    assert (bob.drawn, bob.samples_waiting, bob.unscored, bob.other_weights) == (2, 0, 1, 0)
    assert (bob.age_s, bob.silent_s) == (60.0, 60.0)


def test_the_status_names_the_weights_that_are_held_and_counts_what_waits_for_others() -> None:
    world = serving()
    assert world.clients().held == (HeldWeights(BASE, 1),)
    path = "tinker://s1:train:1/weights/3"
    world.sample("ann", world.sampler("ann", "s1", path), 0)
    assert (world.of("s1").samples_waiting, world.of("s1").other_weights) == (1, 1)
    world.learn()
    assert world.clients().held == (HeldWeights(BASE, 1), HeldWeights(path, 2))
    assert world.of("s1").drawn == 1


def test_nothing_is_held_before_the_first_sample() -> None:
    assert ClientWorld().clients().held == ()


def test_workers_are_paid_for_by_sampled_tokens_and_the_learner_by_its_time() -> None:
    world = serving()
    other = world.sampler("ann", "s1")
    world.draw(tokens=6)
    world.learn()
    world.draw(tokens=6)
    world.sample("ann", other, 0)
    world.draw(tokens=6)
    # bob has sampled 24 tokens, and ann 6.
    workers_usd = world.state.status(now=world.now).costs.workers_usd
    assert workers_usd == pytest.approx(WORKER_USD_PER_H * 60 / 3600)
    assert world.of("s2").cost_usd == pytest.approx(0.8 * workers_usd)
    learner_usd = LEARNER_USD_PER_H * 6.0 / 3600
    assert world.of("s1").cost_usd == pytest.approx(0.2 * workers_usd + learner_usd)


def test_without_prices_a_session_has_no_cost() -> None:
    world = ClientWorld(priced=False)
    world.client("ann", "s1")
    assert world.of("s1").cost_usd is None


def test_what_a_caller_has_used_outlives_its_sessions() -> None:
    world = serving()
    for caller, session in (("ann", "s1"), ("bob", "s2")):
        world.told(caller, EndSession(SessionName(session)))
    assert world.clients().sessions == ()
    ann, bob = world.clients().callers
    assert (ann.sessions, ann.models, ann.steps, ann.checkpoints) == (0, 0, 2, 1)
    assert (bob.sequences, bob.sampled_tokens, bob.samples_waiting) == (2, 6, 0)


def test_a_step_that_ends_after_its_session_counts_for_its_caller_alone() -> None:
    world = ClientWorld()
    world.client("ann", "s1")
    model = world.model("ann", "s1")
    world.submit("ann", model, 1, "optim_step")
    next(world.orders())
    world.told("ann", EndSession(SessionName("s1")))
    world.learn()
    assert world.clients().sessions == ()
    assert [each.steps for each in world.clients().callers] == [1]
    world.state.check()


def test_after_a_restart_counts_begin_again_and_what_is_computed_again_does_not_count() -> None:
    world = ClientWorld()
    world.client("ann", "s1")
    model = world.model("ann", "s1")
    world.submit("ann", model, 1, "forward_backward")
    world.submit("ann", model, 2, "optim_step")
    world.learn()
    world.crash()
    world.open_session()
    world.now += 5.0
    session = world.of("s1")
    assert (session.age_s, session.steps, session.models[0].rank) == (5.0, 0, 8)
    world.submit("ann", model, 3, "optim_step")
    world.learn()
    assert world.result("ann", f"{model}/3")["metrics"] == {"grad_norm": 1.0}
    assert (world.of("s1").steps, world.of("s1").trained_tokens) == (1, 100)

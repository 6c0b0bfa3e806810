"""The scorers of answers, their orders, and what happens to orders without an answer."""

from collections.abc import Callable

import pytest

from echo2d.core.audit import scorers
from echo2d.core.cluster.events import PeerDisconnected
from echo2d.core.protocol.control_messages import (
    AnswersScored,
    Heartbeat,
    ScoreAnswers,
    ScoringFailed,
)
from echo2d.core.protocol.seeds import sample_seeds
from tests.support.audited_world import AuditedWorld, started
from tests.support.coordinator_world import messages, version_key
from tests.support.gateway import exactly, hold, key_of, of_calls, publish


def test_an_order_names_prompt_seed_and_place_of_each_answer() -> None:
    world = started("a")
    peer = world.peers["a"]
    key, sample = peer.open[0]
    lease = peer.leases[key]
    world.say(peer, peer.finish(key, sample))
    (order,) = messages(world.peers["auditor"], ScoreAnswers)
    assert order.path == "versions/1-0"
    (answer,) = order.answers
    assert answer.sampling == lease.sampling
    (seed,) = sample_seeds(world.rules.seed_key, lease.group, (sample,))
    assert (answer.prompt, answer.written, answer.seed) == (lease.prompt, 0, seed)
    assert lease.rng_seeds[lease.samples.index(sample)] == seed


LostAuditor = Callable[[AuditedWorld], None]


def goes(world: AuditedWorld) -> None:
    world.handle(PeerDisconnected(world.peers["auditor"].session, "killed"))
    world.connect("auditor", kind="auditor", slots=0)


def fails(world: AuditedWorld) -> None:
    (order,) = messages(world.peers["auditor"], ScoreAnswers)
    world.say(world.peers["auditor"], ScoringFailed(order.order, "out of memory"))
    world.pass_time(scorers.SCORER_REST_S)


@pytest.mark.parametrize("lost", [goes, fails])
def test_answers_that_an_auditor_did_not_score_are_ordered_again(lost: LostAuditor) -> None:
    world = started("a", wait_s=3600.0)
    peer = world.peers["a"]
    world.say(peer, peer.finish(*peer.open[0]))
    world.pending.clear()
    lost(world)
    first, second = messages(world.peers["auditor"], ScoreAnswers)[:2]
    assert first.order != second.order
    assert first.answers == second.answers
    # A late answer to the first order changes nothing.
    before = world.audits.scorers.scored
    late = AnswersScored(first.order, tuple(map(world._score, first.answers)), 0.1, 0.1)
    world.say(world.peers["auditor"], late)
    assert world.audits.scorers.scored == before


def test_an_auditor_that_is_late_gets_its_next_order_when_it_has_answered() -> None:
    world = started("a", "b", wait_s=3600.0)
    auditor = world.peers["auditor"]
    world.say(world.peers["a"], world.peers["a"].finish(*world.peers["a"].open[0]))
    world.pending.clear()
    for _ in range(int(scorers.ORDER_S_MAX) // 2 + 1):
        world.pass_time(2.0)
        for peer in world.peers.values():
            world.say(peer, Heartbeat(0))
    (order,) = messages(auditor, ScoreAnswers)
    assert world.audits.scorers.pending == 1
    late = AnswersScored(order.order, tuple(map(world._score, order.answers)), 0.1, 0.1)
    world.say(auditor, late)
    first, second = messages(auditor, ScoreAnswers)
    assert first.answers == second.answers


def test_only_auditors_score_and_only_the_ordered_answers() -> None:
    world = started("a", "b")
    world.say(world.peers["b"], AnswersScored(0, (), 0.1, 0.1))
    assert world.peers["b"].closed
    peer = world.peers["a"]
    world.say(peer, peer.finish(*peer.open[0]))
    (order,) = messages(world.peers["auditor"], ScoreAnswers)
    world.say(world.peers["auditor"], AnswersScored(order.order, (), 0.1, 0.1))
    assert world.peers["auditor"].closed


def test_copies_of_versions_that_an_audit_needs_are_kept() -> None:
    world = started("a", auditor=False)
    peer = world.peers["a"]
    world.say(peer, peer.finish(*peer.open[0]))
    assert set(world.state._versions.pinned) == {"versions/1-0"}


def test_an_answer_that_cannot_be_scored_does_not_fail_others() -> None:
    world = started("a", "b", wait_s=3600.0)
    for name in "ab":
        peer = world.peers[name]
        world.say(peer, peer.finish(*peer.open[0]))
    world.pending.clear()
    auditor = world.peers["auditor"]
    orders = messages(auditor, ScoreAnswers)
    world.say(auditor, ScoringFailed(orders[-1].order, "no memory"))
    world.pass_time(scorers.SCORER_REST_S)
    world.pending.clear()
    for _ in range(8):
        orders.append(messages(auditor, ScoreAnswers)[-1])
        if orders[-1] is orders[-2]:
            break
        assert len(orders[-1].answers) == 1
        world.say(auditor, ScoringFailed(orders[-1].order, "no memory"))
        world.pass_time(scorers.SCORER_REST_S)
        world.pending.clear()
    assert world.audits.skipped >= 1
    assert world.audits.scorers.pending == 0


def write_both(world: AuditedWorld, writer: str, first: int) -> None:
    """This worker writes a sample of each of the two versions that it holds; both are trained on."""
    peer = world.peers[writer]
    for version in (0, 1):
        world.handle(exactly(first + version, version, trained=True))
        world.say(peer, peer.finish(key_of(of_calls(peer)[-1]), 0))


def test_a_worker_scores_answers_of_every_version_that_it_holds() -> None:
    world = started("a", "mine", auditor=False, calls=True, versions_held=3)
    writer, judge = world.peers["a"], world.peers["mine"]
    judge.scores, judge.slots = True, 0
    world.connect("mine")
    hold(world, 0)
    publish(world, 1, writer, judge)
    write_both(world, "a", 1)
    world.drain()
    scored = [order.key for order in messages(judge, ScoreAnswers)]
    assert scored == [version_key(0), version_key(1)]
    assert world.state.status().gateway.ended == {"done": 2}


def test_copies_of_held_versions_are_kept_however_many_newer_ones_are_published() -> None:
    world = started("a", calls=True, versions_held=3)
    worker = world.peers["a"]
    hold(world, 0)
    for version in range(1, 12):
        publish(world, version, worker)
        world.drain()
    there = {record.version for record in world.state._versions.copies()}
    assert 0 in there
    assert len(there) < 9
    world.handle(exactly(1, 0, trained=True))
    world.say(worker, worker.finish(key_of(of_calls(worker)[-1]), 0))
    world.drain()
    assert world.state.status().gateway.ended == {"done": 1}
    hold(world, 11)
    publish(world, 12, worker)
    world.drain()
    assert 0 not in {record.version for record in world.state._versions.copies()}

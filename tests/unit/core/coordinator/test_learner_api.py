"""The learner's calls: epochs, order, fencing, refusals, checkpoints; through the whole machine."""

from typing import Any

import pytest

from echo2d.core.base.ids import Digest, Epoch, Version
from echo2d.core.cluster.events import (
    Note,
    PeerDisconnected,
    Persist,
    PublishAsked,
    Reply,
    VersionRevoked,
)
from echo2d.core.coordinator.events import (
    AliveTold,
    BatchAsked,
    CheckpointAsked,
    CommitAsked,
    EpochAsked,
    RefuseAsked,
    RequestGone,
    RulesAsked,
    SessionAsked,
)
from echo2d.core.coordinator.learner_api import WAITING_MAX
from echo2d.core.protocol.control_messages import (
    HeldLease,
    LeaseCancelled,
    RefitDone,
    VersionKey,
    VersionsRevoked,
)
from echo2d.core.protocol.trajectory import StepFigures, TrajectoryScore, unpack_batch
from echo2d.core.work.events import BatchCommitted
from echo2d.core.work.training.staleness import REFUSALS_MAX
from tests.support.coordinator_world import RULES, World, rules, train, version_digest, version_key

NO_DIGEST = Digest(bytes(32))


def trained(steps: int, **changes: Any) -> World:
    """A run after so many steps, with one worker."""
    world = World(rules(**changes))
    world.connect("seed", kind="seed", slots=0)
    world.connect("a", slots=4)
    train(world, steps)
    return world


def error(reply: Reply) -> tuple[int, str]:
    assert isinstance(reply.body, dict)
    return reply.status, reply.body.get("error", "")


def batch_of(world: World, step: int) -> Reply:
    request = world.ask_batch(step)
    world.work()
    return world.replies[request]


def serving(world: World) -> VersionKey | None:
    return world.peers["a"].serving


def test_a_session_gives_the_learner_the_rules() -> None:
    world = World()
    assert world.open_session().body == {
        "epoch": 1, "run_id": "run-1", "staleness_max": 2, "publish_every": 1, "trajectories_per_step": 4,
        "group_size": 2, "group_min": 2, "over_stale": "drop", "filter_zero_variance": True, "checkpoint": 0,
        "evaluations": [], "answer_tokens": 8,
        "samplings": {"": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}},
    }  # fmt: skip
    assert world.publish(0).body == {
        "version": 0,
        "digest": version_digest(0).hex(),
        "publish_seq": 1,
    }


def test_older_epochs_are_fenced_everywhere() -> None:
    world = trained(2, staleness_max=0)
    waiting = world.ask_batch(3)
    old = world.ledger.epoch
    world.open_session(2)
    assert error(world.replies[waiting]) == (409, "fenced")
    key = version_key(2)
    for reply in (
        world.call(lambda number: BatchAsked(number, old, 3)),
        world.call(lambda number: CommitAsked(number, old, 3, NO_DIGEST, 1.0)),
        world.call(lambda number: RefuseAsked(number, old, 3, ())),
        world.call(lambda number: CheckpointAsked(number, old, 1)),
        world.call(lambda number: PublishAsked(number, old, key.version, key.digest, "p", 1)),
        world.call(lambda number: EpochAsked(number, old)),
    ):
        assert error(reply) == (409, "fenced")
        assert isinstance(reply.body, dict)
        assert reply.body["epoch"] == 2
    assert world.call(lambda number: EpochAsked(number, world.ledger.epoch)).status == 200


def test_another_learner_takes_the_run_over_only_on_request() -> None:
    world = trained(2)

    def opened(learner: str, *, take_over: bool = False) -> Reply:
        return world.call(lambda number: SessionAsked(number, 2, learner, take_over))

    # The learner before had no identity: only one without has the same.
    assert error(opened("a")) == (409, "held")
    assert opened("a", take_over=True).status == 200
    assert opened("a").status == 200
    world.pass_time(90.0)
    reply = opened("b")
    assert isinstance(reply.body, dict)
    assert reply.body["detail"] == (
        "learner a has the run and was last heard 90 s ago; another one gets it only with "
        "--take-over (open_session(take_over=True)), which ends that session"
    )
    world.crash()
    assert "was not heard since the coordinator started" in str(opened("b").body)
    assert opened("b", take_over=True).status == 200
    assert error(opened("a")) == (409, "held")


def test_publishes_keep_the_order_of_their_epoch() -> None:
    world = World()
    assert error(world.publish(0)) == (409, "fenced")  # no session yet
    world = trained(5)
    world.open_session(5)
    assert error(world.publish(4)) == (409, "order")
    assert world.publish(5).status == 200
    again = world.publish(5)
    assert again.body == {"version": 5, "digest": version_digest(5).hex(), "publish_seq": 7}
    assert error(world.publish(5, salt=1)) == (409, "digest")
    assert error(world.publish(7)) == (409, "order")
    assert len(world.ledger.published) == 7


def test_a_new_epoch_revokes_versions_beyond_its_first_step() -> None:
    world = trained(4, staleness_max=0)
    world.work()
    assert world.state.status().groups.buffered > 0
    world.open_session(2)
    revoked = [
        a.record
        for a in world.actions
        if isinstance(a, Persist) and isinstance(a.record, VersionRevoked)
    ]
    assert sorted(record.version for record in revoked) == [3, 4]
    told = [m for m in world.peers["a"].inbox if isinstance(m, VersionsRevoked)]
    assert set(told[-1].versions) == {version_key(3), version_key(4)}
    assert world.state.status().workers[0].serving is None
    kept = [
        span.version
        for g in world.ledger.groups.values()
        for t in g.record.trajectories
        for span in t.spans
    ]
    frozen = {group for batch in world.ledger.frozen.values() for group in batch.groups}
    assert max(kept) == 3  # in the frozen batch of step 4
    assert all(
        span.version <= 2
        for number, stored in world.ledger.groups.items()
        if number not in frozen
        for trajectory in stored.record.trajectories
        for span in trajectory.spans
    )


def test_a_restarted_learner_gets_the_same_batches() -> None:
    world = trained(4)
    before = {step: world.digests[step] for step in (3, 4)}
    world.open_session(2)
    world.publish(2)
    for step in (3, 4):
        reply = batch_of(world, step)
        assert reply.digest == before[step]
        assert world.commit(step, before[step]).status == 200
    assert world.state.status().trajectories.trained == 16  # nothing counts twice


def test_a_learner_that_resumes_at_a_later_step_commits_the_frozen_batches() -> None:
    world = trained(2)
    batch_of(world, 3)
    world.open_session(3)
    commits = [
        a.record
        for a in world.actions
        if isinstance(a, Persist) and isinstance(a.record, BatchCommitted)
    ]
    assert [(commit.step, commit.epoch) for commit in commits] == [(1, 2), (2, 2), (3, 2)]
    assert world.state.status().committed_step == 3


def test_a_resume_below_the_checkpoint_is_refused_with_the_lowest_step() -> None:
    world = trained(4)
    assert world.checkpoint(3).body == {"checkpoint": 3}
    assert world.checkpoint(1).body == {"checkpoint": 3}
    reply = world.open_session(2)
    assert error(reply) == (409, "resume")
    assert isinstance(reply.body, dict)
    assert reply.body["lowest"] == 3
    assert world.ledger.epoch == 1
    assert world.open_session(3).status == 200


@pytest.mark.parametrize("beyond", [1, 1 << 62])
def test_a_resume_beyond_the_given_batches_is_refused(beyond: int) -> None:
    new = World()
    reply = new.open_session(beyond)
    assert error(reply) == (409, "resume")
    assert isinstance(reply.body, dict)
    assert reply.body["highest"] == 0
    world = trained(4)
    batch_of(world, 5)
    assert error(world.open_session(5 + beyond)) == (409, "resume")
    assert world.ledger.epoch == 1
    assert (
        world.open_session(5).status == 200
    )  # batch 5 was given out: somebody may have trained on it
    assert world.open_session(2).status == 200
    assert world.open_session(5).status == 200  # and in no later epoch is that forgotten
    world.crash()
    assert error(world.open_session(5 + beyond)) == (409, "resume")
    assert world.open_session(5).status == 200


def test_leases_of_a_revoked_version_are_cancelled_without_blame() -> None:
    world = trained(4)
    world.drain()
    worker = world.peers["a"]
    world.refit(worker)
    world.drain()
    held = list(worker.leases)
    assert held
    assert worker.serving == version_key(4)
    world.open_session(2)
    told = [message for message in worker.inbox if isinstance(message, LeaseCancelled)]
    assert {HeldLease(each.lease, each.attempt) for each in told} >= set(held)
    assert (worker.leases, world.state.status().groups.leases) == ({}, 0)
    assert {group.failures.total() for group in world.state._groups._groups} == {0}
    assert {peer.service.failures for peer in world.state._members} == {0}


def test_other_bytes_of_the_first_version_revoke_the_earlier_ones() -> None:
    world = trained(4)
    batch_of(world, 5)
    world.open_session(4)
    frozen = world.ledger.frozen[5]
    assert world.publish(4, salt=1).status == 200
    revoked = [
        a.record
        for a in world.actions
        if isinstance(a, Persist) and isinstance(a.record, VersionRevoked)
    ]
    assert [VersionKey(record.version, record.digest) for record in revoked] == [version_key(4)]
    assert VersionsRevoked(Epoch(2), (version_key(4),)) in world.peers["a"].inbox
    held = {group for batch in world.ledger.frozen.values() for group in batch.groups}
    assert not any(
        stored.record.uses([version_key(4)])
        for number, stored in world.ledger.groups.items()
        if number not in held
    )
    assert (
        batch_of(world, 5).digest == frozen.digest
    )  # as it is, with tokens of the revoked version
    assert serving(world) == version_key(4, 1)


def test_a_version_published_again_is_the_newest_and_workers_refit_to_it() -> None:
    world = trained(4)
    world.work()
    assert serving(world) == version_key(4)
    world.open_session(2)
    assert serving(world) is None
    reply = world.publish(2)
    assert isinstance(reply.body, dict)
    assert reply.body["publish_seq"] == 6
    assert world.publish(2).body == reply.body
    world.work()
    assert serving(world) == version_key(2)
    newest = world.state.status().newest_version
    assert newest is not None
    assert newest.publish_seq == 6


@pytest.mark.parametrize("crash", [False, True])
def test_a_worker_that_was_away_learns_which_versions_are_revoked(*, crash: bool) -> None:
    world = trained(4)
    world.work()
    away = world.peers["a"]
    world.handle(PeerDisconnected(away.session, "reset"))
    world.connect("b")
    world.open_session(2)
    assert serving(world) == version_key(4)
    if crash:
        world.crash()  # the peers come back with it
    else:
        world.connect("a")
    assert serving(world) is None
    assert away.open == []  # nor does it go on with what it held
    told = [message for message in away.inbox if isinstance(message, VersionsRevoked)]
    assert told[-1] == VersionsRevoked(Epoch(2), (version_key(4),))
    world.publish(2)
    world.work()
    assert away.serving == version_key(2)


def test_a_worker_that_refits_to_a_revoked_version_learns_of_the_revocation() -> None:
    world = trained(4)
    world.work()
    worker = world.peers["a"]
    world.open_session(3)
    told = len(worker.inbox)
    worker.serving = version_key(4)
    world.say(worker, RefitDone(Version(4), version_digest(4), 0.1, memory_ok=True))
    assert worker.inbox[told:] == [VersionsRevoked(Epoch(2), (version_key(4),))]
    assert worker.serving is None


def test_batches_come_in_order_and_not_too_far_ahead() -> None:
    world = trained(2, staleness_max=0)
    assert error(world.replies[world.ask_batch(5)]) == (409, "order")
    world.checkpoint(2)
    assert error(world.replies[world.ask_batch(2)]) == (409, "deleted")
    requests = [world.ask_batch(4) for _ in range(WAITING_MAX + 1)]
    assert error(world.replies[requests[-1]]) == (503, "busy")
    assert requests[0] not in world.replies


def test_the_batch_of_a_learner_that_hung_up_freezes_without_an_answer() -> None:
    world = trained(1, staleness_max=0)
    request = world.ask_batch(2)
    world.handle(RequestGone(request))
    world.work()
    assert request not in world.replies
    assert 2 in world.ledger.frozen


def test_commits_are_idempotent_checked_and_in_order() -> None:
    world = trained(2)
    reply = batch_of(world, 3)
    assert reply.digest is not None
    assert error(world.commit(4, reply.digest)) == (409, "order")
    assert error(world.commit(3, NO_DIGEST)) == (409, "digest")
    for _ in range(2):
        assert world.commit(3, reply.digest).body == {"publish_every": 1}
    assert world.state.status().trajectories.trained == 12
    assert error(world.commit(2, NO_DIGEST)) == (409, "digest")
    assert error(world.checkpoint(4)) == (409, "order")
    world.checkpoint(2)
    assert world.commit(1, NO_DIGEST).status == 200  # its batch is deleted; it was this one


def scores_of(reply: Reply, k: dict[str, float]) -> tuple[TrajectoryScore, ...]:
    """A score of every trajectory of the batch, by its worker; z is 2 k."""
    assert isinstance(reply.body, bytes)
    return tuple(
        TrajectoryScore(group.group, each.sample, k[each.worker], 2 * k[each.worker])
        for group in unpack_batch(reply.body).groups
        for each in group.trajectories
    )


def learner_found(world: World) -> dict[str, tuple[float | None, float | None]]:
    return {each.id: (each.learner_k, each.learner_z) for each in world.state.status().workers}


def test_the_learners_scores_count_once_for_the_workers_that_wrote() -> None:
    world = World(rules(staleness_max=1))
    world.connect("seed", kind="seed", slots=0)
    for name in "ab":
        world.connect(name, slots=1)
    train(world, 1)
    batch = batch_of(world, 2)
    assert batch.digest is not None
    scores = scores_of(batch, {"a": 0.5, "b": 4.0})
    assert {score.k for score in scores} == {0.5, 4.0}, "both workers wrote something"
    strange = (
        TrajectoryScore(10**9, 0, 100.0, 100.0),
        TrajectoryScore(scores[0].group, 99, 1.0, 1.0),
    )
    assert learner_found(world) == {"a": (None, None), "b": (None, None)}
    assert world.commit(2, batch.digest, scores=(*scores, *strange)).status == 200
    found = {"a": (0.5, 1.0), "b": (4.0, 8.0)}
    assert learner_found(world) == found
    worse = scores_of(batch, {"a": 9.0, "b": 9.0})
    assert world.commit(2, batch.digest, scores=worse).status == 200
    world.open_session(1)
    world.publish(1)
    assert world.commit(2, batch.digest, scores=worse).status == 200
    assert learner_found(world) == found, "a step that is trained again counts once"


def test_a_refused_commit_changes_no_scores() -> None:
    world = trained(2)
    batch = batch_of(world, 3)
    scores = scores_of(batch, {"a": 0.5})
    assert error(world.commit(3, NO_DIGEST, scores=scores)) == (409, "digest")
    assert learner_found(world) == {"a": (None, None)}


def test_the_answer_to_a_commit_names_the_publish_period() -> None:
    world = trained(3, publish_every="auto")
    world.state._statistics.measurements.t_bcast.samples.extend([1.5] * 32)
    reply = batch_of(world, 4)
    assert reply.digest is not None
    assert world.commit(4, reply.digest, t_train_s=1.0).body == {"publish_every": 2}


def test_refused_groups_are_replaced_under_a_new_digest() -> None:
    world = trained(1)
    before = batch_of(world, 2)
    first, second = world.ledger.frozen[2].groups
    assert world.refuse(2, first).body == {"replaced": 1}
    assert world.refuse(2, first).body == {"replaced": 0}  # a repeated call
    assert first not in world.ledger.groups
    after = batch_of(world, 2)
    assert after.digest != before.digest
    assert world.ledger.frozen[2].groups[0] == second
    assert world.ledger.frozen[2].refusals == 1
    assert before.digest is not None
    assert error(world.commit(2, before.digest)) == (409, "digest")
    assert error(world.refuse(1, first)) == (409, "order")


def test_a_step_refused_too_often_stops_the_run_with_the_reasons() -> None:
    world = trained(1)
    for _ in range(REFUSALS_MAX):
        assert world.stopped is None
        batch_of(world, 2)
        world.refuse(2, world.ledger.frozen[2].groups[0])
    assert world.stopped == f"batch 2 was refused {REFUSALS_MAX} times: bad; bad; bad; bad; bad"


def test_refusals_are_counted_per_session() -> None:
    world = trained(1)
    for refusals in (REFUSALS_MAX - 1, 1):
        world.open_session(1)
        world.publish(1)
        for _ in range(refusals):
            batch_of(world, 2)
            world.refuse(2, world.ledger.frozen[2].groups[0])
    assert world.stopped is None
    batch_of(world, 2)
    assert world.ledger.frozen[2].refusals == REFUSALS_MAX


def test_a_crash_after_a_refusal_leaves_the_batch_open() -> None:
    world = trained(1, staleness_max=0)
    batch_of(world, 2)
    world.refuse(2, world.ledger.frozen[2].groups[0])
    world.crash()
    assert world.state.status().open_step == 2
    batch_of(world, 2)
    assert world.ledger.frozen[2].refusals >= 1


@pytest.mark.parametrize("step", [0, 3])
def test_epochs_survive_a_crash(step: int) -> None:
    world = trained(4)
    world.open_session(step)
    world.publish(step)
    world.crash()
    status = world.state.status()
    assert (status.epoch, status.committed_step, status.open_step) == (2, step, 5)
    assert world.newest_version == step
    assert world.publish(step).status == 200
    assert world.call(lambda n: BatchAsked(n, Epoch(1), 1)).status == 409
    assert Version(step) in {record.version for record in world.ledger.published.values()}


def test_the_learners_goal_gives_the_expected_end_of_the_run() -> None:
    world = World()
    world.connect("seed", kind="seed", slots=0)
    world.connect("a", slots=4)
    train(world, 5, planned=25)
    learner = world.state.status(now=world.now).learner
    assert (learner.steps, learner.heard, learner.software) == (25, True, "")
    assert learner.eta_s == pytest.approx(20 * 1.0, rel=0.1), "a step takes it a second"
    world.crash()
    learner = world.state.status(now=world.now).learner
    assert (learner.steps, learner.heard, learner.eta_s) == (25, False, None)


def test_the_rules_of_a_session_are_told_without_opening_one() -> None:
    world = World()
    before: Any = world.call(RulesAsked).body
    assert (before["epoch"], before["answer_tokens"]) == (0, RULES.tasks[0].max_new_tokens)
    world.open_session(0)
    opened: Any = world.call(RulesAsked).body
    assert opened == {**before, "epoch": 1}


def test_the_status_has_what_the_learner_measured_in_the_last_step() -> None:
    world = trained(1)
    assert world.state.status().learner.figures == StepFigures()
    digest, figures = batch_of(world, 2).digest, StepFigures(truncated=0.25, loss=-0.5)
    assert digest is not None
    world.call(lambda n: CommitAsked(n, world.ledger.epoch, 2, digest, 1.0, figures=figures))
    assert world.state.status().learner.figures == figures
    world.open_session(2)
    assert world.state.status().learner.figures == StepFigures()


def test_heartbeats_of_a_learner_count_only_in_its_own_session() -> None:
    world = trained(1)
    told = world.call(lambda number: AliveTold(number, world.ledger.epoch, "0.9"))
    assert (told.status, world.state.status().learner.software) == (200, "0.9")
    world.open_session(1)
    assert world.state.status().learner.software == ""
    told = world.call(lambda number: AliveTold(number, Epoch(1), "0.9"))
    assert told.status == 409
    assert world.state.status().learner.software == ""


def test_the_totals_of_a_run_survive_a_restart() -> None:
    world = trained(3)
    world.state._statistics.dropped("stale", 5, [])
    train(world, 1, start=3)
    before = world.state.status().totals
    assert (before.trained, before.dropped) == (4 * RULES.trajectories_per_step, 5)
    assert before.published == len(world.ledger.published)
    world.crash()
    assert world.state.status().totals == before
    assert world.state.status().trajectories.trained == 0, "counters begin anew"
    train(world, 1, start=4)
    assert world.state.status().totals.trained == 5 * RULES.trajectories_per_step


def test_a_batch_names_the_staleness_bound_of_its_making() -> None:
    world = trained(1, staleness_max=3)
    request = world.ask_batch(2)
    world.work()
    assert world.replies[request].staleness_max == 3


def test_a_change_of_the_automatic_publish_period_is_recorded() -> None:
    world = trained(2, publish_every="auto", staleness_max=4)

    def commit(step: int) -> list[str]:
        request = world.ask_batch(step)
        world.work()
        digest = world.replies[request].digest
        assert digest is not None
        world.commit(step, digest)
        notes = [each for each in world.actions if isinstance(each, Note)]
        return [each.text for each in notes if each.kind == "kappa"]

    commit(3)
    assert commit(4) == []
    before = world.state.status().publish_every
    for _ in range(50):
        world.state._statistics.measurements.t_bcast.add(2.5)
    told = commit(5)
    kappa = world.state.status().publish_every
    assert kappa > before
    assert told == [f"publish_every is {kappa} train steps from now on; it was {before}"]
    assert commit(6) == []

"""Links that break and processes that come back: a test for each promise (docs/design/exactly_once.md).

Through the whole machine, as a worker sees it. What the worker does itself: `tests/unit/core/worker/test_leases.py`.
"""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import LeaseId
from echo2d.core.cluster.events import PeerDisconnected
from echo2d.core.cluster.peer import FLIPS_MAX
from echo2d.core.protocol.control_messages import (
    Heartbeat,
    HeldLease,
    LeaseCancelled,
    LeaseFailed,
    LeaseProgress,
    PlanEdges,
    Refused,
    VersionSpan,
    Welcome,
)
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.work.events import (
    SampleScored,
)
from echo2d.core.work.leases import STUCK_S
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import (
    World,
    publish_step,
    rules,
    version_key,
    with_room,
)
from tests.support.rollouts import SILENCE_S, answers, dropped, grants, world_of

ONE_STEP = {"staleness_max": 0, "trajectories_per_step": 2}


def welcome_of(peer: FakePeer) -> Welcome:
    return next(message for message in peer.inbox[::-1] if isinstance(message, Welcome))


def cut(world: World, peer: FakePeer) -> None:
    world.handle(PeerDisconnected(peer.session, "reset"))


def pass_time(world: World, seconds: float, *alive: FakePeer) -> None:
    """These are heard all the time."""
    for _ in range(int(seconds)):
        world.pass_time(1.0)
        for peer in alive:
            world.say(peer, Heartbeat(0))


def taken_over() -> tuple[World, FakePeer, FakePeer, HeldLease]:
    """`one` was silent for too long; `two` works on its lease."""
    world, (one, two) = world_of(2, 2, **ONE_STEP)
    key = next(iter(one.leases))
    cut(world, one)
    pass_time(world, SILENCE_S + 1, two)
    assert HeldLease(key.lease, 1) in two.leases
    return world, one, two, key


# --- hello and welcome


def test_a_welcome_keeps_what_still_runs_and_cancels_the_rest() -> None:
    world, (worker,) = world_of(2)
    (key,) = worker.leases
    stranger = HeldLease(LeaseId(9), 0)
    worker.leases[stranger] = grants(worker)[0]
    cut(world, worker)
    world.connect(worker.name, slots=2)
    assert (welcome_of(worker).keep, welcome_of(worker).cancel) == ((key,), (stranger,))
    assert len(grants(worker)) == 1


def test_a_lease_that_the_hello_does_not_name_goes_to_another_worker_at_once() -> None:
    world, (one, two) = world_of(2, 2, **ONE_STEP)
    key = next(iter(one.leases))
    cut(world, one)
    one.forget(key)
    world.connect(one.name, slots=2, boot_id="another")
    assert [peer for peer in (one, two) if HeldLease(key.lease, 1) in peer.leases]


def test_an_unanswered_result_counts_although_its_lease_went_to_another_worker() -> None:
    world, one, two, key = taken_over()
    late = [one.finish(key, sample) for sample in (0, 1)]
    world.connect(one.name, slots=2)
    assert welcome_of(one).keep == (key,)
    world.drain()
    assert answers(one) == [(True, ""), (True, "")]
    assert HeldLease(key.lease, 1) not in two.leases, "nothing is left to do"
    assert late[0].attempt == 0


def test_a_lease_that_ended_in_silence_continues_if_no_worker_took_it_over() -> None:
    """A sole worker that was cut off for a while loses nothing."""
    world, (worker,) = world_of(2, **ONE_STEP)
    (key,) = worker.leases
    world.say(worker, worker.wrote(key, 0, 7))
    cut(world, worker)
    world.pass_time(SILENCE_S + 1)
    assert world.state.status().groups.leases == 0
    world.connect(worker.name, slots=2)
    assert (welcome_of(worker).keep, len(grants(worker))) == ((key,), 1)
    world.say(worker, worker.finish(key, 0))
    world.say(worker, worker.finish(key, 1))
    assert answers(worker) == [(True, ""), (True, "")]
    world.drain()
    assert world.state.status().groups.buffered == 1


def test_a_lease_is_revived_without_the_samples_of_another_worker() -> None:
    world, (one, two) = world_of(2, 1, **ONE_STEP)
    (key,) = one.leases
    world.say(one, one.wrote(key, 0, 7))
    cut(world, one)
    pass_time(world, SILENCE_S + 1, two)
    assert [grant.samples for grant in two.leases.values()] == [(0,)], "it goes on with one of them"
    world.connect(one.name, slots=2)
    assert welcome_of(one).keep == (key,)
    world.say(one, one.finish(key, 1))
    world.say(two, two.finish(*two.open[0]))
    assert (answers(one), answers(two)) == ([(True, "")], [(True, "")])
    assert world.state.status().groups.leases == 0


def test_generation_for_a_lease_that_another_worker_has_is_cancelled() -> None:
    world, one, two, key = taken_over()
    result = one.finish(key, 0)
    world.connect(one.name, slots=2)
    world.say(one, result)
    world.say(one, LeaseProgress(key.lease, key.attempt, ()))
    assert [message for message in one.inbox if isinstance(message, LeaseCancelled)][
        -1
    ].attempt == 0
    assert HeldLease(key.lease, 1) in two.leases, "it has the other sample"


def test_a_lease_whose_results_are_all_known_is_not_kept() -> None:
    world, one, two, key = taken_over()
    for at in list(two.open):
        world.say(two, two.finish(*at))
    world.connect(one.name, slots=2)
    assert welcome_of(one).cancel == (key,)


def test_versions_served_while_the_link_was_down_count() -> None:
    """The hello names what wrote for its leases, not only what is served now."""
    world, (one, two) = world_of(2, 2, staleness_max=2, trajectories_per_step=2)
    key = one.open[0][0]
    cut(world, one)
    for step in (1, 2):
        request = world.ask_batch(step)
        while request not in world.replies:
            world.refit(two)
            world.say(two, two.finish(*two.open[0]))
            world.drain()
        world.commit(step, world.digests[step])
        world.publish(step)
        world.drain()
    one.serving = version_key(2)
    result = one.finish(key, 0)
    spans = tuple(
        VersionSpan(at, at + 1, version_key(at).version, version_key(at).digest) for at in range(3)
    )
    result = one.unanswered[key, 0] = replace(result, spans=spans)
    one.served = (version_key(0), version_key(1))
    world.connect(one.name, slots=2)
    world.say(one, result)
    assert answers(one)[-1] == (True, "")


# --- attempts, duplicates, contradictions


def test_the_first_accepted_result_of_a_sample_wins() -> None:
    world, one, two, key = taken_over()
    world.say(two, two.finish(HeldLease(key.lease, 1), 0))
    result = one.finish(key, 0)
    world.connect(one.name, slots=2)
    world.say(one, result)
    assert answers(one)[-1] == (False, "another attempt was first")
    assert answers(two) == [(True, "")]


@pytest.mark.parametrize("restart", [False, True])
def test_an_identical_repeat_is_acknowledged_and_a_different_one_refused_and_counted(
    restart: bool,
) -> None:
    world, (worker,) = world_of(2)
    key, _ = worker.open[0]
    result = worker.finish(key, 0)
    world.say(worker, result)
    if restart:
        world.crash()
    world.say(worker, result)
    assert answers(worker)[-1] == (True, "")
    world.say(worker, replace(result, finish="length"))
    assert answers(worker)[-1] == (False, "a different result was accepted before")
    assert world.state.status().results_refused == {"a different result was accepted before": 1}


def test_a_repeat_is_acknowledged_after_a_restart_even_of_a_finished_group() -> None:
    world, (worker,) = world_of(2, **ONE_STEP)
    results = [worker.finish(*at) for at in list(worker.open)]
    for result in results:
        world.say(worker, result)
    world.ask_batch(1)
    world.drain()
    world.crash()
    world.say(worker, results[0])
    assert answers(worker)[-1] == (True, "")


# --- two live sessions


def test_the_newer_of_two_live_sessions_wins() -> None:
    world, (worker,) = world_of(2)
    (key,) = worker.leases
    old = worker.session
    world.connect(worker.name, slots=2)
    assert [m.reason for m in world_messages(world, old)] == ["superseded"]
    assert welcome_of(worker).keep == (key,)
    world.say(worker, worker.finish(key, 0))
    assert answers(worker) == [(True, "")]


def test_three_changes_of_session_a_minute_refuse_both() -> None:
    world, (worker,) = world_of(2)
    for _ in range(FLIPS_MAX):
        world.connect(worker.name, slots=2)
    assert worker.closed
    assert [m.reason for m in worker.inbox if isinstance(m, Refused)][-1] == "flapping"


def world_messages(world: World, session: int) -> list[Refused]:
    """The refusals that the last event sent to a session that is over."""
    sent = [action for action in world.actions if getattr(action, "session", None) == session]
    return [
        m for m in (getattr(action, "message", None) for action in sent) if isinstance(m, Refused)
    ]


# --- silence


def test_a_silent_worker_is_suspected_and_keeps_its_leases_for_a_while() -> None:
    world, (one, two) = world_of(2, 2, **ONE_STEP)
    key = next(iter(one.leases))
    pass_time(world, SILENCE_S - 1, two)
    states = {worker.name: worker.state for worker in world.state.status().workers}
    assert states == {"w0": "suspected", "w1": "joined"}
    assert not two.leases
    pass_time(world, 1, two)
    assert list(two.leases) == [HeldLease(key.lease, 1)]


def test_a_lease_is_renewed_by_progress() -> None:
    world, (worker,) = world_of(2, **ONE_STEP)
    (key,) = worker.leases
    for second in range(int(3 * SILENCE_S)):
        world.pass_time(1.0)
        world.say(worker, worker.wrote(key, 0, 5, start=min(second, 7)))
    assert world.state.status().groups.leases == 1
    assert len(grants(worker)) == 1


def test_a_lease_that_reports_the_same_tokens_again_and_again_ends_too() -> None:
    world, (one, two) = world_of(2, 2, **ONE_STEP)
    (key,) = one.leases
    for _ in range(int(STUCK_S) + 1):
        world.pass_time(1.0)
        world.say(one, one.wrote(key, 0, 5, 6))
        world.say(two, Heartbeat(0))
    assert HeldLease(key.lease, 1) in [HeldLease(each.lease, each.attempt) for each in grants(two)]
    assert key not in one.leases


def test_a_lease_whose_progress_has_no_token_ends_too() -> None:
    world, (one, two) = world_of(2, 2, **ONE_STEP)
    (key,) = one.leases
    for _ in range(int(STUCK_S)):
        world.pass_time(1.0)
        world.say(one, LeaseProgress(key.lease, key.attempt, ()))
        world.say(two, Heartbeat(0))
    assert list(two.leases) == [HeldLease(key.lease, 1)]


# --- the coordinator restarts


def test_workers_continue_their_leases_after_a_restart_and_none_is_granted_twice() -> None:
    world, (one, two) = world_of(2, 2)
    before = {peer.name: dict(peer.leases) for peer in (one, two)}
    world.crash()
    assert {peer.name: dict(peer.leases) for peer in (one, two)} == before
    assert all(len(grants(peer)) == 1 for peer in (one, two))
    publish_step(world, 1)
    assert dropped(world) == []


def test_the_silence_of_a_worker_counts_from_zero_after_a_restart() -> None:
    """A worker that does not come back is silent from the restart on."""
    world, (one, two) = world_of(2, 2, **ONE_STEP)
    (key,) = one.leases
    del world.peers[one.name]
    world.crash()
    pass_time(world, SILENCE_S - 1, two)
    assert not two.leases
    pass_time(world, 1, two)
    assert list(two.leases) == [HeldLease(key.lease, 1)]


def test_a_lease_that_was_recorded_but_never_sent_is_granted_again() -> None:
    """The coordinator died between its transaction and its answers."""
    world, (worker,) = world_of(2, **ONE_STEP)
    (key,) = worker.leases
    worker.forget(key)
    world.crash()
    assert list(worker.leases) == [HeldLease(key.lease, 1)]


def test_an_attempt_that_ended_before_the_restart_stays_ended() -> None:
    world, (one, two) = world_of(2, 2, **ONE_STEP)
    (key,) = one.leases
    one.forget(key)
    world.say(one, LeaseFailed(key.lease, 0, "engine fault"))
    assert list(two.leases) == [HeldLease(key.lease, 1)]
    world.crash()
    assert list(two.leases) == [HeldLease(key.lease, 1)]
    assert not one.leases
    assert world.state.status().groups.leases == 1


def test_late_results_of_ended_attempts_count_after_a_restart_too() -> None:
    world, (one, two) = world_of(2, 2, **ONE_STEP)
    (key,) = one.leases
    late = [one.finish(key, sample) for sample in (0, 1)]
    one.unanswered.clear()
    world.say(one, LeaseFailed(key.lease, 0, "engine fault"))
    world.crash()
    for result in late:
        world.say(one, result)
    assert answers(one) == [(True, ""), (True, "")]
    assert not two.leases


def test_samples_under_way_continue_at_other_workers_after_a_restart() -> None:
    """Progress is not durable: a worker tells it again, and then dies."""
    world, (one, two) = world_of(1, 1, staleness_max=0, group_size=1, trajectories_per_step=1)
    one, two = sorted((one, two), key=lambda peer: not peer.leases)
    (key,) = one.leases
    world.say(one, one.wrote(key, 0, 7, 8))
    world.crash()
    world.say(one, one.wrote(key, 0, 7, 8))
    world.say(one, one.wrote(key, 0, 9, start=2))
    world.say(one, LeaseFailed(key.lease, 0, "engine fault"))
    assert unpack_tokens(grants(two)[-1].prompt)[3:].tolist() == [7, 8, 9]


def test_plans_are_made_again_after_a_restart() -> None:
    world, (worker,) = world_of(2)
    before = {message.plan for message in worker.inbox if isinstance(message, PlanEdges)}
    worker.inbox.clear()
    world.crash()
    world.drain()
    after = {message.plan for message in worker.inbox if isinstance(message, PlanEdges)}
    assert before
    assert after
    assert not before & after


def test_a_changed_limit_ends_leases_that_no_longer_fit() -> None:
    world, (worker,) = world_of(1, staleness_max=0, group_size=1, trajectories_per_step=1)
    (key,) = worker.leases
    world.say(worker, worker.wrote(key, 0, 4, 5, 6))
    worker.forget(key)
    world.say(worker, LeaseFailed(key.lease, 0, "engine fault"))
    world.pass_time(2.0)
    world.say(worker, Heartbeat(0))
    assert grants(worker)[-1].max_new_tokens == 5
    world.rules = with_room(world.rules, 3)
    world.crash()
    assert grants(worker)[-1].max_new_tokens == 3


def test_a_smaller_group_size_ends_leases_of_removed_samples() -> None:
    world, (worker,) = world_of(2)
    late = [worker.finish(*at) for at in list(worker.open)]
    worker.unanswered.clear()
    world.rules = replace(world.rules, group_size=1)
    world.crash()
    for result in late:
        world.say(worker, result)
    assert [accepted for accepted, _ in answers(worker)] == [False, False]
    assert all(grant.samples == (0,) for grant in grants(worker)[1:])


def test_a_restarted_coordinator_scores_and_leases_all_open_samples() -> None:
    world, (worker,) = world_of(2)
    key, _ = worker.open[0]
    world.say(worker, worker.finish(key, 0))
    group = grants(worker)[0].group
    world.crash()
    assert key in worker.leases  # it goes on
    scoring = [event for event in world.pending if isinstance(event, SampleScored)]
    assert [(event.group, event.sample) for event in scoring] == [(group, 0)]
    assert [grant.group for grant in grants(worker)].count(group) == 1
    world.say(worker, worker.finish(key, 1))
    assert answers(worker)[-1] == (True, "")


def test_a_changed_group_size_drops_groups_that_do_not_fit() -> None:
    world, (worker,) = world_of(2)
    world.say(worker, worker.finish(worker.open[0][0], 1))
    world.rules = rules(group_size=1)
    world.crash()
    assert world.state.status().groups_dropped == {"rules": 1}

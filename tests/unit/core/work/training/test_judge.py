"""What becomes of results; each through the whole machine, as a worker sees it."""

from dataclasses import replace

from echo2d.core.base.ids import LeaseId
from echo2d.core.cluster.events import Persist
from echo2d.core.cluster.membership import REST_S_MAX
from echo2d.core.protocol.control_messages import (
    LeaseFailed,
    LeaseGranted,
    LeaseProgress,
    VersionSpan,
)
from echo2d.core.work.events import (
    SampleKept,
    ScoreSample,
)
from echo2d.core.work.training.judge import BAD_RESULTS_MAX
from tests.support.coordinator_world import (
    World,
    publish_step,
    version_key,
    with_room,
)
from tests.support.rollouts import answers, dropped, grants, world_of


def test_a_result_is_kept_answered_and_scored() -> None:
    world, (worker,) = world_of(2)
    key, sample = worker.open[0]
    actions = world.say(worker, worker.finish(key, sample))
    kept = next(
        a.record for a in actions if isinstance(a, Persist) and isinstance(a.record, SampleKept)
    )
    assert (kept.lease, kept.trajectory.worker) == (key.lease, worker.peer)
    assert answers(worker) == [(True, "")]
    assert any(isinstance(action, ScoreSample) for action in actions)
    assert world.state.status().tokens_accepted == 3


def test_results_for_leases_that_are_not_ones_own() -> None:
    world, (one, two) = world_of(2, 2)
    result = one.finish(*one.open[0])
    world.say(one, result)
    world.say(two, result)
    world.say(two, one.finish(*one.open[0]))
    world.say(two, replace(result, lease=LeaseId(7)))
    reasons = ["a different result was accepted before", "the lease is over", "no such lease"]
    assert answers(two) == [(False, reason) for reason in reasons]
    assert "no such lease" in world.state.status().faults[-1].text


def test_a_bad_result_is_refused_and_its_sample_leased_again() -> None:
    world, (worker,) = world_of(2)
    key, sample = worker.open[0]
    world.say(worker, worker.finish(key, sample, tokens=(99,)))
    assert answers(worker)[0][0] is False
    world.pass_time(1.0)  # it rests
    again = [grant for grant in grants(worker) if grant.group == grants(worker)[0].group][-1]
    assert again.samples == (sample,)


def test_a_span_names_only_what_its_worker_said_it_serves() -> None:
    world, (worker, _) = world_of(2, 2, staleness_max=1, trajectories_per_step=2)
    result = worker.finish(*worker.open[0])
    publish_step(world, 1)
    version, digest = version_key(1).version, version_key(1).digest
    world.say(worker, replace(result, spans=(VersionSpan(0, 3, version, digest),)))
    assert answers(worker)[-1] == (
        False,
        "version 1 is not published, revoked, or not acknowledged by this worker",
    )


def test_too_many_bad_results_end_the_group() -> None:
    world, (worker,) = world_of(1, group_size=1, trajectories_per_step=1)
    for _ in range(BAD_RESULTS_MAX):
        world.say(worker, worker.finish(*worker.open[0], tokens=(99,)))
        reasons = dropped(world)
        world.pass_time(REST_S_MAX)
        world.connect(worker.name, slots=1)
    assert reasons[0].startswith("result:")


def test_a_late_result_of_an_earlier_attempt_still_counts() -> None:
    world, (one, two) = world_of(2, 2, staleness_max=0, trajectories_per_step=2)
    key, _ = one.open[0]
    late = [one.finish(key, sample) for sample in (0, 1)]
    world.say(one, LeaseFailed(key.lease, key.attempt, "engine fault"))
    assert grants(two)[-1].attempt == 1
    for result in late:
        world.say(one, result)
    assert answers(one) == [(True, ""), (True, "")]
    assert two.leases == {}  # cancelled: nothing is left to do
    world.say(two, LeaseProgress(key.lease, 1, ()))
    world.drain()
    assert world.state.status().groups.buffered == 1


def test_a_worker_may_call_the_end_of_the_context_a_length() -> None:
    """Leases allow no more tokens than fit, so no engine has to know the model's context."""
    world, (worker,) = world_of(1, group_size=1, trajectories_per_step=1, context_max=6)
    [lease] = [m for m in worker.inbox if isinstance(m, LeaseGranted)][-1:]
    room = 6 - len(lease.prompt) // 4
    assert lease.max_new_tokens == room
    world.say(worker, worker.finish(*worker.open[0], tokens=[7] * room, finish="length"))
    assert _kept(world) == ("context", room)


def test_where_the_coordinator_does_not_know_the_context_workers_are_believed() -> None:
    world, (worker,) = world_of(1, group_size=1, trajectories_per_step=1)
    world.say(worker, worker.finish(*worker.open[0], tokens=[7, 7], finish="context"))
    assert _kept(world) == ("context", 2)


def _kept(world: World) -> tuple[str, int]:
    """How the last accepted answer ended, and its length."""
    (kept,) = [
        action.record.trajectory
        for action in world.actions
        if isinstance(action, Persist) and isinstance(action.record, SampleKept)
    ]
    return kept.finish, kept.length


def test_a_result_that_fitted_the_rules_before_a_restart_is_no_fault() -> None:
    world, (worker,) = world_of(1, group_size=1, trajectories_per_step=1)
    result = worker.finish(*worker.open[0], tokens=[7] * 8, finish="length")
    world.rules = with_room(world.rules, 16)
    world.crash()
    world.say(worker, result)
    assert not answers(worker)[-1][0]
    status = world.state.status()
    assert [fault for fault in status.faults if fault.kind == "result"] == []
    assert dropped(world) == []

"""Results, rewards, and how groups end; each through the whole machine, as a worker sees it."""

from dataclasses import replace

from echo2d.core.base.ids import GroupId, LeaseId
from echo2d.core.cluster.events import Note, Persist
from echo2d.core.cluster.peer import REST_S_MAX
from echo2d.core.cluster.quarantine import MISREPORTS_MAX, MISREPORTS_S, QUARANTINE_S
from echo2d.core.protocol.control_messages import (
    Heartbeat,
    LeaseFailed,
    LeaseGranted,
    LeaseProgress,
    VersionSpan,
)
from echo2d.core.protocol.trajectory import RewardPart
from echo2d.core.rules.audit import AuditRules
from echo2d.core.work.events import (
    LeaseGiven,
    SampleKept,
    SampleScored,
    ScoreSample,
)
from echo2d.core.work.training.group_table import BAD_RESULTS_MAX, LEASE_FAILURES_MAX
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.audited_world import LEARNT
from tests.support.coordinator_world import (
    World,
    publish_step,
    rules,
    train,
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


def test_a_result_for_another_workers_lease_is_refused() -> None:
    world, (one, two) = world_of(2, 2)
    result = one.finish(*one.open[0])
    world.say(one, result)
    world.say(two, result)
    world.say(two, one.finish(*one.open[0]))
    world.say(two, replace(result, lease=LeaseId(7)))
    reasons = ["a different result was accepted before", "the lease is over", "no such lease"]
    assert answers(two) == [(False, reason) for reason in reasons]
    assert "it was never given this lease" in world.state.status().faults[-1].text


def test_a_bad_result_is_refused_and_its_sample_is_leased_again() -> None:
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


def test_a_worker_alone_does_not_end_a_group_with_three_bad_results() -> None:
    world, (worker,) = world_of(1, group_size=1, trajectories_per_step=1)
    for times in range(1, LEASE_FAILURES_MAX + 1):
        world.say(worker, worker.finish(*worker.open[0], tokens=(99,)))
        reasons = dropped(world)
        assert bool(reasons) == (times == LEASE_FAILURES_MAX)
        world.pass_time(REST_S_MAX)
        world.connect(worker.name, slots=1)
    assert reasons[0].startswith("result:")


def test_bad_results_of_several_workers_end_a_group() -> None:
    one = {"group_size": 1, "trajectories_per_step": 1, "staleness_max": 0}
    world, workers = world_of(*[1] * BAD_RESULTS_MAX, **one)
    for said in range(1, BAD_RESULTS_MAX + 1):
        worker = next(each for each in workers if each.open)
        world.say(worker, worker.finish(*worker.open[0], tokens=(99,)))
        assert bool(dropped(world)) == (said == BAD_RESULTS_MAX)


def alerts_of(world: World, kind: str) -> list[str]:
    return [alert.sentence for alert in world.state.status().alerts if alert.kind == kind]


def test_a_stream_of_impossible_results_is_named_and_ends_in_quarantine() -> None:
    world, (liar, other) = world_of(4, 4)
    while not (found := alerts_of(world, "worker_misreports")):
        assert world.now < MISREPORTS_S
        if liar.open:
            world.say(liar, liar.finish(*liar.open[0], tokens=(99,)))
        world.pass_time(1.0)
        for worker in (liar, other):
            world.say(worker, Heartbeat(0))
    assert found[0].startswith("w0 is quarantined")
    assert "token revoke" in found[0]
    assert not liar.leases
    assert other.leases
    # A new start of its program does not end it, and time does.
    liar = world.connect(liar.name, slots=4, boot_id="new")
    world.refit(liar)
    assert not liar.leases
    assert alerts_of(world, "worker_misreports")
    ends_at = world.now + QUARANTINE_S
    while world.now < ends_at:
        world.pass_time(1.0)
        for worker in (liar, other):
            world.say(worker, Heartbeat(0))
    assert liar.leases
    assert not alerts_of(world, "worker_misreports")


def test_many_guessed_leases_end_in_quarantine_but_ended_leases_do_not() -> None:
    world, (guesser, late, _) = world_of(2, 2, 2)
    over = late.finish(*late.open[0])
    theirs = next(iter(late.leases))
    world.say(late, over)
    for number in range(MISREPORTS_MAX):
        world.say(guesser, replace(over, lease=LeaseId(1_000_000 + number)))
        world.say(guesser, LeaseProgress(theirs.lease, theirs.attempt, ()))
        world.say(guesser, LeaseFailed(theirs.lease, theirs.attempt, "so that it is lost"))
        world.say(late, replace(over, attempt=over.attempt))
        world.pass_time(1.0)
    assert [sentence.split()[0] for sentence in alerts_of(world, "worker_misreports")] == ["w0"]
    assert not guesser.leases
    assert late.leases


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


def test_a_worker_may_report_the_end_of_the_context_as_a_length() -> None:
    """Leases allow no more tokens than fit, so no engine has to know the model's context."""
    world, (worker,) = world_of(1, group_size=1, trajectories_per_step=1, context_max=6)
    [lease] = [m for m in worker.inbox if isinstance(m, LeaseGranted)][-1:]
    room = 6 - len(lease.prompt) // 4
    assert lease.max_new_tokens == room
    world.say(worker, worker.finish(*worker.open[0], tokens=[7] * room, finish="length"))
    assert _kept(world) == ("context", room)


def test_workers_are_believed_if_the_coordinator_does_not_know_the_context() -> None:
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


def test_the_last_result_shows_that_a_group_is_too_old_with_mask() -> None:
    """Until it is whole it might still get a token that counts; then it makes room at once."""
    world, (slow, _) = world_of(2, 2, staleness_max=1, over_stale="mask", trajectories_per_step=2)
    first, last = slow.open
    world.say(slow, slow.finish(*first))
    late = slow.finish(*last)
    publish_step(world, 1)
    publish_step(world, 2)
    world.say(slow, late)
    assert dropped(world) == ["stale"]


def scored(world: World) -> SampleScored:
    """The reward that comes next."""
    event = next(each for each in world.pending if isinstance(each, SampleScored))
    world.pending.remove(event)
    return event


def test_a_failed_reward_ends_its_group_and_is_reported() -> None:
    world, (worker,) = world_of(2)
    world.reward = lambda cursor, sample: None
    world.say(worker, worker.finish(*worker.open[0]))
    actions = world.handle(scored(world))
    assert dropped(world) == ["reward: crashed"]
    assert any(isinstance(action, Note) and action.kind == "reward" for action in actions)
    assert any(isinstance(a, Persist) and isinstance(a.record, LeaseGiven) for a in actions), (
        "its other slot is used again"
    )


def test_a_group_goes_on_without_a_sample_whose_reward_failed() -> None:
    """Also over a restart; another result for that sample is refused, and a repeat of it is known."""
    world, (worker,) = world_of(3, group_size=3, group_min=2, trajectories_per_step=3)
    world.reward = lambda cursor, sample: None if sample == 0 else float(sample)
    [(key, *_), *_] = worker.open
    first = worker.finish(key, 0)
    world.say(worker, first)
    world.handle(scored(world))
    assert dropped(world) == []
    world.crash()
    world.say(worker, first)
    assert answers(worker)[-1] == (True, "")
    world.say(worker, replace(first, finish="length"))
    assert answers(worker)[-1] == (False, "a different result was accepted before")
    world.say(worker, worker.finish(key, 1))
    world.say(worker, worker.finish(key, 2))
    world.drain()
    stored = world.ledger.groups[GroupId(0)]
    assert [each.sample for each in stored.record.trajectories] == [1, 2]
    assert stored.record.left_out == (0,)
    assert world.state.status().groups.buffered == 1


def test_a_group_that_would_be_too_small_is_dropped() -> None:
    world, (worker,) = world_of(3, group_size=3, group_min=2, trajectories_per_step=3)
    world.reward = lambda cursor, sample: None
    [(key, *_), *_] = worker.open
    for sample in range(2):
        world.say(worker, worker.finish(key, sample))
        world.handle(scored(world))
    assert dropped(world) == ["reward: crashed"]


def test_a_group_with_one_sample_left_teaches_nothing() -> None:
    world, (worker,) = world_of(2, group_min=1)
    world.reward = lambda cursor, sample: None if sample else 1.0
    [(key, *_), *_] = worker.open
    for sample in range(2):
        world.say(worker, worker.finish(key, sample))
        world.drain()
    assert world.state.status().groups_dropped == {"filtered": 1}


def test_a_reward_with_a_reason_counts_and_its_reason_is_reported() -> None:
    world, (worker,) = world_of(2)
    world.say(worker, worker.finish(*worker.open[0]))
    world.pending.clear()
    parts = (RewardPart("form", 0.5),)
    actions = world.handle(SampleScored(GroupId(0), 0, 0.0, "unjudged: too hard", parts))
    assert any(isinstance(each, Note) and each.kind == "unjudged" for each in actions)
    [kept] = world.ledger.groups[GroupId(0)].record.trajectories
    assert (kept.reward, kept.reward_parts) == (0.0, parts)


def test_a_reward_that_is_no_number_counts_as_failed() -> None:
    world, (worker,) = world_of(2)
    world.say(worker, worker.finish(*worker.open[0]))
    world.pending.clear()
    world.handle(SampleScored(GroupId(0), 0, float("inf"), ""))
    assert len(dropped(world)) == 1


def paired(*slots: int, **changes: object) -> tuple[World, list[FakePeer]]:
    """Groups of two, of which four samples are drawn."""
    tasks = tuple(replace(task, pairs=True) for task in rules().tasks)
    return world_of(*slots, tasks=tasks, **changes)


def test_the_samples_with_the_most_contrast_are_kept_of_twice_as_many() -> None:
    """Also over a restart. The others have been paid for: they count as wasted, and against no worker."""
    world, (worker,) = paired(4)
    world.reward = lambda cursor, sample: (0.5, 0.0, 0.5, 1.0)[sample]
    [(key, *_), *_] = worker.open
    for sample in range(3):
        world.say(worker, worker.finish(key, sample))
    world.drain()
    assert world.state.status().groups.buffered == 0
    last = worker.finish(key, 3)
    world.say(worker, last)
    world.crash()
    world.drain()
    stored = world.ledger.groups[GroupId(0)]
    assert [each.sample for each in stored.record.trajectories] == [1, 3]
    assert stored.record.left_out == (0, 2)
    status = world.state.status()
    assert (status.groups.buffered, status.trajectories.dropped) == (1, 2)
    assert status.groups_dropped == {}
    assert status.wasted_tokens.keys() == {"pairs"}
    world.crash()
    world.drain()
    assert world.state.status().groups.buffered == 1
    world.say(worker, last)
    assert answers(worker)[-1] == (True, "")


def test_a_step_of_pairs_is_as_large_as_any_other() -> None:
    world, _ = paired(8, 4)
    world.reward = lambda cursor, sample: float(sample == 3)
    train(world, 4)
    for batch in world.trained.values():
        assert batch.trajectories == world.rules.trajectories_per_step
        rewards = [each.reward for group in batch.groups for each in group.trajectories]
        assert sum(rewards) == len(rewards) / 2


def test_pairs_whose_rewards_are_all_equal_are_filtered_whole() -> None:
    world, (worker,) = paired(4)
    world.reward = lambda cursor, sample: 1.0
    [(key, *_), *_] = worker.open
    for sample in range(4):
        world.say(worker, worker.finish(key, sample))
    world.drain()
    status = world.state.status()
    assert (status.groups_dropped, status.trajectories.dropped) == ({"filtered": 1}, 4)


def test_failed_rewards_cost_a_pair_nothing_while_other_samples_are_left() -> None:
    world, (worker,) = paired(4)
    world.reward = lambda cursor, sample: None if sample < 2 else float(sample)
    [(key, *_), *_] = worker.open
    for sample in range(4):
        world.say(worker, worker.finish(key, sample))
    world.drain()
    stored = world.ledger.groups[GroupId(0)]
    assert [each.sample for each in stored.record.trajectories] == [2, 3]
    assert world.state.status().groups.buffered == 1


def test_groups_drawn_under_other_rules_are_dropped_after_a_restart() -> None:
    world, (worker,) = paired(4)
    [(key, *_), *_] = worker.open
    world.say(worker, worker.finish(key, 3))
    world.rules = rules()
    world.crash()
    assert world.state.status().groups_dropped == {"rules": 1}


def test_pairs_that_waited_for_an_audit_are_chosen_once_the_audit_is_off() -> None:
    world, (worker,) = paired(4)
    [(key, *_), *_] = worker.open
    world.ledger.append(LEARNT)
    world.rules = replace(
        world.rules,
        audit=AuditRules(
            trusted=("t",),
        ),
    )
    world.crash()
    for sample in range(4):
        world.say(worker, worker.finish(key, sample))
    world.drain()
    assert world.state.status().groups.buffered == 0
    world.rules = replace(world.rules, audit=None)
    world.crash()
    world.drain()
    assert world.ledger.groups[GroupId(0)].record.left_out == (2, 3)
    assert world.state.status().groups.buffered == 1

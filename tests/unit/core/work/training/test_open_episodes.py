"""Episodes of an environment: turns, parking and restarts; each through the whole machine, as workers see it."""

from dataclasses import replace
from typing import Any

import pytest

from echo2d.core.base.ids import GroupId
from echo2d.core.cluster.events import PeerDisconnected
from echo2d.core.protocol.control_messages import (
    Finish,
    Goodbye,
    Heartbeat,
    HeldLease,
    LeaseGranted,
)
from echo2d.core.protocol.trajectory import (
    GivenTokens,
    TrajectoryRecord,
    pack_tokens,
    unpack_tokens,
)
from echo2d.core.rules.tasks import EpisodeRules, TaskRules
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    StepEnvironment,
    TurnAnswered,
    TurnKept,
)
from echo2d_lab.faults.environment import given_after, turns_of
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.column_engine import columns_of
from tests.support.coordinator_world import World, publish_step
from tests.support.rollouts import SILENCE_S, answers, dropped, grants, world_of

ANSWER = (3, 7, 1)  # the last token ends it


def playing(
    *slots: int, context_max: int | None = None, columns: Any = (), **episode: Any
) -> tuple[World, list[FakePeer]]:
    """A run of one environment, and its workers."""
    task = TaskRules(
        max_new_tokens=8,
        stop_token_ids=(1,),
        episode=EpisodeRules(**{"turns_max": 16, "tokens_max": 64, **episode}),
    )
    world, workers = world_of(
        *slots,
        tasks=(task,),
        trajectories_per_step=2,
        staleness_max=0,
        context_max=context_max,
        columns=columns,
    )
    world.drain()
    return world, workers


def end_turn(world: World, peer: FakePeer) -> LeaseGranted:
    """The peer ends the turn that it has had longest; returns its lease."""
    key, sample = peer.open[0]
    lease = peer.leases[key]
    world.say(peer, peer.finish(key, sample, tokens=ANSWER))
    return lease


def steps(world: World) -> list[StepEnvironment]:
    return [action for action in world.actions if isinstance(action, StepEnvironment)]


def kept(world: World) -> list[TrajectoryRecord]:
    return list(world.ledger.groups[GroupId(0)].record.trajectories)


def play_out(world: World, *peers: FakePeer) -> None:
    """Until the group is complete."""
    while any(peer.open for peer in peers):
        for peer in peers:
            if peer.open:
                end_turn(world, peer)
        world.drain()


def test_an_episode_is_written_turn_by_turn() -> None:
    world, (worker,) = playing(2)
    samples = {sample: turns_of(0, sample) for sample in (0, 1)}
    assert samples == {0: 1, 1: 4}
    play_out(world, worker)
    one, many = kept(world)
    assert (one.turns, one.given, one.finish) == (1, (), "stop")
    assert many.turns == 4
    given = [given_after(turn) for turn in (1, 2, 3)]
    answer = list(ANSWER)
    expected = answer + [
        token for each in given for token in [*unpack_tokens(each).tolist(), *answer]
    ]
    assert unpack_tokens(many.tokens).tolist() == expected
    assert many.given == (GivenTokens(3, 6), GivenTokens(9, 12), GivenTokens(15, 18))
    assert [(span.start, span.end) for span in many.spans] == [(0, 3), (6, 9), (12, 15), (18, 21)]
    assert [each.reward for each in kept(world)] == [0.0, 1.0]
    assert world.state.status().groups.buffered == 1
    assert not any(many.logprobs[4 * each.start : 4 * each.end].strip(b"\0") for each in many.given)


@pytest.mark.parametrize("without", [None, 2])
def test_columns_continue_over_turns_unless_one_turn_lacks_them(without: int | None) -> None:
    world, (worker,) = playing(2, columns=("experts", "half"))
    for turn in range(4):
        for key, sample in list(worker.open):
            said = worker.finish(key, sample, tokens=ANSWER)
            more = () if turn == without else columns_of(ANSWER)
            world.say(worker, replace(said, columns=more))
        world.drain()
    one, many = kept(world)
    assert one.columns == columns_of(ANSWER)
    assert many.turns == 4
    given = [0] * 3
    expected = columns_of([*ANSWER, *given, *ANSWER, *given, *ANSWER, *given, *ANSWER])
    blank = [at for each in many.given for at in range(each.start, each.end)]
    assert len(many.columns) == (2 if without is None else 0)
    for found, wanted in zip(many.columns, expected, strict=False):
        numbers = wanted.array.copy()
        numbers[blank] = 0
        assert found.array.tolist() == numbers.tolist()


def test_a_sample_holds_no_slot_between_two_turns() -> None:
    world, (worker,) = playing(1)
    end_turn(world, worker)
    assert world.state.status().groups.leases == 1, "the other sample has the slot"
    [step] = steps(world)
    assert (step.turn, step.output.turn_start, step.state, step.again) == (1, 0, None, False)
    assert unpack_tokens(step.output.tokens).tolist() == list(ANSWER)


def test_the_status_says_which_samples_wait_between_two_turns() -> None:
    world, (worker,) = playing(1)

    def episodes() -> tuple[int, int, float | None, float | None]:
        found = world.state.status(now=world.now).tasks[0].episodes
        assert found is not None
        return found.parked, found.waiting, found.tool_s_median, found.tool_s_p90

    assert episodes() == (0, 0, None, None)
    end_turn(world, worker)
    assert episodes() == (1, 0, None, None)
    world.now += 2.5
    world.drain()
    assert episodes() == (0, 0, 2.5, 2.5), "the first sample has one turn"
    end_turn(world, worker)
    world.handle(PeerDisconnected(worker.session, "reset"))
    world.now += 0.5
    assert episodes() == (1, 0, 2.5, 2.5)
    world.drain()
    assert episodes() == (0, 1, 0.5, 2.5), "nobody is here to write its second turn"


def test_the_next_turn_continues_from_all_earlier_tokens() -> None:
    world, (worker,) = playing(2)
    first = next(lease for lease in grants(worker) if 1 in lease.samples)
    world.say(worker, worker.finish(*worker.open[-1], tokens=ANSWER))
    world.drain()
    second = grants(worker)[-1]
    assert second.samples == (1,)
    assert second.prompt == first.prompt + bytes_of(ANSWER) + given_after(1)
    assert (second.written, second.earlier, second.max_new_tokens) == (0, 3, 8)
    assert second.rng_seeds == (first.rng_seeds[first.samples.index(1)],)


def wait_for_silence(world: World, alive: FakePeer) -> None:
    """Until the leases of a peer that is not heard any more go to others."""
    for _ in range(int(2 * SILENCE_S)):
        world.pass_time(1.0)
        world.say(alive, Heartbeat(0))
        for key, sample in alive.open:
            world.say(alive, alive.wrote(key, sample))


def bytes_of(tokens: tuple[int, ...]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def test_a_turn_that_its_worker_did_not_finish_continues_at_another() -> None:
    """Only the unfinished turn can be lost; the turns before it are not written again."""
    world, (one, two) = playing(2, 2)
    holder = one if any(sample == 1 for _, sample in one.open) else two
    other = two if holder is one else one
    world.say(holder, holder.finish(*next(e for e in holder.open if e[1] == 1), tokens=ANSWER))
    world.drain()
    lease = grants(holder)[-1]
    assert lease.samples == (1,), "it goes back to the worker that has the prefix"
    key = next(each for each, sample in holder.open if sample == 1)
    world.say(holder, holder.wrote(key, 1, 5, 6))
    world.handle(PeerDisconnected(holder.session, "reset"))
    wait_for_silence(world, other)
    moved = next(each for each in grants(other) if each.samples == (1,) and each.earlier)
    assert moved.prompt == lease.prompt + bytes_of((5, 6))
    assert (moved.written, moved.earlier, moved.max_new_tokens) == (2, 3, 6)


def test_a_branch_that_its_worker_did_not_finish_continues_at_another() -> None:
    """The context holds the prompt and the branch alone, so what came before takes no room there."""
    world, (one, two) = playing(2, 2, context_max=9)
    worker = one if any(sample == 1 for _, sample in one.open) else two
    other = two if worker is one else one
    key = next(key for key, sample in worker.open if sample == 1)
    world.say(worker, worker.finish(key, 1, tokens=ANSWER))
    [step], stepped = steps(world), world.pending.pop()
    assert isinstance(stepped, EnvironmentStepped)
    world.pending.append(replace(stepped, anew=True))
    world.drain()
    lease = grants(worker)[-1]
    branch = step.prompt + stepped.tokens
    assert lease.prompt == branch
    world.say(worker, worker.wrote(HeldLease(lease.lease, lease.attempt), 1, 7, 8))
    world.say(worker, Goodbye("SIGTERM"))
    moved = next(each for each in grants(other) if each.samples == (1,) and each.earlier)
    assert (moved.prompt, moved.written) == (branch + pack_tokens([7, 8]), 2)


def test_a_turn_goes_to_another_worker_once_its_own_serves_another_version() -> None:
    world, (one, two) = playing(1, 1)
    holder = one if one.open[0][1] == 1 else two
    other = two if holder is one else one
    end_turn(world, holder)
    world.publish(0, salt=1)
    world.drain()
    assert holder.serving is not None
    assert [lease.samples for lease in grants(holder)[-1:]] == [(1,)]
    assert other.open


def test_a_restarted_coordinator_asks_the_environment_again_and_loses_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, (worker,) = playing(2)
    end_turn(world, worker)
    end_turn(world, worker)
    assert len(world.pending) == 2
    again: list[StepEnvironment] = []
    answer = world.environment.step

    def noted(order: StepEnvironment, reward: float | None) -> EnvironmentStepped | EpisodeEnded:
        again.append(order)
        return answer(order, reward)

    monkeypatch.setattr(world.environment, "step", noted)
    world.crash()
    world.drain()
    assert [(each.sample, each.turn, each.again) for each in again] == [(0, 1, True), (1, 1, True)]
    play_out(world, worker)
    assert [(each.sample, each.turns) for each in kept(world)] == [(0, 1), (1, 4)]


def test_an_answered_turn_is_never_requested_again() -> None:
    """`ModelEnvironment` fails if it is; here the coordinator dies after every event."""
    world, (worker,) = playing(2)
    for _ in range(200):
        if world.state.status().groups.buffered:
            break
        answers_at = [
            at
            for at, event in enumerate(world.pending)
            if isinstance(event, EnvironmentStepped | EpisodeEnded)
        ]
        if answers_at:
            world.deliver(answers_at[0])
        elif worker.open:
            end_turn(world, worker)
        world.crash()
        if worker.ready is not None:
            world.refit(worker)
    assert [(each.sample, each.turns) for each in kept(world)] == [(0, 1), (1, 4)]


@pytest.mark.parametrize(
    ("limits", "turns", "tokens"), [({"turns_max": 2}, 2, 9), ({"tokens_max": 14}, 3, 14)]
)
def test_an_episode_without_room_for_another_turn_is_cut_off(
    limits: dict[str, int], turns: int, tokens: int
) -> None:
    """Its reward is 0, whatever the environment would have said; and its process forgets it."""
    world, (worker,) = playing(2, **limits)
    world.reward = lambda cursor, sample: 1.0
    forgotten: list[ForgetEpisode] = []
    while worker.open:
        key, sample = worker.open[0]
        room = worker.leases[key].max_new_tokens
        answer = ANSWER if room >= len(ANSWER) else (7,) * room
        finish: Finish = "stop" if room >= len(ANSWER) else "length"
        world.say(worker, worker.finish(key, sample, tokens=answer, finish=finish))
        while world.pending:
            world.deliver()
            forgotten += [each for each in world.actions if isinstance(each, ForgetEpisode)]
    assert [(each.turns, each.reward) for each in kept(world)] == [(1, 1.0), (turns, 0.0)]
    assert kept(world)[1].length == tokens
    assert [each.sample for each in forgotten] == [1]


def test_an_environment_that_fails_costs_only_its_sample() -> None:
    world, (worker,) = playing(2)
    world.reward = lambda cursor, sample: None if sample == 0 else 1.0
    end_turn(world, worker)
    world.deliver()
    assert dropped(world) == ["reward: crashed"], "group_min is 2"


def test_answers_of_an_environment_that_come_twice_or_too_late_change_nothing() -> None:
    world, (worker,) = playing(2)
    world.say(worker, worker.finish(*worker.open[-1], tokens=ANSWER))
    [step] = steps(world)
    answer = world.pending[0]
    assert isinstance(answer, EnvironmentStepped)
    world.drain()
    before = list(world.ledger.turns[GroupId(0), 1])
    for late in (
        answer,
        EpisodeEnded(step.group, 1, 0, 1, 1.0),
        EpisodeEnded(step.group, 1, 1, 2, 1.0),
        EpisodeEnded(GroupId(77), 1, 0, 1, 1.0),
    ):
        assert [a for a in world.handle(late) if not isinstance(a, StepEnvironment)] == []
    assert world.ledger.turns[GroupId(0), 1] == before


def test_a_repeated_turn_is_recognised_even_after_a_restart() -> None:
    world, (worker,) = playing(2)
    key, sample = worker.open[-1]
    result = worker.finish(key, sample, tokens=ANSWER)
    world.say(worker, result)
    world.drain()
    world.crash()
    world.say(worker, result)
    assert answers(worker)[-1] == (True, "")
    assert len(world.ledger.turns[GroupId(0), 1]) == 1


def test_episodes_of_a_revoked_version_begin_again() -> None:
    """The turns that it wrote are forgotten, and the environment is told."""
    world, (worker,) = playing(2)
    world.say(worker, worker.finish(*worker.open[-1], tokens=ANSWER))
    world.drain()
    assert isinstance(world.ledger.turns[GroupId(0), 1][0][0], TurnKept)
    assert isinstance(world.ledger.turns[GroupId(0), 1][0][1], TurnAnswered)
    world.open_session()
    world.publish(0, salt=9)
    assert any(isinstance(action, ForgetEpisode) for action in world.actions)
    assert (GroupId(0), 1) not in world.ledger.turns


def test_an_agent_learns_whether_its_end_counts() -> None:
    """With mask only the last end tells that a group is too old. Its agent waits for an answer, too."""
    task = TaskRules(
        max_new_tokens=8,
        stop_token_ids=(1,),
        episode=EpisodeRules(
            tokens_max=64,
            outside=True,
            turns_max=16,
        ),
    )
    masks: dict[str, Any] = {"staleness_max": 1, "over_stale": "mask"}
    world, (worker,) = world_of(2, tasks=(task,), trajectories_per_step=2, **masks)
    world.drain()
    for _ in range(2):
        end_turn(world, worker)
    # The test itself ends the episodes of group 0.
    world.pending = [
        each
        for each in world.pending
        if not isinstance(each, EnvironmentStepped | EpisodeEnded) or each.group
    ]
    world.handle(EpisodeEnded(GroupId(0), 0, 0, 1, 1.0))
    assert ForgetEpisode(GroupId(0), 0, "", ended=True) in world.actions
    publish_step(world, 1)
    publish_step(world, 2)
    world.handle(EpisodeEnded(GroupId(0), 1, 0, 1, 1.0))
    assert dropped(world) == ["stale"]
    assert ForgetEpisode(GroupId(0), 1, "", ended=False) in world.actions

"""Each version is scored as a whole and by itself, whatever else happens."""

import math
from dataclasses import replace
from typing import Any

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import Note, PeerDisconnected, PeerRevoked
from echo2d.core.coordinator.events import DeadlinePassed, EvaluationsAsked
from echo2d.core.protocol.control_messages import (
    HeldLease,
    LeaseFailed,
    LeaseGranted,
    RefitDone,
    SampleAnswered,
    VersionSpan,
)
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.rules.audit import AuditRules
from echo2d.core.rules.tasks import EpisodeRules, EvalRules, TaskRules
from echo2d.core.work.evaluation.evaluations import EVALUATION_AVOID_S
from echo2d.core.work.evaluation.events import Evaluated, PassAt
from echo2d.core.work.evaluation.json_form import evaluated_json
from echo2d.core.work.evaluation.open_evaluation import ANSWER_FAILURES_MAX, EVALUATION
from echo2d.core.work.evaluation.questions import ROWS_MAX
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    StepEnvironment,
)
from echo2d.core.work.leases import group_of, kind_of
from echo2d_lab.faults.environment import given_after, turns_of
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, train, version_key
from tests.support.rollouts import world_of

HELD = TaskRules("held", sampling=Sampling(0.0), max_new_tokens=6, stop_token_ids=(1,))
EVAL = EvalRules(
    HELD,
    every=2,
    samples=2,
    rows=3,
    hold_s=30.0,
    solved_at=1.0,
)
PLAYED = replace(
    EVAL,
    task=replace(
        HELD,
        episode=EpisodeRules(
            turns_max=16,
            tokens_max=8192,
        ),
    ),
)


def evaluated(world: World) -> list[Evaluated]:
    return world.ledger.evaluated


def of_evaluations(peer: FakePeer) -> list[LeaseGranted]:
    return [m for m in peer.inbox if isinstance(m, LeaseGranted) and kind_of(m.group) == EVALUATION]


def scoring(*slots: int, rules: EvalRules = EVAL, **changes: object) -> World:
    return world_of(*slots, evals=(rules,), **changes)[0]


def test_the_first_version_and_every_second_one_are_scored_whole() -> None:
    world = scoring(4, 4)
    train(world, 5)
    world.work()
    found = evaluated(world)
    assert [each.version for each in found] == [0, 2, 4]
    assert [each.number for each in found] == [1, 2, 3]
    assert {(each.name, each.rows, each.of, each.samples) for each in found} == {("held", 3, 3, 2)}
    assert {each.digest for each in found} == {version_key(v).digest for v in (0, 2, 4)}
    # One of the two samples is right (`MemoryRun`).
    assert {(each.mean, each.passes) for each in found} == {(0.5, (PassAt(1, 0.5), PassAt(2, 1.0)))}
    assert {(each.tokens, each.truncated) for each in found} == {(3.0, 0.0)}


def test_a_lease_names_one_version_and_the_evaluations_own_sampling() -> None:
    world = scoring(8)
    train(world, 3)
    world.work()
    leases = of_evaluations(world.peers["w0"])
    assert {(lease.oldest, lease.hold_s) for lease in leases} == {(0, 30.0), (2, 30.0)}
    assert {(lease.sampling, lease.max_new_tokens) for lease in leases} == {(Sampling(0.0), 6)}
    by_version = [
        [lease.rng_seeds for lease in leases if lease.oldest == version] for version in (0, 2)
    ]
    assert by_version[0] == by_version[1]


def test_questions_of_an_evaluation_never_enter_a_batch() -> None:
    """The rows of the task are those of the evaluation, in part: they are left out of training."""
    world = World(replace(World().rules, evals=(EVAL,)))
    world.rows = lambda cursor: f"row {cursor}"
    world.connect("seed", kind="seed", slots=0)
    world.connect("w0", slots=8)
    train(world, 3)
    world.work()
    rows = {g.source.row for g in world.ledger.groups.values()}
    assert rows
    assert not rows & {"row 0", "row 1", "row 2"}
    assert all(
        trajectory.source.task != "held"
        for batch in world.trained.values()
        for group in batch.groups
        for trajectory in group.trajectories
    )


def open_evaluation(world: World, name: str = "w0") -> list[tuple[HeldLease, int]]:
    """The answers of evaluations that this worker has still to write."""
    peer = world.peers[name]
    return [each for each in peer.open if kind_of(peer.leases[each[0]].group) == EVALUATION]


def write_for_the_run(world: World) -> None:
    """All workers write what is for the run, and nothing for evaluations."""
    while True:
        for peer in world.peers.values():
            rest = [each for each in peer.open if each not in open_evaluation(world, peer.name)]
            if rest and peer.serving is not None:
                world.say(peer, peer.finish(*rest[0]))
                break
        else:
            if not world.pending:
                return
        world.drain()


def at_version_2(*slots: int, rules: EvalRules = EVAL) -> World:
    """Workers serve version 2, whose evaluation has just begun."""
    world = scoring(*slots, rules=rules)
    train(world, 2)
    world.drain()
    for peer in list(world.peers.values()):
        world.refit(peer)
    return world


def train_step_3(world: World) -> None:
    waiting = world.ask_batch(3)
    write_for_the_run(world)
    digest = world.replies[waiting].digest
    assert digest is not None
    world.commit(3, digest)
    world.publish(3)
    world.drain()


def test_a_score_names_its_number_of_answers_when_no_worker_serves_the_version() -> None:
    """The worker gives the lease back when the newer version has waited for long enough."""
    world = at_version_2(4)
    worker = world.peers["w0"]
    for answer in open_evaluation(world):
        world.say(worker, worker.finish(*answer))
    world.drain()
    train_step_3(world)
    assert worker.ready == version_key(3)
    assert not world.refit(worker), "it waits for the lease"
    for key in {key for key, _ in open_evaluation(world)}:
        worker.forget(key)
        world.say(worker, LeaseFailed(key.lease, key.attempt, "a newer version is loaded"))
    # Until it has loaded the newer version it serves this one, and gets no lease of it any more.
    assert not open_evaluation(world)
    assert [(each.version, each.rows, each.of) for each in evaluated(world)] == [
        (0, 3, 3),
        (2, 2, 3),
    ]


def test_an_answer_partly_written_by_another_version_does_not_count() -> None:
    world = at_version_2(4)
    worker = world.peers["w0"]
    (key, sample), *_ = open_evaluation(world)
    mixed = worker.finish(key, sample)
    old = version_key(1)
    spans = (VersionSpan(0, 1, old.version, old.digest), mixed.spans[0]._replace(start=1))
    actions = world.say(worker, replace(mixed, spans=spans))
    assert [each.kind for each in actions if isinstance(each, Note)] == ["result"]
    worker.forget(key)
    world.pass_time(EVALUATION_AVOID_S + 1.0)
    world.connect("w0")
    world.work()
    assert [(each.version, each.rows) for each in evaluated(world)] == [(0, 3), (2, 3)]


def test_a_worker_that_fails_all_its_leases_costs_little() -> None:
    """It rests, and others write what it gave back."""
    world = scoring(2, 2, rules=replace(EVAL, rows=20))
    train(world, 2)
    world.drain()
    bad = world.peers["w1"]
    for _ in range(200):
        for peer in world.peers.values():
            world.refit(peer)
        world.drain()
        failed = {key for key, _ in open_evaluation(world, "w1")}
        for key in failed:
            bad.forget(key)
            world.say(bad, LeaseFailed(key.lease, key.attempt, "out of memory"))
        good = world.peers["w0"]
        for answer in list(good.open):
            if answer in good.open:
                world.say(good, good.finish(*answer))
    assert [(each.version, each.rows) for each in evaluated(world)] == [(0, 20), (2, 20)]
    faults = [each for each in world.state.status().faults if each.kind == "lease"]
    assert [each.text for each in faults] == ["w1: out of memory"]


@pytest.mark.parametrize("samples", [2, 3, 6])
def test_more_answers_to_a_question_than_a_group_has_are_written_beside_the_run(
    samples: int,
) -> None:
    """All of them need not find room at once."""
    world = scoring(2, 2, rules=replace(EVAL, samples=samples))
    train(world, 6)
    world.work()
    assert [(each.version, each.rows) for each in evaluated(world)] == [
        (version, 3) for version in (0, 2, 4, 6)
    ]


def test_a_version_that_is_published_again_is_scored_again() -> None:
    world = scoring(4)
    train(world, 2)
    world.work()
    world.open_session(1)
    world.publish(1)
    waiting = world.ask_batch(2)
    world.work()
    digest = world.replies[waiting].digest
    assert digest is not None
    world.commit(2, digest)
    world.publish(2, salt=1)
    world.work()
    assert [(each.version, each.digest) for each in evaluated(world)] == [
        (0, version_key(0).digest),
        (2, version_key(2).digest),
        (2, version_key(2, 1).digest),
    ]


def test_groups_of_rows_held_out_since_a_restart_are_not_trained_on() -> None:
    world = World(replace(World().rules, trajectories_per_step=8))
    world.rows = lambda cursor: f"row {cursor}"
    world.connect("seed", kind="seed", slots=0)
    world.connect("w0", slots=16)
    train(world, 0)
    world.work()
    assert world.state.status().groups.buffered > 2
    world.rules = replace(world.rules, evals=(EVAL,))
    world.crash()
    world.work()
    train(world, 3)
    rows = {g.trajectories[0].source.row for b in world.trained.values() for g in b.groups}
    assert len(rows) == 12
    assert not rows & {"row 0", "row 1", "row 2"}


def test_an_answer_at_the_end_of_a_context_that_only_the_worker_knows_counts() -> None:
    world = at_version_2(4)
    worker = world.peers["w0"]
    key, sample = open_evaluation(world)[0]
    world.say(worker, worker.finish(key, sample, tokens=[7, 8], finish="context"))
    world.work()
    last = evaluated(world)[-1]
    assert last.rows == 3
    assert last.truncated == pytest.approx(1 / 6)


@pytest.mark.parametrize("lost", ["revoked", "silent", "forgetful"])
def test_samples_of_a_lost_worker_are_written_by_another(lost: str) -> None:
    world = at_version_2(4, 4)
    worker = world.peers["w0"]
    assert open_evaluation(world)
    worker.leases.clear()
    worker.open.clear()
    if lost == "revoked":
        world.handle(PeerRevoked(worker.peer))
        del world.peers["w0"]
    elif lost == "forgetful":
        world.connect("w0")
    else:
        world.pass_time(30.0)
        world.connect("w1")
    world.work()
    assert [(each.version, each.rows) for each in evaluated(world)] == [(0, 3), (2, 3)]


def test_a_returning_worker_continues_its_leases_of_an_evaluation() -> None:
    world = at_version_2(4)
    before = open_evaluation(world)
    world.handle(PeerDisconnected(world.peers["w0"].session, "reset"))
    world.connect("w0")
    assert open_evaluation(world) == before
    world.work()
    assert [each.rows for each in evaluated(world)] == [3, 3]


def test_the_newest_version_is_scored_again_after_a_crash_if_its_score_was_incomplete() -> None:
    world = at_version_2(4)
    (key, sample), *_ = open_evaluation(world)
    world.say(world.peers["w0"], world.peers["w0"].finish(key, sample))
    world.crash()
    world.work()
    found = evaluated(world)
    assert [(each.number, each.version, each.rows) for each in found] == [(1, 0, 3), (2, 2, 3)]
    world.crash()
    world.work()
    assert evaluated(world) == found


def test_a_question_whose_reward_failed_does_not_count() -> None:
    world = at_version_2(4)
    world.reward = lambda cursor, sample: None if cursor == 1 else 1.0
    world.work()
    last = evaluated(world)[-1]
    assert (last.rows, last.of, last.mean) == (2, 3, 1.0)


def test_the_files_of_the_best_version_are_kept_until_another_is_better() -> None:
    world = scoring(4, 4, rules=replace(EVAL, every=1))
    scales = {2: 2.0, 7: 4.0}
    world.reward = lambda _, sample: scales.get(world.newest_version or 0, 1.0) * (sample % 2)

    def gone() -> set[int]:
        return {int(action.path.rpartition("-")[2]) for action in world.done}

    train(world, 6)
    world.work()
    assert [(each.version, each.mean) for each in evaluated(world)] == [
        (version, 1.0 if version == 2 else 0.5) for version in range(7)
    ]
    # Four are bases of deltas; 2 is there for its score.
    assert gone() == {0, 1}
    world.crash()
    world.handle(DeadlinePassed())
    assert gone() == {0, 1}
    train(world, 2, start=6)
    world.work()
    assert gone() >= {0, 1, 2, 3}


def test_scores_of_a_revoked_version_are_forgotten() -> None:
    world = at_version_2(4)
    world.open_session(1)
    world.work()
    assert [each.version for each in evaluated(world)] == [0]
    assert not open_evaluation(world)


def test_the_learner_has_its_last_version_scored() -> None:
    """However the versions are counted: it asks until nothing is unfinished."""
    world = scoring(4, rules=replace(EVAL, every=10))
    train(world, 3)
    epoch = world.ledger.epoch

    def ask(version: int, after: int = 1) -> Any:
        return world.call(lambda n: EvaluationsAsked(n, after, epoch, Version(version)))

    assert ask(3).body == {"evaluations": [], "unfinished": ["held"]}
    world.work()
    body = ask(3).body
    assert body["unfinished"] == []
    assert [(each["version"], each["mean"]) for each in body["evaluations"]] == [(3, 0.5)]
    assert ask(0).status == 200
    refused = ask(2)
    assert (refused.status, refused.body["error"]) == (409, "version")
    reading: Any = world.call(lambda n: EvaluationsAsked(n, 0)).body
    assert [each["number"] for each in reading["evaluations"]] == [1, 2]
    world.open_session(3)
    assert ask(3).body["error"] == "fenced"


def test_only_trusted_workers_write_the_answers_during_an_audit() -> None:
    world = World(
        replace(
            World().rules,
            evals=(EVAL,),
            audit=AuditRules(
                newcomer=0,
                trusted=("t",),
            ),
        )
    )
    for name, kind in (("seed", "seed"), ("auditor", "auditor")):
        world.connect(name, kind=kind, slots=0)  # type: ignore[arg-type]
    world.connect("stranger", slots=8)
    world.connect("mine", slots=2, trusted=True)
    train(world, 4)
    world.work()
    assert [each.rows for each in evaluated(world)] == [3, 3, 3]
    assert not of_evaluations(world.peers["stranger"])


def test_the_score_of_one_answer_has_no_standard_error_and_no_nan_in_json() -> None:
    world = scoring(4, rules=replace(EVAL, rows=1, samples=1))
    world.work()
    [found] = evaluated(world)
    assert math.isnan(found.se)
    assert evaluated_json(found)["se"] is None
    [status] = world.state.status().evaluations
    assert (status.version, status.mean, status.se, status.open_version) == (0, 0.0, None, None)


# --- of environments


class Stage:
    """A world that notes what its environment is asked, and what it is told to forget."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.orders = world, list[StepEnvironment]()
        self.forgotten = list[ForgetEpisode]()
        answer, forget = world.environment.step, world.environment.forget

        def noted(
            order: StepEnvironment, reward: float | None
        ) -> EnvironmentStepped | EpisodeEnded:
            if kind_of(order.group) == EVALUATION:
                self.orders.append(order)
            return answer(order, reward)

        def forgot(order: ForgetEpisode) -> None:
            self.forgotten.append(order)
            forget(order)

        monkeypatch.setattr(world.environment, "step", noted)
        monkeypatch.setattr(world.environment, "forget", forgot)

    def end_turn(self, worker: FakePeer, key: HeldLease, sample: int) -> None:
        """The environment has not answered yet."""
        before = len(self.orders)
        self.world.say(worker, worker.finish(key, sample))
        assert len(self.orders) == before + 1


def long_one(world: World, name: str = "w0") -> tuple[HeldLease, int]:
    """An answer that this worker has still to write, and whose episode has four turns."""
    leases = world.peers[name].leases
    return next(
        (key, sample)
        for key, sample in open_evaluation(world, name)
        if turns_of((leases[key].group - group_of(EVALUATION, 0)) % ROWS_MAX, sample) == 4
    )


def write_all_but(world: World, group: int, sample: int) -> None:
    """The only worker writes everything else."""
    worker = world.peers["w0"]

    def others() -> list[tuple[HeldLease, int]]:
        return [e for e in worker.open if (worker.leases[e[0]].group, e[1]) != (group, sample)]

    while rest := others():
        world.say(worker, worker.finish(*rest[0]))
        world.drain()


def test_an_environment_is_played_whole_and_in_the_same_way_for_every_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = scoring(4, 4, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    train(world, 3)
    world.work()
    found = evaluated(world)
    assert [(each.version, each.rows, each.mean) for each in found] == [(0, 3, 0.5), (2, 3, 0.5)]
    turns = [turns_of(cursor, sample) for cursor in range(3) for sample in (0, 1)]
    assert {each.tokens for each in found} == {3 * sum(turns) / 6}, "written ones alone"
    assert {each.truncated for each in found} == {0.0}
    assert len(stage.orders) == 2 * sum(turns)
    first = group_of(EVALUATION, 0)
    seeds = [
        {(each.cursor, each.sample, each.rng_seed) for each in stage.orders if each.group in groups}
        for groups in (range(first, first + 3), range(first + ROWS_MAX, 1 << 62))
    ]
    assert seeds[0] == seeds[1]
    assert len(seeds[0]) == 6
    assert not stage.forgotten


def test_the_next_turn_is_given_to_the_same_worker_with_all_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = at_version_2(24, 24, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    key, sample = long_one(world)
    worker = world.peers["w0"]
    first = worker.leases[key]
    stage.end_turn(worker, key, sample)
    [order] = stage.orders
    assert (order.task, order.turn, order.output.turn_start, order.state) == ("held", 1, 0, None)
    world.deliver()
    second = of_evaluations(worker)[-1]
    assert second.prompt == first.prompt + order.output.tokens + given_after(1)
    assert (second.samples, second.earlier, second.written) == ((sample,), 3, 0)
    assert (second.oldest, second.hold_s, second.max_new_tokens) == (2, 30.0, 6)
    assert second.rng_seeds == (first.rng_seeds[first.samples.index(sample)],)


def test_a_worker_keeps_the_version_between_two_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turn is answered once the next one is leased, and the last one once the episode has ended."""
    world = at_version_2(24, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    worker = world.peers["w0"]
    train_step_3(world)
    key, sample = long_one(world)
    write_all_but(world, worker.leases[key].group, sample)
    for turn in range(1, 5):
        assert not world.refit(worker)
        stage.end_turn(worker, *open_evaluation(world)[0])
        assert not open_evaluation(world)
        assert not world.refit(worker), "the environment has not answered"
        assert stage.orders[-1].turn == turn
        world.drain()
    assert [type(each) for each in worker.inbox[-2:]] == [SampleAnswered, SampleAnswered]
    assert world.refit(worker)
    assert [(each.version, each.rows) for each in evaluated(world)] == [(0, 3), (2, 3)]


def test_an_episode_that_its_version_cannot_finish_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker loads the newer version between two turns: nobody goes on."""
    world = at_version_2(24, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    worker = world.peers["w0"]
    key, sample = long_one(world)
    stage.end_turn(worker, key, sample)
    late = world.pending.pop()
    for answer in open_evaluation(world):
        world.say(worker, worker.finish(*answer))
    train_step_3(world)
    for other in {key for key, _ in open_evaluation(world)}:
        worker.forget(other)
        world.say(worker, LeaseFailed(other.lease, other.attempt, "a newer version is loaded"))
    newer = worker.serving = version_key(3)
    world.say(
        worker,
        RefitDone(newer.version, newer.digest, 0.1, memory_ok=True, recompute_s=0.0),
    )
    assert evaluated(world)[-1].version == 0, "it waits for the environment"
    world.handle(late)
    [last] = [each for each in evaluated(world) if each.version == 2]
    assert last.rows < last.of == 3
    assert (late.group, late.sample) in {(each.group, each.sample) for each in stage.forgotten}  # type: ignore[union-attr]
    assert not world.environment.scored


def test_an_environment_that_fails_costs_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    world = at_version_2(24, rules=PLAYED)
    world.reward = lambda cursor, sample: None if cursor == 1 else 1.0
    world.work()
    last = evaluated(world)[-1]
    assert (last.rows, last.of, last.mean) == (2, 3, 1.0)


@pytest.mark.parametrize("limits", [{"turns_max": 2}, {"tokens_max": 9}])
def test_an_episode_without_room_for_another_turn_was_cut_off(
    limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = replace(
        PLAYED,
        task=replace(HELD, episode=EpisodeRules(**{"turns_max": 16, "tokens_max": 8192, **limits})),
    )
    world = at_version_2(24, rules=rules)
    world.reward = lambda cursor, sample: 1.0
    stage = Stage(world, monkeypatch)
    world.work()
    last = evaluated(world)[-1]
    whole = [turns_of(cursor, sample) <= 2 for cursor in range(3) for sample in (0, 1)]
    assert last.rows == 3
    assert last.mean == pytest.approx(sum(whole) / 6)
    assert last.truncated == pytest.approx(1 - sum(whole) / 6)
    assert len(stage.forgotten) == 6 - sum(whole)


def test_answers_of_an_environment_after_the_end_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its version is revoked; the environment is told to forget, and answers once more."""
    world = at_version_2(24, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    worker = world.peers["w0"]
    key, sample = long_one(world)
    stage.end_turn(worker, key, sample)
    late = world.pending.pop()
    assert isinstance(late, EnvironmentStepped)
    world.open_session(1)
    assert [(each.group, each.sample) for each in stage.forgotten] == [(late.group, late.sample)]
    assert key not in worker.held()
    ended = EpisodeEnded(late.group, late.sample, 0, 1, 1.0)
    assert [world.handle(each) for each in (late, ended)] == [[], []]
    world.work()
    assert [each.version for each in evaluated(world)] == [0]


def test_an_answer_that_comes_twice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = at_version_2(24, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    stage.end_turn(world.peers["w0"], *long_one(world))
    first = world.pending[-1]
    assert isinstance(first, EnvironmentStepped)
    world.drain()
    ended = EpisodeEnded(first.group, first.sample, 0, 1, 1.0)
    assert [world.handle(each) for each in (first, ended)] == [[], []]
    world.work()
    assert [each.rows for each in evaluated(world)] == [3, 3]


def test_a_turn_of_a_lost_worker_is_written_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns before it are not."""
    world = at_version_2(24, 24, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    worker = world.peers["w0"]
    stage.end_turn(worker, *long_one(world))
    world.drain()
    [order] = stage.orders
    second = of_evaluations(worker)[-1]
    assert second.earlier == 3
    world.handle(PeerRevoked(worker.peer))
    del world.peers["w0"]
    moved = [each for each in of_evaluations(world.peers["w1"]) if each.prompt == second.prompt]
    assert [each.samples for each in moved] == [(order.sample,)]
    world.work()
    assert [each.rows for each in evaluated(world)] == [3, 3]
    turns = [(each.group, each.sample, each.turn) for each in stage.orders]
    assert len(turns) == len(set(turns))


def test_an_episode_that_no_worker_can_continue_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = at_version_2(24, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    worker = world.peers["w0"]
    stage.end_turn(worker, *long_one(world))
    world.drain()
    [order] = stage.orders
    write_all_but(world, order.group, order.sample)
    for _ in range(ANSWER_FAILURES_MAX + 1):
        assert not stage.forgotten
        [key] = worker.leases
        worker.forget(key)
        world.say(worker, LeaseFailed(key.lease, key.attempt, "out of memory"))
        # A worker that fails again and again rests for longer.
        world.pass_time(70.0)
        world.connect("w0")
    assert [(each.group, each.sample) for each in stage.forgotten] == [(order.group, order.sample)]
    world.work()
    assert [each.rows for each in evaluated(world)] == [3, 2]


def test_episodes_are_played_again_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    world = at_version_2(24, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    stage.end_turn(world.peers["w0"], *long_one(world))
    world.drain()
    world.crash()
    world.work()
    assert [(each.version, each.rows) for each in evaluated(world)] == [(0, 3), (2, 3)]
    assert not any(each.again for each in stage.orders)


def test_a_branch_follows_the_question_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = at_version_2(24, rules=PLAYED)
    stage = Stage(world, monkeypatch)
    worker = world.peers["w0"]
    stage.end_turn(worker, *long_one(world))
    stepped = world.pending.pop()
    assert isinstance(stepped, EnvironmentStepped)
    world.pending.append(replace(stepped, anew=True))
    world.drain()
    [order] = stage.orders
    second = of_evaluations(worker)[-1]
    assert second.prompt == order.prompt + stepped.tokens
    assert (second.earlier, second.max_new_tokens) == (3, HELD.max_new_tokens)
    world.work()
    assert [each.rows for each in evaluated(world)] == [3, 3]
    [third] = [each for each in stage.orders if each.turn == 2 and each.output.branches]
    assert third.output.branch.startswith(stepped.tokens)

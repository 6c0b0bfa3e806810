"""The audit of episodes: what is scored, which worker is blamed, and how episodes begin again."""

from dataclasses import replace
from typing import Any

import pytest

from echo2d.core.audit import audits as audits_module
from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.events import PeerDisconnected
from echo2d.core.coordinator.events import DeadlinePassed
from echo2d.core.protocol.control_messages import (
    Heartbeat,
    HeldLease,
    LeaseFailed,
    LeaseGranted,
    SampleAnswered,
)
from echo2d.core.protocol.seeds import sample_seeds
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    GivenTokens,
    TrajectoryRecord,
    pack_tokens,
    unpack_tokens,
)
from echo2d.core.work.events import EpisodeForgotten, SampleReturned, StepEnvironment
from echo2d_lab.faults.environment import turns_of
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.audited_world import LIE, AuditedWorld, started, train_on
from tests.support.coordinator_world import messages, version_key

GROUP, SAMPLE = GroupId(0), 1  # an episode of four turns
ANSWER = (3, 7, 1)


def begun(*names: str, **changes: Any) -> tuple[AuditedWorld, FakePeer]:
    """A world of episodes, and the worker that writes the first turn of SAMPLE."""
    world = started(*names, episodes=True, **changes)
    assert turns_of(0, SAMPLE) == 4
    return world, holder_of(world)


def lease_of(peer: FakePeer) -> HeldLease | None:
    """The peer's open lease of SAMPLE."""
    found = [
        key
        for key, sample in peer.open
        if (peer.leases[key].group, sample) == (GROUP, SAMPLE) and not peer.closed
    ]
    return found[0] if found else None


def holder_of(world: AuditedWorld) -> FakePeer:
    (holder,) = [peer for peer in world.peers.values() if lease_of(peer) is not None]
    return holder


def write(world: AuditedWorld, peer: FakePeer, tokens: tuple[int, ...] = ANSWER) -> LeaseGranted:
    """The peer ends its turn of SAMPLE."""
    key = lease_of(peer)
    assert key is not None
    lease = peer.leases[key]
    world.say(peer, peer.finish(key, SAMPLE, tokens=tokens))
    world.drain()
    return lease


def hand_on(world: AuditedWorld, peer: FakePeer) -> FakePeer:
    """The peer gives its turn back; returns the worker that gets it."""
    key = lease_of(peer)
    assert key is not None
    peer.open.remove((key, SAMPLE))
    world.say(peer, LeaseFailed(key.lease, key.attempt, "no memory"))
    world.drain()
    return holder_of(world)


def of_sample(world: AuditedWorld) -> TrajectoryRecord:
    (record,) = [t for t in world.ledger.groups[GROUP].record.trajectories if t.sample == SAMPLE]
    return record


def prompt_of(world: AuditedWorld) -> bytes:
    return world.ledger.groups[GROUP].record.prompt


def is_kept(world: AuditedWorld) -> bool:
    stored = world.ledger.groups.get(GROUP)
    return stored is not None and any(t.sample == SAMPLE for t in stored.record.trajectories)


def play_out(world: AuditedWorld) -> None:
    """Whoever has SAMPLE writes its turns, until the episode ends."""
    while not is_kept(world):
        write(world, holder_of(world))


def test_each_turn_is_scored_behind_all_earlier_tokens() -> None:
    """And never a token that the environment gave. The seed goes on from turn to turn."""
    world, holder = begun("a", "mine", share=1.0)
    play_out(world)
    record, prompt = of_sample(world), prompt_of(world)
    (seed,) = sample_seeds(world.rules.seed_key, GROUP, (SAMPLE,))
    scored = sorted(
        (each for each in world.scored if each.seed == seed), key=lambda each: each.written
    )
    assert [(len(each.tokens) // 4, each.written) for each in scored] == [
        (3, 0),
        (3, 3),
        (3, 6),
        (3, 9),
    ]
    for each, span in zip(scored, record.spans, strict=True):
        assert each.prompt == prompt + record.tokens[: 4 * span.start]
        assert each.tokens == record.tokens[4 * span.start : 4 * span.end] == pack_tokens(ANSWER)
        assert each.logprobs == record.logprobs[4 * span.start : 4 * span.end]
    (told,) = [each for each in world.told if (each.group, each.sample) == (GROUP, SAMPLE)]
    assert (told.worker, told.found.tokens) == (holder.peer, record.written)


def test_a_group_waits_for_the_verdict_about_an_episode() -> None:
    world, _ = begun("a", "mine", auditor=False, wait_s=3600.0)
    play_out(world)
    world.work()
    assert world.state.status().groups.buffered == 0
    waiting = len(world.audits.waiting)
    assert waiting
    world.crash()
    assert len(world.audits.waiting) >= waiting, "a restart judges again what waits"
    world.connect("auditor", kind="auditor", slots=0)
    world.work()
    assert len(world.audits.waiting) == 0
    train_on(world, 3)
    assert (world.convicts, world.returned) == ([], [])


def test_a_lie_in_one_turn_gives_the_episode_back_and_only_its_author_is_blamed() -> None:
    """The episode begins anew, also for its environment, and the honest author may write it."""
    world, honest = begun("one", "two")
    write(world, honest)
    liar = hand_on(world, honest)
    write(world, liar, LIE)
    while not world.returned:
        write(world, holder_of(world))
    assert world.returned == [SampleReturned(GROUP, SAMPLE)]
    told = {
        each.worker: each.reasons
        for each in world.told
        if (each.group, each.sample) == (GROUP, SAMPLE)
    }
    assert told[liar.peer] == ("logprobs", "seed")
    assert told.get(honest.peer, ()) == ()
    assert world.standing(liar.name) == "flagged"
    # There is nobody else, and the honest author has rested.
    world.pass_time(30.0)
    world.say(honest, Heartbeat(0))
    world.drain()
    assert holder_of(world) is honest
    lease = write(world, honest)
    assert (lease.earlier, lease.written) == (0, 0)
    episode = world.environment.acknowledged[GROUP, SAMPLE]
    assert episode == 1, "the environment has answered the first turn of another episode"
    play_out(world)
    assert {span.author for span in of_sample(world).spans} == {honest.peer}


def test_the_environment_learns_that_an_episode_begins_again() -> None:
    world, first = begun("one", "two")
    seen: list[StepEnvironment] = []
    perform = world._perform

    def noted(action: Any) -> None:
        if isinstance(action, StepEnvironment) and (action.group, action.sample) == (GROUP, SAMPLE):
            seen.append(action)
        perform(action)

    world._perform = noted  # type: ignore[method-assign]
    while not world.returned:
        write(world, first, LIE)
    assert holder_of(world) is not first
    play_out(world)
    assert [(each.begun, each.turn) for each in seen] == [
        (begun_anew, turn) for begun_anew in (0, 1) for turn in (1, 2, 3, 4)
    ]
    assert len({each.rng_seed for each in seen}) == 1, "it meets the same environment"


def test_a_late_answer_to_a_turn_of_an_episode_that_was_given_back_is_refused() -> None:
    """It goes on from turns that do not count any more, though they have the same length."""
    world, liar = begun("one", "two", "three")
    write(world, liar, LIE)
    late = hand_on(world, liar)
    key = lease_of(late)
    assert key is not None
    lease, served = late.leases[key], late.serving
    # It leaves with the lease, which goes to somebody else.
    world.handle(PeerDisconnected(late.session, "reset"))
    late.closed = True
    third = next(p for p in world.peers.values() if p.slots and p not in (liar, late))
    while lease_of(third) is None:
        world.pass_time(1.0)
        for peer in (third, world.peers["auditor"]):
            world.say(peer, Heartbeat(0))
        world.drain()
    while not world.returned:
        write(world, third)
    assert write(world, third).earlier == 0
    turns = list(world.ledger.turns[GROUP, SAMPLE])
    assert turns[-1][0].partial.length * 4 == len(lease.prompt) - len(prompt_of(world)) - 12
    world.connect(late.name)
    late.leases[key], late.serving = lease, served
    late.open.append((key, SAMPLE))
    world.say(late, late.finish(key, SAMPLE, tokens=ANSWER))
    answer = messages(late, SampleAnswered)[-1]
    assert (answer.lease, answer.attempt, answer.accepted) == (key.lease, key.attempt, False)
    assert world.ledger.turns[GROUP, SAMPLE] == turns
    play_out(world)
    assert {span.author for span in of_sample(world).spans} == {third.peer}


@pytest.mark.parametrize("where", ["parked", "leased"])
def test_open_episodes_of_a_convicted_worker_begin_again(where: str) -> None:
    world, liar = begun("one", "two")
    if where == "parked":
        key = lease_of(liar)
        assert key is not None
        world.say(liar, liar.finish(key, SAMPLE, tokens=ANSWER))
    else:
        write(world, liar)
        hand_on(world, liar)
    assert world.ledger.turns[GROUP, SAMPLE]
    world.audits.cases.of(liar.peer).verdict = "caught"
    world.audits._convicted.append(liar.peer)
    other = next(peer for peer in world.peers.values() if peer.slots and peer is not liar)
    world.handle(DeadlinePassed())
    assert (GROUP, SAMPLE) not in world.ledger.turns
    world.drain()
    play_out(world)
    assert {span.author for span in of_sample(world).spans} == {other.peer}


def test_a_restart_does_not_go_on_from_turns_of_a_convicted_worker() -> None:
    """The conviction may be durable while what follows from it is not."""
    world, liar = begun("one", "two", newcomer=0, share=0.0)
    write(world, liar)
    assert world.ledger.turns[GROUP, SAMPLE]
    recover, forgotten = world.ledger.recover, list[EpisodeForgotten]()
    world.ledger.recover = lambda: replace(recover(), convicted=frozenset([liar.peer]))  # type: ignore[method-assign]
    persist = world._persist

    def noted(record: Any) -> None:
        if isinstance(record, EpisodeForgotten):
            forgotten.append(record)
        persist(record)

    world._persist = noted  # type: ignore[method-assign]
    world.crash()
    assert forgotten == [EpisodeForgotten(GROUP, SAMPLE)]
    assert (GROUP, SAMPLE) not in world.ledger.turns
    play_out(world)
    assert not any(span.author == liar.peer for span in of_sample(world).spans)


def test_a_worker_may_keep_old_kv_behind_its_own_turn() -> None:
    """Also if another worker wrote in between; two turns of one version mix nothing."""
    one, two = PeerId("one"), PeerId("two")

    def episode(*turns: tuple[PeerId, int]) -> TrajectoryRecord:
        spans = [
            AuthoredSpan(2 * at, 2 * at + 1, Version(version), version_key(version).digest, author)
            for at, (author, version) in enumerate(turns)
        ]
        given = [GivenTokens(2 * at - 1, 2 * at) for at in range(1, len(turns))]
        tokens = pack_tokens([3] * (2 * len(turns) - 1))
        return TrajectoryRecord(0, tokens, tokens, tuple(spans), "stop", given=tuple(given))

    assert not audits_module._mixes(episode((one, 1), (one, 1)), one)
    assert audits_module._mixes(episode((one, 1), (one, 2)), one)
    assert audits_module._mixes(episode((one, 1), (two, 2), (one, 2)), one)
    assert not audits_module._mixes(episode((one, 1), (two, 2), (one, 2)), two)
    assert len(unpack_tokens(episode((one, 1), (two, 2)).tokens)) == 3

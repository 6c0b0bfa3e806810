"""Another worker continues the unfinished samples of a worker; through the whole machine, as workers see it."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import (
    Digest,
    Epoch,
    GroupId,
    PeerId,
    PublishSeq,
    Version,
)
from echo2d.core.cluster.events import PeerDisconnected, PeerRevoked, Persist, VersionPublished
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.coordinator.events import Recovered
from echo2d.core.protocol.control_messages import (
    Goodbye,
    HeldLease,
    LeaseFailed,
    LeaseProgress,
    SampleAnswered,
    SampleDelta,
    VersionSpan,
)
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    Partial,
    TrajectoryRecord,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)
from echo2d.core.status.schema import HandedOverCounts
from echo2d.core.work.events import SampleKept, ScoreSample
from echo2d.core.work.leases import LeaseTable
from echo2d.core.work.training.group_table import OpenGroup, Waiting
from echo2d.core.work.training.partials import FRUITLESS_MAX, PARTIAL_WAIT_S, Partials
from echo2d.core.work.training.prompts import DrawnPrompt
from echo2d.core.work.training.staleness import Staleness
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.column_engine import columns_of
from tests.support.coordinator_world import World, rules, version_digest
from tests.support.rollouts import dropped, grants, world_of

ONE_GROUP = {"staleness_max": 0, "group_size": 1, "trajectories_per_step": 1}


def owner_and_other(world: World, *peers: FakePeer) -> tuple[FakePeer, FakePeer, HeldLease]:
    """Who has the only lease, who has none."""
    owner, other = sorted(peers, key=lambda peer: not peer.leases)
    return owner, other, next(iter(owner.leases))


def two_workers(**changes: object) -> tuple[World, FakePeer, FakePeer, HeldLease]:
    world, peers = world_of(1, 1, **{**ONE_GROUP, **changes})
    return world, *owner_and_other(world, *peers)


def kept(world: World) -> TrajectoryRecord:
    """The result of the last event."""
    return next(
        a.record.trajectory for a in world.actions if isinstance(a, Persist) and isinstance(a.record, SampleKept)
    )  # fmt: skip


def tokens_of(data: bytes) -> list[int]:
    return [int(token) for token in unpack_tokens(data)]


def faults(world: World) -> list[str]:
    return [fault.text for fault in world.state.status().faults if fault.kind == "progress"]


def test_tokens_of_a_lost_worker_are_continued_by_another() -> None:
    world, one, two, key = two_workers()
    first = grants(one)[0]
    world.say(one, one.wrote(key, 0, 7, 8))
    world.say(one, one.wrote(key, 0, 9, start=2))
    world.say(one, Goodbye("SIGTERM"))
    again = grants(two)[-1]
    assert tokens_of(again.prompt) == [*tokens_of(first.prompt), 7, 8, 9]
    assert (again.lease, again.attempt, again.samples, again.max_new_tokens) == (
        first.lease,
        1,
        (0,),
        8 - 3,
    )
    world.say(two, two.finish(*two.open[0]))
    record = kept(world)
    assert tokens_of(record.tokens) == [7, 8, 9, 3, 4, 1]
    assert record.logprobs == pack_logprobs([-0.25] * 3 + [-0.5] * 3)
    assert record.spans == (
        AuthoredSpan(0, 3, *_parts(0), one.peer),
        AuthoredSpan(3, 6, *_parts(0), two.peer),
    )
    assert record.worker == two.peer
    assert [action.tokens for action in world.actions if isinstance(action, ScoreSample)] == [
        record.tokens
    ]
    status = world.state.status()
    assert (status.tokens_accepted, status.handed_over) == (
        6,
        HandedOverCounts(partials=1, tokens=3),
    )


def _parts(version: int) -> tuple[Version, Digest]:
    return Version(version), version_digest(version)


def two_versions(**changes: object) -> tuple[World, FakePeer, FakePeer, HeldLease]:
    """`one` has tokens of version 0 under way, and serves it still; `two` serves version 1 and is full."""
    world, (one, two) = world_of(
        1, 1, group_size=1, trajectories_per_step=1, **{"staleness_max": 1, **changes}
    )
    key = next(iter(one.leases))
    world.say(one, one.wrote(key, 0, 7, 8))
    request = world.ask_batch(1)
    while request not in world.replies:
        world.say(two, two.finish(*two.open[0]))
        world.drain()
    world.commit(1, world.digests[1])
    world.publish(1)
    world.drain()
    world.refit(two)
    return world, one, two, key


def finish_all(world: World, peer: FakePeer) -> None:
    while peer.open:
        world.say(peer, peer.finish(*peer.open[0]))


def test_the_joined_spans_name_the_version_and_worker_of_each_token() -> None:
    world, one, two, _ = two_versions()
    world.say(one, Goodbye("SIGTERM"))
    while not (again := grants(two)[-1]).attempt:
        world.say(two, two.finish(*two.open[0]))
    world.say(two, two.finish(HeldLease(again.lease, 1), 0))
    assert kept(world).spans == (
        AuthoredSpan(0, 2, *_parts(0), one.peer),
        AuthoredSpan(2, 5, *_parts(1), two.peer),
    )
    assert kept(world).version_min == 0
    assert world.ledger.groups[again.group].record.trajectories[-1] is kept(world)


def test_no_worker_continues_a_partial_with_an_older_version() -> None:
    """Until somebody serves the last span's version, or it has waited for too long."""
    world, old, new, _ = two_versions()
    key = next(iter(new.leases))
    world.say(new, new.wrote(key, 0, 7))
    world.say(old, old.finish(*old.open[0]))  # it has room now
    finish_all(world, old)
    before = len(grants(old))
    world.say(new, Goodbye("SIGTERM"))
    assert all(grant.attempt == 0 for grant in grants(old)[before:])
    finish_all(world, old)
    world.refit(old)
    again = next(grant for grant in grants(old) if grant.attempt == 1)
    assert (tokens_of(again.prompt)[-1], again.oldest) == (7, 1)


def test_a_partial_that_no_worker_can_continue_starts_again() -> None:
    world, old, new, _ = two_versions()
    key = next(iter(new.leases))
    world.say(new, new.wrote(key, 0, 7))
    world.say(new, Goodbye("SIGTERM"))
    for _ in range(int(PARTIAL_WAIT_S)):
        finish_all(world, old)
        world.pass_time(1.0)
        world.say(old, LeaseProgress(key.lease, 9, ()))
    again = next(grant for grant in grants(old) if grant.attempt == 1)
    assert (len(tokens_of(again.prompt)), again.max_new_tokens) == (3, 8)


def test_a_sample_that_no_worker_can_begin_again_keeps_waiting() -> None:
    """A run whose only worker is away: it goes on where it was, however long that takes."""
    world, (worker,) = world_of(1, **ONE_GROUP)
    key = next(iter(worker.leases))
    world.say(worker, worker.wrote(key, 0, 7))
    world.say(worker, Goodbye("maintenance"))
    worker.forget(key)
    world.pass_time(3 * PARTIAL_WAIT_S)
    world.connect(worker.name, slots=1, boot_id="another")
    assert tokens_of(grants(worker)[-1].prompt)[-1] == 7


def test_tokens_of_a_silent_worker_are_continued_too() -> None:
    world, one, two, key = two_workers()
    world.say(one, one.wrote(key, 0, 7))
    while len(grants(two)) == 0:
        world.pass_time(1.0)
        world.say(two, LeaseProgress(key.lease, 9, ()))
    assert tokens_of(grants(two)[-1].prompt)[-1] == 7


def test_tokens_of_a_restarted_worker_are_continued_too() -> None:
    """Its new process has served nothing yet; who wrote them was judged when they came."""
    world, one, two, key = two_workers()
    world.say(one, one.wrote(key, 0, 7))
    one.forget(key)
    one.serving = None
    world.connect(one.name, slots=1, boot_id="another")
    assert tokens_of(grants(two)[-1].prompt)[-1] == 7


def test_no_more_tokens_of_a_revoked_worker_are_accepted() -> None:
    world, one, two, key = two_workers()
    world.say(one, one.wrote(key, 0, 7))
    world.handle(PeerRevoked(one.peer))
    assert grants(two)[-1].max_new_tokens == 8


def test_a_report_from_the_first_token_on_replaces_earlier_ones() -> None:
    world, one, two, key = two_workers()
    for message in (
        one.wrote(key, 0, 7, 8),
        one.wrote(key, 0, 5, 6),
        one.wrote(key, 0, 7, start=2),
    ):
        world.say(one, message)
    world.say(one, Goodbye("SIGTERM"))
    assert tokens_of(grants(two)[-1].prompt)[3:] == [5, 6, 7]


def delta(
    *tokens: int, start: int = 2, spans: tuple[VersionSpan, ...] | None = None
) -> SampleDelta:
    whole = (VersionSpan(start, start + len(tokens), *_parts(0)),) if spans is None else spans
    return SampleDelta(0, pack_tokens(tokens), pack_logprobs([-0.25] * len(tokens)), whole)


BAD = {
    "behind a gap": delta(5, start=3),
    "overlapping": delta(5, start=1),
    "spans beyond it": delta(5, spans=(VersionSpan(2, 4, *_parts(0)),)),
    "spans short of it": delta(5, 6, spans=(VersionSpan(2, 3, *_parts(0)),)),
    "no spans": delta(5, spans=()),
    "a version never served": delta(5, spans=(VersionSpan(2, 3, *_parts(1)),)),
    "a version of other bytes": delta(
        5, spans=(VersionSpan(2, 3, Version(0), version_digest(0, 1)),)
    ),
    "too many tokens": delta(*range(2, 9)),
    "half a token": replace(delta(5), tokens=b"\1\0"),
    "a logprob too few": replace(delta(5, 6), logprobs=pack_logprobs([-0.5])),
    "beyond the vocabulary": delta(99),
    "a negative token": delta(-1),
    "no logarithm": replace(delta(5), logprobs=pack_logprobs([float("nan")])),
    "a probability over one": replace(delta(5), logprobs=pack_logprobs([0.5])),
    "a stop token": delta(1),
    "columns of other tokens": replace(delta(5), columns=columns_of([5, 6])),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_progress_is_forgotten_and_counted_once(bad: SampleDelta) -> None:
    world, one, two, key = two_workers()
    world.say(one, one.wrote(key, 0, 7, 8))
    world.say(one, LeaseProgress(key.lease, key.attempt, (bad,)))
    world.say(one, one.wrote(key, 0, 7, start=3))
    assert grants(two) == []
    world.say(one, Goodbye("SIGTERM"))
    assert len(faults(world)) == 1
    assert grants(two)[-1].max_new_tokens == 8
    world.say(two, two.finish(*two.open[0]))
    assert kept(world).spans == (AuthoredSpan(0, 3, *_parts(0), two.peer),)


def test_progress_of_a_sample_that_is_not_open_is_ignored() -> None:
    world, one, _, key = two_workers()
    world.say(one, replace(one.wrote(key, 0, 7), samples=(replace(delta(5, start=0), sample=4),)))
    world.say(one, one.wrote(HeldLease(key.lease, 7), 0, 7))
    assert faults(world) == []


def test_a_result_always_has_a_token_to_add() -> None:
    world, one, two, key = two_workers()
    world.say(one, one.wrote(key, 0, *range(2, 10)))
    world.say(one, Goodbye("SIGTERM"))
    assert (tokens_of(grants(two)[-1].prompt)[3:], grants(two)[-1].max_new_tokens) == (
        list(range(2, 9)),
        1,
    )
    world.say(two, two.finish(*two.open[0], tokens=(5, 6)))
    answer = [message for message in two.inbox if isinstance(message, SampleAnswered)][-1]
    assert answer.reason == "2 tokens; 1 to 1 are allowed"


def handed_to(world: World, old: FakePeer, new: FakePeer) -> tuple[HeldLease, int]:
    """`new` begins a sample with version 1 and leaves; `old`, which serves it by then, goes on."""
    key = next(iter(new.leases))
    world.say(new, new.wrote(key, 0, 7))
    finish_all(world, old)
    world.refit(old)
    world.say(new, Goodbye("SIGTERM"))
    while not any(at[0].attempt for at in old.open):
        world.say(old, old.finish(*old.open[0]))
    return next(at for at in old.open if at[0].attempt)


def test_a_result_is_not_older_than_the_partial_that_it_continues() -> None:
    world, old, new, _ = two_versions()
    result = old.finish(*handed_to(world, old, new))
    world.say(old, replace(result, spans=(VersionSpan(0, 3, *_parts(0)),)))
    answer = [message for message in old.inbox if isinstance(message, SampleAnswered)][-1]
    assert answer.reason == "span versions decrease"


def test_tokens_of_a_revoked_version_are_dropped() -> None:
    """Running on them, waiting, and under way: what older versions wrote before stays."""
    world, old, new, _ = two_versions()
    key = next(iter(new.leases))
    spans = (VersionSpan(0, 1, *_parts(0)), VersionSpan(1, 2, *_parts(1)))
    world.say(new, LeaseProgress(key.lease, key.attempt, (delta(5, 6, spans=spans),)))
    world.say(new, LeaseFailed(key.lease, key.attempt, "engine fault"))
    world.open_session(0)
    world.publish(0)
    world.drain()
    finish_all(world, old)
    assert all(len(tokens_of(grant.prompt)) == 3 or grant.oldest == 0 for grant in grants(old))
    assert not any(6 in tokens_of(grant.prompt)[3:] for grant in grants(old))


def test_a_lease_that_continues_tokens_of_a_revoked_version_is_cancelled() -> None:
    world, old, new, _ = two_versions()
    key, _ = handed_to(world, old, new)
    world.open_session(0)
    assert key not in old.leases
    assert world.state.status().groups.leases == 0


def test_a_partial_on_which_no_worker_makes_progress_starts_again() -> None:
    world, one, two, key = two_workers()
    world.say(one, one.wrote(key, 0, 7))
    world.say(one, Goodbye("SIGTERM"))
    for attempt in range(1, FRUITLESS_MAX + 2):
        again = grants(two)[-1]
        assert (again.attempt, again.max_new_tokens) == (attempt, 7)
        two.forget(HeldLease(again.lease, attempt))
        world.say(two, LeaseFailed(again.lease, attempt, "engine fault"))
        world.pass_time(5.0)
        world.say(two, LeaseProgress(again.lease, 99, ()))
    assert grants(two)[-1].max_new_tokens == 8
    assert dropped(world) == []


def test_every_worker_adds_its_tokens_to_a_partial() -> None:
    """As long as it goes on, how many hands it takes does not matter."""
    world, one, two, key = two_workers()
    world.say(one, one.wrote(key, 0, 7))
    world.say(one, Goodbye("SIGTERM"))
    for count in range(1, 5):
        at = next(iter(two.leases))
        assert len(tokens_of(two.leases[at].prompt)) == 3 + count
        world.say(two, two.wrote(at, 0, 10 + count))
        two.forget(at)
        world.handle(PeerDisconnected(two.session, "reset"))
        world.connect(two.name, slots=1, boot_id=f"start {count}")
    assert tokens_of(grants(two)[-1].prompt)[3:] == [7, 11, 12, 13, 14]


def test_a_partial_that_is_too_old_is_forgotten() -> None:
    """Batch 4 is open and S = 1: what version 1 wrote cannot be of use any more, but where old tokens are masked."""
    published = [
        VersionPublished(PublishSeq(n + 1), Epoch(1), *_parts(n), f"v{n}", 1) for n in range(3)
    ]
    recovered = replace(
        Recovered.nothing(), epoch=Epoch(1), published=tuple(published), checkpoint=3
    )
    for over_stale, left in (("drop", [2]), ("mask", [1, 2, 3])):
        run = rules(staleness_max=1, over_stale=over_stale)
        partials = Partials(
            RunParts(
                run,
                Membership(run.run_id, run.heartbeat_s),
                PublishedVersions(published, PublishSeq(3)),
                Statistics(),
            ),
            leases=LeaseTable(1, 15.0),
            staleness=Staleness(run, recovered),
        )
        group = OpenGroup(
            GroupId(0), DrawnPrompt(0, pack_tokens([1])), run.tasks[0], {0, 1, 2, 3, 4, 5}
        )
        spans = {1: [0], 2: [2], 3: [1, 2], 4: [2, 3]}  # version 3 is not published
        for sample, versions in spans.items():
            written = tuple(
                AuthoredSpan(at, at + 1, *_parts(version), PeerId("w"))
                for at, version in enumerate(versions)
            )
            group.partials[sample] = Waiting(
                Partial(b"1234" * len(versions), b"", written), until=30.0, since=0.0
            )
        assert partials.forget([group], now=29.0) == 30.0
        assert sorted(group.partials) == left
        assert partials.forget([group], now=30.0) is None


def test_a_late_result_is_joined_with_the_tokens_of_its_own_attempt() -> None:
    world, one, two, key = two_workers()
    world.say(one, one.wrote(key, 0, 7, 8))
    late = one.finish(key, 0, tokens=(7, 8, 9, 1))
    one.unanswered.clear()
    world.say(one, LeaseFailed(key.lease, key.attempt, "engine fault"))
    assert len(tokens_of(grants(two)[-1].prompt)) == 5
    world.say(one, late)
    assert tokens_of(kept(world).tokens) == [7, 8, 9, 1]
    assert two.leases == {}


def test_tokens_that_another_worker_continues_are_durable() -> None:
    world, one, two, key = two_workers()
    world.say(one, one.wrote(key, 0, 7, 8))
    world.say(one, Goodbye("SIGTERM"))
    result = two.finish(*two.open[0])
    world.crash()
    world.drain()
    (stored,) = [group for group in world.ledger.groups.values() if group.record.trajectories]
    assert tokens_of(stored.record.trajectories[0].tokens) == [7, 8, 3, 4, 1]
    assert result.tokens == pack_tokens([3, 4, 1])


def test_columns_are_joined_when_another_worker_continues() -> None:
    """In memory, after a crash, and in what tells a repeat from another result."""
    world, one, two, key = two_workers(columns=("experts", "half"))
    for report in (one.wrote(key, 0, 7, 8), one.wrote(key, 0, 9, start=2)):
        (said,) = report.samples
        more = columns_of(unpack_tokens(said.tokens).tolist())
        world.say(one, replace(report, samples=(replace(said, columns=more),)))
    assert world.state.status().groups.tokens_under_way == 3
    world.say(one, Goodbye("SIGTERM"))
    place = two.open[0]
    ours = replace(two.finish(*place), columns=columns_of([3, 4, 1]))
    two.unanswered[place] = ours
    world.crash()
    world.drain()
    (stored,) = [group for group in world.ledger.groups.values() if group.record.trajectories]
    assert stored.record.trajectories[0].columns == columns_of([7, 8, 9, 3, 4, 1])
    world.say(two, replace(ours, columns=columns_of([3, 4, 5])))
    assert world.state.status().results_refused == {"a different result was accepted before": 1}


def test_columns_that_the_run_does_not_name_are_dropped_on_arrival() -> None:
    world, one, _, key = two_workers(columns=("half",))
    report = one.wrote(key, 0, 7, 8)
    (said,) = report.samples
    world.say(one, replace(report, samples=(replace(said, columns=columns_of([7, 8])),)))
    (lease,) = world.state._scheduler.leases
    partial = lease.outputs[0]
    assert partial is not None
    assert partial.columns == columns_of([7, 8])[1:]
    result = one.finish(*one.open[0], tokens=(7, 8, 1))
    world.say(one, replace(result, columns=columns_of([7, 8, 1])))
    assert kept(world).columns == columns_of([7, 8, 1])[1:]


def test_the_loss_of_a_worker_is_one_failure_of_each_of_its_samples() -> None:
    """Whoever took over many samples of a group holds a lease for each."""
    world, (one, two) = world_of(16, 16, group_size=16, trajectories_per_step=16, staleness_max=0)
    one, two, key = owner_and_other(world, one, two)
    world.say(
        one,
        LeaseProgress(key.lease, 0, tuple(replace(delta(5, start=0), sample=n) for n in range(16))),
    )
    world.say(one, Goodbye("SIGTERM"))
    assert len(two.leases) == 16
    world.say(two, Goodbye("SIGTERM"))
    assert dropped(world) == []
    one.leases.clear()
    world.connect(one.name, slots=16, boot_id="again")
    assert len(one.leases) == 16


def test_simultaneous_failures_make_a_worker_rest_once() -> None:
    world, (one, two) = world_of(4, 4, group_size=4, trajectories_per_step=4, staleness_max=0)
    one, two, key = owner_and_other(world, one, two)
    world.say(
        one,
        LeaseProgress(key.lease, 0, tuple(replace(delta(5, start=0), sample=n) for n in range(4))),
    )
    world.say(one, Goodbye("SIGTERM"))
    for held in list(two.leases):
        two.forget(held)
        world.say(two, LeaseFailed(held.lease, held.attempt, "engine fault"))
    world.pass_time(1.5)
    world.say(two, LeaseProgress(key.lease, 99, ()))
    assert len(two.leases) == 4


def test_a_dropped_sample_counts_with_all_tokens_that_were_written_for_it() -> None:
    """The length bias shows only if unfinished answers count: it is the long ones that are cut off by their age."""
    world, _, new, _ = two_versions()
    key = next(iter(new.leases))
    world.say(new, new.wrote(key, 0, 7, 8))
    group = world.state._groups._groups.owner(new.peer, key, 0)
    assert group is not None
    assert group.lengths() == [2]
    world.state._groups._judge.drop(group, "stale", "")
    assert world.state.status().answer_tokens["stale"] == 2.0

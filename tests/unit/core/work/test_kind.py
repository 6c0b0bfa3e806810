"""A fourth kind of work needs only this module and one line (`Sessions.of`).

It samples for an outside trainer, which demands one exact version. Through the whole machine, as workers see it.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import Note, PeerDisconnected, Send
from echo2d.core.cluster.peer import Peer
from echo2d.core.coordinator.events import WorkerOrdered
from echo2d.core.protocol.control_messages import (
    Goodbye,
    Heartbeat,
    HeldLease,
    LeaseCancelled,
    LeaseFailed,
    LeaseGranted,
    LeaseProgress,
    SampleFinished,
)
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.work.kind import Cause, KindOfWork, PendingSamples
from echo2d.core.work.leases import Lease, answer, group_of, kind_of
from echo2d.core.work.scheduler import LeaseScheduler
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World
from tests.support.rollouts import SILENCE_S, answers, world_of

SAMPLES = 3
TOKENS_MAX = 8


class Sessions(KindOfWork[PendingSamples]):
    """One prompt, sampled SAMPLES times by one version alone, once the run has all the slots that it can use."""

    number = 7

    def __init__(self, scheduler: LeaseScheduler, version: Version) -> None:
        self._scheduler, self._version = scheduler, version
        self.waiting = set(range(SAMPLES))
        self.leased: dict[HeldLease, Lease] = {}
        self.written: dict[int, bytes] = {}
        self.lost_by: list[Cause] = []

    @staticmethod
    def of(world: World, version: int) -> "Sessions":
        sessions = Sessions(world.state._scheduler, Version(version))
        world.state._scheduler.add(sessions)
        return sessions

    def priority(self, *, now: float) -> int:
        return 2

    def pending(self, *, now: float) -> Iterator[PendingSamples]:
        if self.waiting:
            yield PendingSamples(sorted(self.waiting), self._version, newest=self._version)

    def grant(
        self,
        pending: PendingSamples,
        worker: Peer,
        samples: Sequence[int],
        *,
        now: float,
    ) -> list[Send]:
        assert worker.session is not None
        assert worker.engine.serving is not None
        lease = self._scheduler.leases.start(
            None, group_of(self.number, 0), worker.peer, worker.engine.serving, samples, room=TOKENS_MAX, now=now
        )  # fmt: skip
        self.waiting -= lease.samples
        self.leased[lease.key] = lease
        given = lease.given
        granted = LeaseGranted(
            given.lease, given.attempt, given.group, b"\5\0\0\0", given.samples, TOKENS_MAX, WHOLE, (1,),
            self._version, SILENCE_S,
        )  # fmt: skip
        return [Send(worker.session, granted)]

    def finished(
        self,
        peer: Peer,
        lease: Lease | None,
        message: SampleFinished,
        *,
        now: float,
    ) -> list[Send] | None:
        if lease is None or message.sample not in lease.samples:
            return None
        self.written[message.sample] = message.tokens
        if self._scheduler.leases.answer(lease, message.sample):
            del self.leased[lease.key]
        return answer(peer, message)

    def lost(
        self,
        lease: Lease,
        cause: Cause,
        reason: str,
        *,
        now: float,
    ) -> list[Note]:
        assert reason
        self.lost_by.append(cause)
        del self.leased[lease.key]
        self.waiting |= lease.samples
        return []

    def check(self) -> None:
        leased = [sample for lease in self.leased.values() for sample in lease.samples]
        assert sorted([*self.waiting, *leased, *self.written]) == list(range(SAMPLES))
        running = {lease.key for lease in self._scheduler.leases if lease.kind == self.number}
        assert running == self.leased.keys()


def of_sessions(peer: FakePeer) -> list[LeaseGranted]:
    grants = [message for message in peer.inbox if isinstance(message, LeaseGranted)]
    return [granted for granted in grants if kind_of(granted.group) == Sessions.number]


def session_world() -> tuple[World, Sessions, FakePeer, FakePeer]:
    """A run that uses two of eight slots, and a session for which one worker writes; the other has room, too."""
    world, workers = world_of(
        4, 4, staleness_max=0, group_size=1, trajectories_per_step=2, publish_every=1
    )
    sessions = Sessions.of(world, 0)
    world.say(workers[0], Heartbeat(0, 0, 0, 0))
    world.drain()
    one, other = sorted(workers, key=lambda worker: -len(of_sessions(worker)))
    assert [lease.samples for lease in of_sessions(one)] == [(0, 1, 2)]
    assert not of_sessions(other)
    return world, sessions, one, other


def key_of_session(peer: FakePeer) -> HeldLease:
    granted = of_sessions(peer)[-1]
    return HeldLease(granted.lease, granted.attempt)


def test_a_fourth_kind_gets_slots_and_its_results() -> None:
    world, sessions, one, _ = session_world()
    key = key_of_session(one)
    before = world.state.status()
    assert before.groups.leases == 2, "the run's alone"
    assert sum(worker.leased for worker in before.workers) == 2 + SAMPLES, "all"
    for sample in range(SAMPLES):
        world.say(one, one.finish(key, sample))
    assert (len(sessions.written), sessions.leased) == (SAMPLES, {})
    assert answers(one)[-SAMPLES:] == [(True, "")] * SAMPLES
    assert not world.kept, "nothing of it is durable"
    world.say(one, SampleFinished(*key, 0, b"", b"", (), "stop"))
    assert answers(one)[-1] == (False, "the lease is over")


def fail(world: World, peer: FakePeer, key: HeldLease) -> None:
    world.say(peer, LeaseFailed(*key, "the engine died"))


def fall_silent(world: World, peer: FakePeer, key: HeldLease) -> None:
    for number in range(4):
        world.now += SILENCE_S / 3
        for each in world.peers.values():
            if each is not peer:
                world.say(each, Heartbeat(0, 0, 0, 0))
                for held in each.held():
                    world.say(each, each.wrote(held, 0, *[3] * (1 + number)))
        world.pass_time(0.0)
    assert key not in peer.leases


def come_back_without_it(world: World, peer: FakePeer, key: HeldLease) -> None:
    world.handle(PeerDisconnected(peer.session, "gone"))
    peer.forget(key)
    world.connect(peer.name)


def leave(world: World, peer: FakePeer, key: HeldLease) -> None:
    world.say(peer, Goodbye("bye"))


def drain_away(world: World, peer: FakePeer, key: HeldLease) -> None:
    world.call(lambda number: WorkerOrdered(number, peer.peer, "drain", hand_over=True))
    assert key not in peer.leases


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (fail, "failed"),
        (fall_silent, "silent"),
        (come_back_without_it, "forgotten"),
        (leave, "left"),
        (drain_away, "drained"),
    ],
)
def test_a_lease_that_is_over_gives_its_open_samples_back(
    end: Callable[[World, FakePeer, HeldLease], None], cause: Cause
) -> None:
    world, sessions, one, other = session_world()
    key = key_of_session(one)
    world.say(one, one.finish(key, 1))
    end(world, one, key)
    world.drain()
    assert sessions.lost_by == [cause]
    where = one if cause == "forgotten" else other
    again = [each for each in of_sessions(where) if each.lease != key.lease]
    assert [sample for each in again for sample in each.samples] == [0, 2]


def test_a_returning_worker_continues_a_lease_of_any_kind() -> None:
    world, sessions, one, _ = session_world()
    key = key_of_session(one)
    world.handle(PeerDisconnected(one.session, "gone"))
    world.connect(one.name)
    assert (key in one.leases, sessions.lost_by) == (True, [])


def test_no_worker_can_change_a_lease_of_another_worker() -> None:
    world, sessions, one, other = session_world()
    key = key_of_session(one)
    world.say(other, LeaseProgress(*key, ()))
    assert other.inbox[-1] == LeaseCancelled(*key)
    world.say(other, LeaseFailed(*key, "it is slow"))
    world.say(other, SampleFinished(*key, 0, b"", b"", (), "stop"))
    assert answers(other)[-1] == (False, "the lease is over")
    assert (sessions.lost_by, sessions.written) == ([], {})


def test_a_sample_waits_for_a_version_that_no_worker_serves_yet() -> None:
    world, _ = world_of(4)
    sessions = Sessions.of(world, 5)
    world.say(world.peers["w0"], Heartbeat(0, 0, 0, 0))
    world.drain()
    assert sessions.waiting == set(range(SAMPLES))


def test_a_lease_of_a_kind_that_ended_with_the_process_is_cancelled() -> None:
    world, _, one, _ = session_world()
    key = key_of_session(one)
    world.crash()
    assert key not in one.leases


def test_two_kinds_of_work_have_two_numbers() -> None:
    world, *_ = session_world()
    with pytest.raises(AssertionError, match="two kinds of work have one number"):
        Sessions.of(world, 1)

"""Groups as a kind of work: leases and prompts; each through the whole machine, as a worker sees it."""

import pytest

from echo2d.core.base.ids import LeaseId
from echo2d.core.cluster.events import Note, StopRun
from echo2d.core.protocol.control_messages import (
    Goodbye,
    Heartbeat,
    HeldLease,
    LeaseCancelled,
    LeaseFailed,
    LeaseProgress,
    Welcome,
)
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.work.events import (
    PromptDrawn,
    PromptFailed,
)
from echo2d.core.work.training.group_table import LEASE_FAILURES_MAX
from echo2d.core.work.training.prompts import SKIPPED_MAX
from tests.support.coordinator_world import (
    World,
)
from tests.support.rollouts import SILENCE_S, dropped, grants, world_of


def test_silence_gives_the_open_samples_to_another_worker() -> None:
    world, (one, two) = world_of(2, 2, staleness_max=0, trajectories_per_step=2)
    world.say(one, one.finish(*one.open[0]))
    before = grants(one)[0]
    while world.now < SILENCE_S:
        world.pass_time(2.0)
        world.say(two, LeaseProgress(LeaseId(0), 0, ()))
    after = grants(two)[-1]
    assert (after.lease, after.attempt, after.samples) == (before.lease, 1, (1,))
    assert any(isinstance(m, LeaseCancelled) for m in two.inbox)  # of the lease it never had


def test_failed_leases_end_their_group_and_a_failing_worker_rests() -> None:
    world, (worker,) = world_of(2, staleness_max=0, trajectories_per_step=2)
    for _ in range(LEASE_FAILURES_MAX + 1):
        key = next(iter(worker.leases))
        worker.forget(key)
        world.say(worker, LeaseFailed(key.lease, key.attempt, "engine fault"))
        reasons = dropped(world)
        assert not worker.leases
        while not worker.leases:
            world.pass_time(0.5)
            world.say(worker, Heartbeat(0))
    assert reasons == ["lease: its leases failed"]
    assert grants(worker)[-1].group > grants(worker)[0].group


def test_a_reconnected_worker_keeps_its_leases_and_loses_what_it_forgot() -> None:
    world, (worker,) = world_of(4)
    kept, lost = worker.leases
    worker.forget(lost)
    worker.leases[HeldLease(LeaseId(9), 0)] = grants(worker)[0]
    world.connect(worker.name, slots=4)
    welcome = [message for message in worker.inbox if isinstance(message, Welcome)][-1]
    assert (welcome.keep, welcome.cancel) == ((kept,), (HeldLease(LeaseId(9), 0),))
    assert grants(worker)[-1].attempt == 1


def test_a_goodbye_frees_the_workers_samples_at_once() -> None:
    world, (one, two) = world_of(2, 4, staleness_max=0, trajectories_per_step=2)
    owner, other = (one, two) if one.leases else (two, one)
    world.say(owner, Goodbye("stopping"))
    assert [grant.attempt for grant in grants(other)] == [1]


def test_a_prompt_that_cannot_be_made_is_skipped() -> None:
    """Another one takes its place, and the run stops only if many in a row cannot be made."""
    world, _ = world_of(2)
    cursor = world.ledger.recover().next_cursor("") + 50
    actions = world.handle(PromptFailed(cursor, "row 3 has no 'question'"))
    assert [each.kind for each in actions if isinstance(each, Note)] == ["prompt"]
    assert world.stopped is None
    for _ in range(SKIPPED_MAX):
        world.handle(PromptFailed(cursor, "x"))
    assert "neither could many before it" in str(world.stopped)


def test_prompts_beyond_the_vocabulary_stop_the_run() -> None:
    world = World()
    world.handle(PromptDrawn(0, pack_tokens([1, 99])))
    assert isinstance(world.actions[0], StopRun)
    assert "prompt 0" in str(world.stopped)


@pytest.mark.parametrize("tokens", [b"", b"123"])
def test_malformed_prompts_stop_the_run(tokens: bytes) -> None:
    world = World()
    world.handle(PromptDrawn(0, tokens))
    assert world.stopped is not None


def test_a_prompt_that_fills_the_context_is_skipped() -> None:
    world, _ = world_of(1, group_size=1, trajectories_per_step=1, context_max=6)
    groups = world.state._groups
    [note] = groups.prompt_drawn(PromptDrawn(10_000, pack_tokens([3] * 6)))
    assert isinstance(note, Note)
    assert "leaves no answer" in note.text
    for _ in range(SKIPPED_MAX - 2):
        groups.prompt_drawn(PromptDrawn(10_000, pack_tokens([3] * 6)))
    [stop] = groups.prompt_drawn(PromptDrawn(10_000, pack_tokens([3] * 6)))
    assert isinstance(stop, StopRun)

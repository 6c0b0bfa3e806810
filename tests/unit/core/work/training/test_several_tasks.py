"""A run with several tasks: exact shares of each step, a cursor each, and how it ends."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from echo2d.core.cluster.events import Reply
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import Source, pack_tokens
from echo2d.core.rules.tasks import RowFilter, TaskRules
from echo2d.core.work.events import PromptDrawn, PromptsEnded, RowJudged
from tests.support.coordinator_world import World, rules, train
from tests.support.rollouts import grants, world_of


def task(name: str, weight: str = "1", **changes: object) -> TaskRules:
    made = TaskRules(name, Fraction(weight), max_new_tokens=8, stop_token_ids=(1,))
    return replace(made, **changes)  # type: ignore[arg-type]


MIXED = (task("a", "0.5"), task("b", "0.3"), task("c", "0.2", sampling=Sampling(0.5)))


def running(*slots: int, **changes: object) -> World:
    return world_of(*slots, trajectories_per_step=8, **changes)[0]


@pytest.mark.parametrize("prefetch", [False, True])
def test_every_step_has_the_share_of_each_task_within_one_group(prefetch: bool) -> None:
    world = running(6, 2, tasks=MIXED)
    train(world, 30, prefetch=prefetch)
    had: Counter[str] = Counter()
    for step, batch in world.trained.items():
        found = Counter(group.trajectories[0].source.task for group in batch.groups)
        assert found.total() == 4
        assert all(abs(found[each.name] - 4 * float(each.weight)) < 1 for each in MIXED), found
        had += found
        assert all(abs(had[each.name] - 4 * step * float(each.weight)) <= 1 for each in MIXED)


def test_a_group_names_the_sampling_of_its_task() -> None:
    world = running(8, tasks=MIXED)
    train(world, 5)
    groups = [group for batch in world.trained.values() for group in batch.groups]
    found = {(group.trajectories[0].source.task, group.sampling) for group in groups}
    assert found == {("a", Sampling()), ("b", Sampling()), ("c", Sampling(0.5))}
    leases = {lease.sampling for peer in world.peers.values() for lease in grants(peer)}
    assert leases == {Sampling(), Sampling(0.5)}


def test_each_task_continues_at_its_own_cursor_after_a_crash() -> None:
    world = running(8, tasks=MIXED)
    train(world, 4)
    before = {each.task: each.next_cursor for each in world.ledger.recover().tasks}
    assert before.keys() == {"a", "b", "c"}
    world.crash()
    drawn = {
        event.source.task: event.cursor
        for event in reversed(world.pending)
        if isinstance(event, PromptDrawn)
    }
    assert drawn == before


def test_groups_of_a_removed_or_differently_sampled_task_are_dropped_after_a_restart() -> None:
    world = running(2, tasks=MIXED)
    assert len(world.ledger.groups) == 1
    [stored] = world.ledger.groups.values()
    assert stored.source.task == "a"
    world.rules = replace(world.rules, tasks=MIXED[1:])
    world.crash()
    world.drain()
    assert all(each.source.task != "a" for each in world.ledger.groups.values())
    changed = [replace(each, sampling=Sampling(0.9)) for each in MIXED[1:]]
    world.rules = replace(world.rules, tasks=tuple(changed))
    before = set(world.ledger.groups)
    world.crash()
    world.drain()
    assert not before & set(world.ledger.groups)


def ended(world: World, *cursors: tuple[str, int]) -> Reply | None:
    """The reply to the learner's wait, once these tasks have ended before these cursors."""
    waiting = world.ask_batch(max(world.trained, default=0) + 1)
    for name, cursor in cursors:
        world.handle(PromptsEnded(cursor, name))
    world.work()
    return world.replies.get(waiting)


def test_the_run_ends_when_the_prompts_of_a_task_end() -> None:
    world = running(8, tasks=(task("a"), task("b")))
    world.ends["a"] = 12
    train(world, 6)
    found = ended(world)
    assert found is not None
    assert found.status == 409
    assert isinstance(found.body, dict)
    assert (found.body["error"], found.body["detail"]) == (
        "ended",
        "the prompts of task 'a' have ended: batch 7 cannot be filled",
    )
    taken = {group.cursor for group in world.ledger.groups.values() if group.source.task == "a"}
    assert all(cursor < 12 for cursor in taken)


def test_prompts_of_retired_rows_are_skipped_even_after_a_restart() -> None:
    """Rows "even" always get equal rewards."""
    world = running(4, tasks=(task("a", row_filter=RowFilter(1, 1000)),))
    world.rows = lambda cursor: "odd" if cursor % 2 else f"even {cursor % 8}"
    world.reward = lambda cursor, sample: float(sample % 2) if cursor % 2 else 1.0
    train(world, 6)
    asked = [group.cursor for group in world.ledger.groups.values()]
    retired = {row.source.row for row in world.ledger.recover().rows if row.equal}
    assert retired == {"even 0", "even 2", "even 4", "even 6"}
    world.crash()
    world.drain()
    world.work()
    train(world, 3, start=6)
    later = [
        group.cursor for group in world.ledger.groups.values() if group.cursor > max(asked) + 8
    ]
    assert later
    assert all(cursor % 2 for cursor in later)
    assert isinstance(next(iter(world.ledger.recover().rows)), RowJudged)


def test_a_prompt_of_another_task_is_not_used_for_this_one() -> None:
    world = running(2, tasks=(task("a"), task("b")))
    prompts = world.state._groups.prompts
    world.handle(PromptDrawn(10_000, pack_tokens([3]), Source("b")))
    assert all(10_000 not in each._ready for each in prompts.values())
    assert rules().tasks[0].name == ""

"""The run's groups as work: what waits, and when a group begins. With tokens: `test_partials`."""

from echo2d.core.work.events import PromptDrawn
from tests.support.coordinator_world import World, rules
from tests.support.rollouts import SILENCE_S, grants, world_of


def test_no_slot_stays_empty_and_samples_without_a_slot_go_first() -> None:
    world, (worker,) = world_of(5)
    assert [grant.samples for grant in grants(worker)] == [(0, 1), (0, 1), (0,)]
    first, _, third = grants(worker)
    world.say(worker, worker.finish(*worker.open[0]))
    assert (grants(worker)[-1].group, grants(worker)[-1].samples) == (third.group, (1,))
    assert (first.attempt, first.oldest, first.max_new_tokens, first.silence_s) == (
        0,
        0,
        8,
        SILENCE_S,
    )
    assert (
        first.prompt == world.ledger.groups[first.group].record.prompt
    )  # durable before it was sent


def test_admission_stops_at_the_gate() -> None:
    world, (worker,) = world_of(100, staleness_max=1)
    assert len(grants(worker)) == 4  # two steps of two groups: the third needs version 1
    assert world.state.status().groups.in_flight == 4


def test_a_group_is_split_only_if_no_worker_has_room() -> None:
    world = World(rules(group_size=4, trajectories_per_step=4))
    world.connect("seed", kind="seed", slots=0)
    world.open_session()
    one, two = world.connect("one", slots=3), world.connect("two", slots=3)
    world.publish(0)
    prompts = [event for event in world.pending if isinstance(event, PromptDrawn)]
    world.pending = [event for event in world.pending if event not in prompts]
    world.drain()
    world.refit(one)
    world.refit(two)
    world.handle(prompts[0])
    assert [grant.samples for grant in grants(one)] == [(0, 1, 2)]
    assert [grant.samples for grant in grants(two)] == [(3,)]

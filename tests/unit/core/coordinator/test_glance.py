"""The few facts for which the dashboard asks all the time, and the tree of a broadcast."""

from tests.support.catch_up import newcomer, running
from tests.support.coordinator_world import World


def test_the_glance_at_an_empty_run_is_empty() -> None:
    glance = World().state.glance()
    assert (glance.committed_step, glance.newest_version, glance.spread) == (0, None, None)
    assert World().state.tree(0) is None


def test_the_glance_agrees_with_the_status() -> None:
    world = running("a", "b", steps=3)
    glance, status = world.state.glance(), world.state.status(now=world.now)
    assert status.newest_version is not None
    assert glance.newest_version == status.newest_version.version
    assert glance.committed_step == status.committed_step == 3
    assert glance.tokens_accepted == status.tokens_accepted > 0
    assert glance.trajectories_trained == status.trajectories.trained
    assert (glance.groups_buffered, glance.groups_in_flight, glance.leases) == (
        status.groups.buffered,
        status.groups.in_flight,
        status.groups.leases,
    )


def test_the_tree_of_a_broadcast_shows_the_progress_of_its_peers() -> None:
    world = running("a", "b", steps=3)
    spread, tree = world.state.glance().spread, world.state.tree(0)
    assert spread is not None
    assert tree is not None
    assert spread.plan == tree.plan
    assert len(tree.peers) == len(spread.received) == len(spread.state) == 3
    assert set(tree.peers[1:]) == {world.peers[name].peer for name in "ab"}
    assert len(tree.parents) == 2
    assert all(0 <= parent < 3 for parent in tree.parents)
    assert 0 in tree.parents, "somebody receives from the seed"
    assert spread.state == ".vv"
    assert sum(tree.weights) == 1.0
    assert world.state.tree(99) == tree, "a stripe that the plan does not have is the first one"


def test_a_newcomer_is_in_the_tree_of_the_next_generation() -> None:
    world = running("a", "b", steps=3)
    before = world.state.tree(0)
    newcomer(world, "late", 1)
    after = world.state.tree(0)
    assert before is not None
    assert after is not None
    assert (after.plan == before.plan) == (after.peers == before.peers)

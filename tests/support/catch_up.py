"""Runs that publish deltas, and workers that join them late."""

from typing import Any

from echo2d.core.protocol.control_messages import (
    EncodeVersion,
)
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import (
    World,
    messages,
    rules,
    train,
    version_key,
)


def running(*workers: str, steps: int = 1, **changes: Any) -> World:
    """A run whose workers serve version `steps`; each version after the first arrived as a delta."""
    world = World(rules(**changes))
    world.connect("seed", kind="seed", slots=0)
    for name in workers:
        world.connect(name)
    train(world, steps)
    world.work()
    assert all(world.peers[name].stands == version_key(steps) for name in workers)
    return world


def orders(world: World) -> list[EncodeVersion]:
    return messages(world.peers["seed"], EncodeVersion)


def bases(world: World) -> list[str | None]:
    return [order.base_path for order in orders(world)]


def newcomer(world: World, name: str, stands: int | None = None) -> FakePeer:
    """A worker that joins with this version in its slot."""
    key = None if stands is None else version_key(stands)
    world.peers[name] = FakePeer(name, "worker", 4, world.peers["seed"].session, stands=key)
    return world.connect(name)


def served(world: World) -> set[int | None]:
    """The versions that the run's workers serve."""
    serving = [worker.serving for worker in world.state.status().workers]
    return {None if version is None else version.version for version in serving}


def taken_order(world: World) -> EncodeVersion:
    """The newest order to catch up."""
    return [order for order in orders(world) if order.aside][-1]

"""A whole evaluation of an environment: the machine, and the environment's real processes."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import RunId
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.protocol.trajectory import RewardPart, unpack_tokens
from echo2d.core.rollouts.events import DrawPrompt, ForgetEpisode, StepEnvironment
from echo2d.runtime.coordinator.data_plane import DataPlane, data_plane, open_evals, open_tasks
from echo2d.runtime.coordinator.main import make_rules
from echo2d.tasks.sort_digits import EOS, answer
from tests.support.coordinator_world import World

ASKED = 9  # tokens of a question, and at the end of every later turn: eight digits and their end


class PlayedWorld(World):
    """A world whose prompts and episodes come from real processes."""

    plane: DataPlane

    def _perform(self, action: CoordinatorAction) -> None:
        match action:
            case DrawPrompt() | StepEnvironment():
                self.orders.append(action)
            case ForgetEpisode():
                self.plane.forget(action)
            case _:
                super()._perform(action)

    def start(self, plane: DataPlane) -> None:
        self.plane = plane
        self.orders: list[DrawPrompt | StepEnvironment] = []
        self.connect("seed", kind="seed", slots=0)
        self.connect("w0", slots=8)
        self.open_session()
        self.publish(0)

    async def obey(self) -> bool:
        """Let the processes answer what they were asked."""
        orders, self.orders = self.orders, []
        plane = self.plane
        asks = [
            plane.draw(each) if isinstance(each, DrawPrompt) else plane.step(each)
            for each in orders
        ]
        self.pending += await asyncio.gather(*asks)
        return bool(orders)


def write(world: World, *, first_wrong: int) -> bool:
    """The worker sorts every time, but that sample `first_wrong` of each group fails in its first turn."""
    worker = world.peers["w0"]
    world.refit(worker)
    for key, sample in list(worker.open):
        lease = worker.leases[key]
        asked = unpack_tokens(lease.prompt).tolist()[-ASKED:]
        fails = sample == first_wrong and not lease.earlier
        world.say(worker, worker.finish(key, sample, tokens=(EOS,) if fails else answer(asked)))
    return bool(worker.open)


async def test_an_evaluation_of_two_turns_is_played_by_its_own_processes(tmp_path: Path) -> None:
    made = CoordinatorConfig.read(
        {
            "run": {"run_dir": str(tmp_path / "run"), "snapshot_root": str(tmp_path)},
            "policy": {"trajectories_per_step": 4, "group_size": 2},
            "sampling": {"vocab_size": 32, "max_new_tokens": 12},
            "task": [
                {"kind": "echo2d.demo.two_turns:TwoTurnDigits", "name": "game", "processes": 1}
            ],
            "eval": [{"task": "game", "rows": 4, "samples": 2, "options": {"split": "heldout"}}],
        }
    )
    async with AsyncExitStack() as stack:
        tasks = await open_tasks(stack, made)
        evals = await open_evals(stack, made, tasks)
        rules = await asyncio.to_thread(make_rules, made, RunId("run"), tasks, evals)
        world = PlayedWorld(rules)
        world.start(data_plane(tasks, evals, rules))
        while not world.ledger.evaluated:
            moved = await world.obey()
            world.drain()
            moved = write(world, first_wrong=1) or moved
            assert moved or world.orders or world.pending, "nothing moves"
        await world.obey()
    [found] = world.ledger.evaluated
    assert (found.name, found.rows, found.of, found.truncated) == ("game/heldout", 4, 4, 0.0)
    assert found.parts == (RewardPart("first", 0.5), RewardPart("second", 1.0))
    assert found.mean == pytest.approx(0.75)
    # Two answers of eight digits and their end; or the end alone, and one answer.
    assert found.tokens == pytest.approx((18 + 10) / 2)

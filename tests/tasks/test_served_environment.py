"""An environment as its process serves it: limits, and what becomes of instances."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.tasks.environment import EnvironmentAnswer, EpisodeLost
from echo2d.tasks.served_environment import OPEN_EPISODES_MAX, ServedEnvironment
from tests.support.nasty_environment import Nasty, NastyAsync, act


class Instances:
    """Makes instances of an environment, and counts them."""

    def __init__(self, directory: Path) -> None:
        self.made = 0
        self._directory = directory

    def served(self, kind: type[Nasty] = Nasty) -> ServedEnvironment:
        def make() -> Nasty:
            self.made += 1
            return kind(str(self._directory))

        return ServedEnvironment(make(), make, None)


def step(episode: int, turns: int, state: bytes | None, name: str = "go on") -> list[Any]:
    return ["step", episode, turns, state, b"", pack_tokens(act(name, 1)), "stop"]


def test_as_many_instances_as_episodes_are_open(tmp_path: Path) -> None:
    instances = Instances(tmp_path)
    served = instances.served()
    for episode in range(3):
        served.answer_at_once(["reset", episode, 1, 0])
    assert instances.made == 3
    assert served.answer_at_once(step(0, 0, None, "end"))[:2] == ["end", 1.0]
    assert served.answer_at_once(["drop", 1]) == []
    for episode in (3, 4):
        served.answer_at_once(["reset", episode, 1, 0])
    assert instances.made == 3
    # After an error nobody knows what an instance is in the middle of.
    with pytest.raises(ValueError, match="no"):
        served.answer_at_once(step(2, 0, None, "raise"))
    served.answer_at_once(["reset", 5, 1, 0])
    assert instances.made == 4


def test_no_more_episodes_than_a_process_takes(tmp_path: Path) -> None:
    served = Instances(tmp_path).served()
    for episode in range(OPEN_EPISODES_MAX):
        served.answer_at_once(["reset", episode, 1, 0])
    with pytest.raises(ValueError, match="1024 episodes are open in this process; no more fit"):
        served.answer_at_once(["reset", OPEN_EPISODES_MAX, 1, 0])
    served.answer_at_once(["reset", 0, 2, 0])  # in the place of itself


def test_an_episode_at_another_turn_is_restored(tmp_path: Path) -> None:
    """A step that was executed and not acknowledged is taken back."""
    served = Instances(tmp_path).served()
    first = served.answer_at_once(["reset", 0, 1, 0])
    done = served.answer_at_once(step(0, 0, first[2]))
    assert served.answer_at_once(step(0, 0, first[2]))[1] == done[1] == pack_tokens([1])
    assert served.answer_at_once(step(0, 1, done[2]))[1] == pack_tokens([2])
    with pytest.raises(EpisodeLost):
        served.answer_at_once(step(0, 1, None))
    with pytest.raises(EpisodeLost):
        served.answer_at_once(step(7, 0, None))


@pytest.mark.may_block
async def test_a_second_step_waits_for_nobody_and_is_refused(tmp_path: Path) -> None:
    served = Instances(tmp_path).served(NastyAsync)
    assert served.concurrent
    await served.answer(["reset", 0, 1, 0])
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(served.answer(step(0, 0, None, "wait")))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="episode 0: a step is under way"):
            await served.answer(step(0, 0, None))
    assert first.result()[1] == pack_tokens([1])


class Waiting:
    def __await__(self) -> Iterator[None]:
        yield


class Silent(Nasty):
    """It does not say that it waits."""

    def step(self, answer: EnvironmentAnswer) -> Any:
        return Waiting()


def test_an_environment_that_waits_must_say_so(tmp_path: Path) -> None:
    served = Instances(tmp_path).served(Silent)
    served.answer_at_once(["reset", 0, 1, 0])
    with pytest.raises(TypeError, match="is declared `async def`"):
        served.answer_at_once(step(0, 0, None))

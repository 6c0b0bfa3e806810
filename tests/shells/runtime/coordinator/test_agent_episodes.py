"""One episode of an outside agent, between the agent and the core."""

import asyncio

import pytest

from echo2d.core.base.ids import Digest, GroupId, PeerId, Version
from echo2d.core.protocol.trajectory import AuthoredSpan, Partial, pack_tokens
from echo2d.core.work.events import EpisodeEnded, StepEnvironment
from echo2d.net.gateway.errors import CallRefusal
from echo2d.runtime.coordinator.agent_episodes import AgentEpisode
from tests.support.polling import HANG_S

WRITTEN = AuthoredSpan(0, 2, Version(0), Digest(bytes(32)), PeerId("worker"))
OUTPUT = Partial(pack_tokens([3, 1]), bytes(8), (WRITTEN,))


def at_turn(turn: int) -> StepEnvironment:
    output = OUTPUT if turn else Partial(b"", b"", ())
    return StepEnvironment(GroupId(0), 0, 0, turn, 0, 0, pack_tokens([5]), output, "stop")


async def end(turn: int, *, kept: bool) -> tuple[EpisodeEnded, "asyncio.Task[None]"]:
    """What the core hears of the agent's end, and the agent's call."""
    episode = AgentEpisode(at_turn(turn), HANG_S, lambda *_: True)
    episode.arrived(at_turn(turn))
    reward = 1.0 if turn else None
    ending = asyncio.create_task(episode.finish(reward, "" if turn else "no tools", ()))
    told = await episode.answer()
    assert isinstance(told, EpisodeEnded)
    assert not ending.done(), "it is not durable yet"
    episode.close(ended=kept)
    await asyncio.wait([ending], timeout=HANG_S)
    return told, ending


async def test_the_end_of_an_episode_is_acknowledged_when_it_is_durable() -> None:
    told, ending = await end(1, kept=True)
    assert (told.reward, told.again) == (1.0, False)
    assert ending.exception() is None


async def test_the_end_of_an_episode_is_refused_if_its_group_was_given_up_meanwhile() -> None:
    _, ending = await end(1, kept=False)
    with pytest.raises(CallRefusal, match="over"):
        ending.result()


async def test_an_episode_without_a_turn_is_given_back() -> None:
    told, ending = await end(0, kept=False)
    assert (told.reward, told.reason, told.again) == (None, "no tools", True)
    assert ending.exception() is None

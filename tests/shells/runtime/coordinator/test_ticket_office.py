"""Tickets for the core's orders, without HTTP, also for a sample that is played again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.protocol.trajectory import (
    NOTHING,
    AuthoredSpan,
    GroupRecord,
    Source,
    StoredGroup,
    TrajectoryRecord,
    pack_tokens,
)
from echo2d.core.rules.tasks import EpisodeRules, TaskRules
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    StepEnvironment,
)
from echo2d.net.gateway.episodes import AgentEnd, HeardMessages, Spoken
from echo2d.net.gateway.errors import CallRefusal
from echo2d.net.security.tickets import make_ticket, ticket_key
from echo2d.runtime.coordinator.agent_episodes import AgentCalls, Tickets
from echo2d.tasks.episodes import Episodes
from echo2d.tasks.pool import TaskPool
from tests.support.coordinator_world import rules

TASK = TaskRules(
    name="outside",
    episode=EpisodeRules(
        outside=True,
        turns_max=16,
        tokens_max=8192,
    ),
    max_new_tokens=1024,
)
RULES = rules(tasks=(TASK,), vocab_size=100)
PROMPT, AT = pack_tokens([7]), (GroupId(3), 1)
DIGEST: Any = bytes(32)


def order(turn: int, begun: int = 0, **changes: Any) -> StepEnvironment:
    made = StepEnvironment(*AT, begun, turn, 5, 11, PROMPT, NOTHING, "stop", task="outside")
    return replace(made, **changes)


def written(before: EnvironmentStepped) -> StepEnvironment:
    """The turn that a worker wrote behind the agent's first call."""
    partial = NOTHING.with_given(before.tokens)
    span = AuthoredSpan(0, 1, Version(0), DIGEST, PeerId("w"))
    partial = partial.plus(pack_tokens([9]), bytes(4), [span], shift=partial.length)
    return order(1, before.begun, output=partial, state=before.state)


async def call(_: StepEnvironment, __: HeardMessages) -> Spoken:
    return Spoken(PROMPT + pack_tokens([8]))


async def play(calls: AgentCalls, tickets: Tickets, begun: int, end: AgentEnd) -> tuple[str, Any]:
    """One episode of one turn; returns its ticket, and what its end is told."""
    stepped = asyncio.create_task(calls.step(order(0, begun)))
    taken = await tickets.take("outside", 5.0)
    assert taken is not None
    assert (taken.row, taken.seed, taken.sample) == (5, 11, 1)
    _, episode = tickets.find(taken.ticket)
    asking = asyncio.create_task(episode.ask(call))
    first = await stepped
    assert isinstance(first, EnvironmentStepped)
    ended = asyncio.create_task(calls.step(written(first)))
    assert (await asking).turn == 1
    ending = asyncio.create_task(tickets.end(taken.ticket, end))
    event = await ended
    assert isinstance(event, EpisodeEnded)
    assert (event.reward, event.begun) == (end.reward, begun)
    assert not ending.done(), "it is not durable yet"
    calls.forget(ForgetEpisode(*AT, "outside", ended=True))
    return taken.ticket, await ending


@asynccontextmanager
async def an_office(*recovered: StoredGroup) -> AsyncIterator[tuple[AgentCalls, Tickets]]:
    async with TaskPool("agents", {"opening": [7]}) as pool:
        calls = AgentCalls(
            Episodes(pool),
            TASK,
            RULES,
            silence_s=60.0,
            rows=0,
            in_text=False,
            offered=asyncio.Event(),
        )
        yield calls, Tickets({"outside": calls}, RULES.seed_key, recovered)


async def test_a_sample_that_is_played_again_has_its_own_end() -> None:
    """As after an audit: the first ticket's end is still answered, and says nothing about the second one's."""
    async with an_office() as (calls, tickets):
        first, told = await play(calls, tickets, 0, AgentEnd(1.0))
        assert (told["turns"], told["written"], told["differs"]) == (1, 1, "")
        second, _ = await play(calls, tickets, 1, AgentEnd(0.25))
        assert await tickets.end(first, AgentEnd(1.0)) == told
        for ticket, reward in ((first, 0.25), (second, 1.0)):
            with pytest.raises(CallRefusal, match="has already ended with another"):
                await tickets.end(ticket, AgentEnd(reward))


async def test_a_repeated_end_is_recognised_by_its_reward_after_a_restart() -> None:
    span = AuthoredSpan(1, 2, Version(0), DIGEST, PeerId("w"))
    tokens = pack_tokens([8, 9])
    kept = TrajectoryRecord(1, tokens, bytes(8), (span,), "stop", 0.5)
    stored = StoredGroup(GroupRecord(AT[0], PROMPT, (kept,)), 5, Source("outside", "5"))
    old, _ = make_ticket(ticket_key(RULES.seed_key), *AT)
    async with an_office(stored) as (calls, tickets):
        assert (await tickets.end(old, AgentEnd(0.5)))["ended"]
        with pytest.raises(CallRefusal, match="another reward"):
            await tickets.end(old, AgentEnd(1.0))
        await play(calls, tickets, 1, AgentEnd(1.0))
        with pytest.raises(CallRefusal) as refused:
            await tickets.end(old, AgentEnd(0.5))
        assert refused.value.status in (410, 503)

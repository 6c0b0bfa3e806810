"""Tickets from before a restart of the coordinator."""

import asyncio
from dataclasses import replace
from http import HTTPStatus
from typing import Any, cast

import pytest

from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.trajectory import Partial, pack_tokens
from echo2d.core.rules.tasks import EpisodeRules, TaskRules
from echo2d.core.work.events import ForgetEpisode, StepEnvironment
from echo2d.net.gateway.errors import CallRefusal
from echo2d.net.security.tickets import make_ticket, ticket_key
from echo2d.runtime.coordinator.agent_episodes import AgentCalls, Tickets
from tests.support.coordinator_world import RULES
from tests.support.polling import HANG_S

TASK = TaskRules(
    max_new_tokens=8,
    stop_token_ids=(1,),
    episode=EpisodeRules(
        outside=True,
        turns_max=16,
        tokens_max=8192,
    ),
)
OFFERED = StepEnvironment(
    GroupId(3), 0, 0, 0, 7, 5, pack_tokens([4]), Partial(b"", b"", ()), "stop"
)


async def test_an_agent_with_an_old_ticket_cannot_continue_a_restarted_episode() -> None:
    """Its turns were forgotten while the coordinator did not know its ticket yet: its next call is no first one."""
    rules = replace(RULES, tasks=(TASK,), seed_key=bytes(32))
    calls = AgentCalls(
        cast("Any", None), TASK, rules, silence_s=HANG_S, rows=0, in_text=False,
        offered=asyncio.Event(),
    )  # fmt: skip
    office = Tickets({"": calls}, rules.seed_key, ())
    before, _ = make_ticket(ticket_key(rules.seed_key), OFFERED.group, OFFERED.sample)
    waiting = asyncio.create_task(calls.step(OFFERED))
    with pytest.raises(CallRefusal) as refused:
        office.find(before)
    assert refused.value.status == HTTPStatus.GONE
    taken = await office.take(None, 0.0)
    assert taken is not None, "another agent may begin it"
    assert office.find(taken.ticket)[1].at == (3, 0)
    calls.forget(ForgetEpisode(OFFERED.group, OFFERED.sample))
    await waiting

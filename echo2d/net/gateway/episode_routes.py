"""The endpoints of agents: a ticket for an episode that the run wants, the episode, and its end.

    POST /v1/episodes               a ticket; for tokens of role agent
    GET  /v1/episodes/TICKET        the episode as the run has it
    POST /v1/episodes/TICKET/end    its reward; the same end again is answered again

The ticket in a path is the credential. Not here: the calls of an episode (`agents`).
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from echo2d.core.protocol.trajectory import RewardPart
from echo2d.net.gateway.agents import AgentEnd, TicketOffice
from echo2d.net.gateway.errors import CallRefusal
from echo2d.net.http.admission import admit
from echo2d.net.http.json_fields import fields, malformed, seconds, text

WAIT_S_MAX = 30.0
EPISODE_PARTS_MAX = 32
PART_NAME_CHARS_MAX = 64
ERROR_CHARS_MAX = 500
TRACE_BRANCHES_MAX = 256


class EpisodeEndpoints:
    """The handlers of /v1/episodes."""

    def __init__(self, office: TicketOffice) -> None:
        self._office = office

    async def take(self, request: web.Request) -> web.Response:
        body = await fields(request, set(), frozenset({"task", "wait_s"}))
        task = None if body.get("task") is None else text(body["task"], "task")
        wait_s = min(WAIT_S_MAX, seconds(body.get("wait_s") or 0, "wait_s"))
        taken = await self._office.take(task, wait_s)
        if taken is None:
            detail = "no episode is wanted now; come back"
            raise CallRefusal(HTTPStatus.SERVICE_UNAVAILABLE, "late", detail)
        rules = taken.task
        return web.json_response({
            "ticket": taken.ticket, "task": rules.name, "row": taken.row, "seed": taken.seed,
            "group": taken.group, "sample": taken.sample, "samples": taken.samples,
            "temperature": rules.sampling.temperature, "max_tokens": rules.max_new_tokens,
            "turns_max": rules.episode.turns_max if rules.episode else 1,
            "silence_s": taken.silence_s,
        })  # fmt: skip

    async def record(self, request: web.Request) -> web.Response:
        found = self._office.record(request.match_info["ticket"])
        admit(request)
        return web.json_response(found)

    async def end(self, request: web.Request) -> web.Response:
        ticket = request.match_info["ticket"]
        self._office.check(ticket)
        admit(request)
        body = await fields(request, set(), frozenset({"reward", "parts", "error", "trace"}))
        told = await self._office.end(ticket, _end(body))
        return web.json_response(told)


def _end(body: Mapping[str, Any]) -> AgentEnd:
    error = text(body.get("error") or "", "error")[:ERROR_CHARS_MAX]
    reward = body.get("reward")
    if (reward is None) == (not error):
        raise malformed(
            "expected a reward, or an error if nobody can say what the episode is worth"
        )
    parts = body.get("parts") or {}
    if not isinstance(parts, dict) or len(parts) > EPISODE_PARTS_MAX:
        raise malformed(f"parts: expected at most {EPISODE_PARTS_MAX} names with numbers")
    named = [
        RewardPart(text(name, "parts")[:PART_NAME_CHARS_MAX], _number(value, "parts"))
        for name, value in parts.items()
    ]
    given = None if reward is None else _number(reward, "reward")
    return AgentEnd(given, tuple(named), error, _trace(body.get("trace") or []))


def _trace(given: Any) -> tuple[tuple[list[int], list[list[int]]], ...]:
    if not isinstance(given, list) or len(given) > TRACE_BRANCHES_MAX:
        raise malformed(f"trace: expected a list of at most {TRACE_BRANCHES_MAX} branches")
    found = []
    for branch in given:
        match branch:
            case {"token_ids": list(ids), "written": list(written)} if all(
                type(each) is int for each in ids
            ) and all(isinstance(each, list) and len(each) == 2 for each in written):
                found.append((ids, written))
            case _:
                raise malformed("trace: expected branches of {token_ids, written: [[start, end]]}")
    return tuple(found)


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e15:
        raise malformed(f"{name}: expected a number")
    return float(value)

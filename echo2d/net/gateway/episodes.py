"""Episodes that agents outside the run play over HTTP: tickets, ends, the limits of their calls, and the answers.

    POST /v1/episodes               a ticket for an episode that the run wants; for tokens of role agent
    ... X-Echo2d-Episode: TICKET    the gateway's calls; with this header they are the episode's turns
    GET  /v1/episodes/TICKET        the run's record of the episode
    POST /v1/episodes/TICKET/end    its reward; a repeat of the same end gets the same answer

A ticket may also be the API key; in a path it is the credential. As for all episodes, workers answer the
calls under leases, so the task sets the sampling: a call that asks for other sampling is refused.
Not here: chat messages (`conversations`), who plays what (`runtime/coordinator/agent_episodes.py`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn, Protocol

from aiohttp import web

from echo2d.core.protocol.trajectory import RewardPart, version_spans
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.calls.events import CallAsked, CallId, CallRefused, ChoiceGrew
from echo2d.core.work.events import StepEnvironment
from echo2d.net.gateway.errors import CallRefusal, unusable
from echo2d.net.gateway.requests import Ask
from echo2d.net.http.admission import admit
from echo2d.net.http.json_fields import fields, malformed, seconds, text
from echo2d.net.security.auth import Caller
from echo2d.net.security.tickets import TICKET_PREFIX

TICKET_HEADER = "X-Echo2d-Episode"
NAMED = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens")


# --- what passes between an episode and its agent


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a call says."""

    # The whole prompt's tokens, int32.
    tokens: bytes
    # The number of its messages and their hash. 0 and empty: the call came in tokens.
    messages: int = 0
    digest: bytes = b""
    # Why the call does not continue the earlier turns, although it should. Empty: it continues them.
    branch: str = ""


HeardMessages = tuple[int, bytes]
# Takes the last turn, and the number and hash of the previous call's messages. Returns what this call says.
Say = Callable[[StepEnvironment, HeardMessages], Awaitable[Spoken]]


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ends its episode."""

    # None: the episode failed, and `error` says why.
    reward: float | None
    parts: tuple[RewardPart, ...] = ()
    error: str = ""
    # The branches as the agent saw them: all token ids, and the ranges of them that workers wrote.
    trace: tuple[tuple[list[int], list[list[int]]], ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """An episode for an agent."""

    ticket: str
    task: TaskRules
    row: int  # of its group
    seed: int
    group: int
    sample: int
    samples: int  # of the row
    silence_s: float


class PlayedEpisode(Protocol):
    async def ask(self, say: Say) -> StepEnvironment:
        """The turn that answers a call. CallRefusal: the episode is over, or has no room."""


class TicketOffice(Protocol):
    async def take(self, task: str | None, wait_s: float) -> Taken | None:
        """Take an episode. None: none is wanted within `wait_s` seconds. CallRefusal: there is no such task."""

    def check(self, ticket: str) -> None:
        """CallRefusal: the text is no ticket of this run (401)."""

    def find(self, ticket: str) -> tuple[TaskRules, PlayedEpisode]:
        """The episode of a ticket.

        CallRefusal: it is no ticket of this run (401), its episode is over (410) or not known yet (503).
        """

    def record(self, ticket: str) -> Mapping[str, Any]: ...

    async def end(self, ticket: str, end: AgentEnd) -> Mapping[str, Any]: ...


def over() -> CallRefusal:
    return CallRefusal(HTTPStatus.GONE, "over", "this episode is over, or the run has given it up")


def full() -> CallRefusal:
    detail = "the episode has no room for this call: its turns, its tokens or the context are used up; end it"
    return CallRefusal(HTTPStatus.BAD_REQUEST, "context_length_exceeded", detail)


def asked(order: StepEnvironment) -> bytes:
    """The tokens of the call that this turn answers, int32."""
    output = order.output
    return order.prompt + output.tokens[4 * output.branch_start : 4 * output.turn_start]


def last_turn(order: StepEnvironment) -> ChoiceGrew:
    """The tokens that were written in this turn, as an event of a call."""
    output = order.output
    start = output.turn_start
    spans = [
        span._replace(start=span.start - start, end=span.end - start)
        for span in output.spans
        if span.start >= start
    ]
    tokens, logprobs = output.tokens[4 * start :], output.logprobs[4 * start :]
    return ChoiceGrew(CallId(0), 0, tokens, logprobs, version_spans(spans), order.finish)


# --- a call under a ticket


def ticket_of(request: web.Request) -> str | None:
    """The ticket that a request shows: in a header, or as its API key."""
    if (found := request.headers.get(TICKET_HEADER)) is not None:
        return found
    secret = request.headers.get("Authorization", "").partition(" ")[2].strip()
    return secret if secret.startswith(TICKET_PREFIX) else None


def named_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields that a request sets; the task sets the others."""
    named = body.get("sampling_params") or body
    return {name: named[name] for name in NAMED if named.get(name) is not None}


def check_sampling(task: TaskRules, ask: Ask, named: Mapping[str, Any]) -> None:
    """CallRefusal: the call asks for other sampling than the task's. named: from `named_sampling`."""
    for name in ("temperature", "top_p", "top_k", "min_p"):
        found, right = getattr(ask.sampling, name), getattr(task.sampling, name)
        if name in named and found != right:
            raise unusable(name, f"this episode is sampled with {right:g}; omit it")
    wanted = named.get("max_completion_tokens", named.get("max_tokens"))
    if wanted is not None and wanted < task.max_new_tokens:
        raise unusable("max_tokens", f"an answer may have {task.max_new_tokens} here; omit it")
    if ask.choices > 1:
        raise unusable("n", "an episode has one answer to each call")
    if ask.stops and set(ask.stops) != set(task.stop_strings):
        raise unusable("stop", f"answers end at {list(task.stop_strings)} here; omit it")
    if strange := set(ask.stop_token_ids).difference(task.stop_token_ids):
        raise unusable("stop_token_ids", f"answers do not end at {sorted(strange)} here")
    if ask.rng_seed is not None:
        raise unusable("seed", "the run draws its own; omit it")


class Answered:
    """A call whose answer is known already, in the form that `handlers` reads. model: as in `Answering`."""

    def __init__(self, order: StepEnvironment, caller: Caller, model: str) -> None:
        self._order, self._caller, self.model = order, caller, model

    def caller(self, request: web.Request) -> Caller:  # noqa: ARG002 - its ticket was good
        return self._caller

    def record(self, entry: dict[str, Any]) -> None:
        """Keep nothing, because the ledger has the episode."""

    def make(self, number: CallId) -> NoReturn:  # noqa: ARG002
        raise AssertionError("this call has its answer already, so it must not be made")

    @asynccontextmanager
    async def open(self, make: Callable[[CallId], CallAsked]) -> AsyncIterator["Answered"]:  # noqa: ARG002
        yield self

    async def next(self) -> ChoiceGrew | CallRefused:
        return last_turn(self._order)

    async def stop(self, choice: int) -> None:
        """Stop nothing, because the answer is complete."""


# --- the endpoints of agents

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
            detail = "no episode is wanted now; try again"
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
        raise malformed("expected either a reward, or an error if the episode has no reward")
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

"""Calls of agents that play an episode of the run: what they may ask for, and what they are answered.

    ... X-Echo2d-Episode: TICKET    the gateway's calls, which then are the episode's turns

A ticket may also be the API key. Its calls are answered by workers under leases like all of the run, so how
they are sampled is the task's: a call that asks for something else is refused.
Not here: tickets and ends over HTTP (`episode_routes`), chat messages (`conversations`), who plays what
(`runtime/coordinator/ticket_office.py`).
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
from echo2d.net.security.auth import Caller
from echo2d.net.security.tickets import TICKET_PREFIX

TICKET_HEADER = "X-Echo2d-Episode"
NAMED = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens")


# --- what an episode and a call say of each other


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a call says. tokens: of the whole prompt, int32. messages, digest: how many messages it has, and their
    hash; 0 and empty: it came in tokens. branch: why it does not follow the turns before, if it should; or empty.
    """

    tokens: bytes
    messages: int = 0
    digest: bytes = b""
    branch: str = ""


HeardMessages = tuple[int, bytes]
# (the last turn, how many messages the call before had and their hash) -> what this call says
Say = Callable[[StepEnvironment, HeardMessages], Awaitable[Spoken]]


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ends its episode. reward None: it failed; error says why. trace: the branches as it saw them:
    whole token ids, and the ranges of them that were written.
    """

    reward: float | None
    parts: tuple[RewardPart, ...] = ()
    error: str = ""
    trace: tuple[tuple[list[int], list[list[int]]], ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """An episode for an agent. row: that of its group. samples: how many episodes the row has."""

    ticket: str
    task: TaskRules
    row: int
    seed: int
    group: int
    sample: int
    samples: int
    silence_s: float


class PlayedEpisode(Protocol):
    async def ask(self, say: Say) -> StepEnvironment:
        """The turn that answers a call. CallRefusal: over, or full."""


class TicketOffice(Protocol):
    async def take(self, task: str | None, wait_s: float) -> Taken | None:
        """None: no episode is wanted within so many seconds. CallRefusal: there is no such task."""

    def check(self, ticket: str) -> None:
        """CallRefusal: it is no ticket of this run (401)."""

    def find(self, ticket: str) -> tuple[TaskRules, PlayedEpisode]:
        """CallRefusal: the ticket is none (401), counts no more (410) or not yet (503)."""

    def record(self, ticket: str) -> Mapping[str, Any]: ...

    async def end(self, ticket: str, end: AgentEnd) -> Mapping[str, Any]: ...


def over() -> CallRefusal:
    return CallRefusal(HTTPStatus.GONE, "over", "this episode is over, or nobody wants it any more")


def full() -> CallRefusal:
    detail = "the episode has no room for this call: its turns, its tokens or the context are used up; end it"
    return CallRefusal(HTTPStatus.BAD_REQUEST, "context_length_exceeded", detail)


def asked(order: StepEnvironment) -> bytes:
    """The tokens of the call that this turn answers, int32."""
    output = order.output
    return order.prompt + output.tokens[4 * output.branch_start : 4 * output.turn_start]


def last_turn(order: StepEnvironment) -> ChoiceGrew:
    """What was written in this turn, as the news of a call."""
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
    """How a request names its sampling; what it does not name is the task's."""
    named = body.get("sampling_params") or body
    return {name: named[name] for name in NAMED if named.get(name) is not None}


def check_sampling(task: TaskRules, ask: Ask, named: Mapping[str, Any]) -> None:
    """CallRefusal: the call asks to be sampled otherwise than the task's answers are. named: as of `named_sampling`."""
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
    """A call that is answered already, as `handlers` reads calls. model: as in `Answering`."""

    def __init__(self, order: StepEnvironment, caller: Caller, model: str) -> None:
        self._order, self._caller, self.model = order, caller, model

    def caller(self, request: web.Request) -> Caller:  # noqa: ARG002 - its ticket was good
        return self._caller

    def record(self, entry: dict[str, Any]) -> None:
        """The ledger has the episode."""

    def make(self, number: CallId) -> NoReturn:  # noqa: ARG002
        raise AssertionError("a call that is answered is not asked")

    @asynccontextmanager
    async def open(self, make: Callable[[CallId], CallAsked]) -> AsyncIterator["Answered"]:  # noqa: ARG002
        yield self

    async def next(self) -> ChoiceGrew | CallRefused:
        return last_turn(self._order)

    async def stop(self, choice: int) -> None:
        """It is whole."""

"""Hands out tickets for the episodes that agents outside play, and takes the ends of these.

A ticket's nonce is in the state that the core keeps of an episode, so it is good after a restart. An episode
whose agent has not called yet is offered again then, and its ticket does not count any more: it might be of an
episode whose turns were forgotten, and its agent would go on with another one.
Not here: HTTP (`net/gateway/episode_routes.py`), what a ticket is (`net/security/tickets.py`).
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from typing import Any

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.protocol.trajectory import StoredGroup, unpack_tokens
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.events import StepEnvironment
from echo2d.net.gateway.agents import AgentEnd, Taken, over
from echo2d.net.gateway.errors import CallRefusal
from echo2d.net.security.tickets import Ticket, make_ticket, read_ticket, ticket_key
from echo2d.runtime.coordinator.agent_calls import AgentCalls, At
from echo2d.runtime.coordinator.agent_episode import AgentEpisode

# Ends that are remembered.
REMEMBERED_MAX = 1 << 16

log = logging.getLogger("echo2d.agents")


@dataclass(frozen=True, slots=True)
class _Ended:
    """An end that is durable. said None: only its reward is known, from before a restart."""

    said: AgentEnd | None
    reward: float | None
    told: Mapping[str, Any]


class Tickets:
    """See the module docstring. secret: of the run's key. recovered: the groups of the ledger."""

    def __init__(
        self, tasks: Mapping[str, AgentCalls], secret: bytes, recovered: Iterable[StoredGroup]
    ) -> None:
        self._tasks = tasks
        self._key = ticket_key(secret)
        # By the nonces of their tickets; those from before a restart by sample, until it begins anew.
        self._ended: dict[bytes, _Ended] = {}
        self._kept: dict[At, _Ended] = {}
        # Until then an unknown ticket may be that of an answer that a worker writes.
        silence_s = max((each.silence_s for each in tasks.values()), default=0.0)
        self._know_all_at = time.monotonic() + silence_s
        for group in recovered:
            for kept in group.record.trajectories if group.source.task in tasks else ():
                told = _told(kept.turns, 1 + len(kept.branches), kept.written)
                self._kept[group.record.group, kept.sample] = _Ended(None, kept.reward, told)
        keep_newest(self._kept, REMEMBERED_MAX)

    async def take(self, task: str | None, wait_s: float) -> Taken | None:
        """An episode for an agent; see `net.gateway.agents.TicketOffice`."""
        if task is not None and task not in self._tasks:
            detail = f"task: expected one of {', '.join(sorted(self._tasks))}; found {task!r:.80}"
            raise CallRefusal(HTTPStatus.NOT_FOUND, "task", detail)
        tasks = [*self._tasks.values()] if task is None else [self._tasks[task]]
        if not tasks:
            return None
        offered = tasks[0].offered
        try:
            async with asyncio.timeout(wait_s):
                while (taken := self._take(tasks)) is None:
                    offered.clear()
                    await offered.wait()
                return taken
        except TimeoutError:
            return None

    def check(self, text: str) -> None:
        """CallRefusal: it is no ticket of this run (401)."""
        self._read(text)

    def find(self, text: str) -> tuple[TaskRules, AgentEpisode]:
        """The open episode of a ticket; see `net.gateway.agents.TicketOffice`."""
        return self._find(self._read(text))

    def record(self, text: str) -> Mapping[str, Any]:
        """An open episode as the run has it."""
        _, episode = self.find(text)
        order = episode.order
        return {
            "turns": order.turn,
            "branches": _branches_of(order),
            "branched": dict(episode.branches),
        }

    async def end(self, text: str, end: AgentEnd) -> Mapping[str, Any]:
        """End an episode as its agent says; see `net.gateway.agents.TicketOffice`."""
        ticket = self._read(text)
        if (before := self._before(ticket)) is not None:
            return _again(before, end)
        _, episode = self._find(ticket)
        order = episode.order
        differs = _difference(order, end.trace) if end.trace else ""
        reason = f"the agent saw another episode: {differs}" if differs else end.error
        reward = None if differs else end.reward
        if not order.turn and reward is not None:
            detail = "no call of this episode was answered: end it with an error"
            raise CallRefusal(HTTPStatus.BAD_REQUEST, "empty", detail)
        if reason:
            log.warning(
                "episode failed group=%d sample=%d reason=%s", order.group, order.sample, reason
            )
        try:
            await episode.finish(reward, reason, end.parts)
        except CallRefusal:
            # The same end may have come beside this one.
            if (before := self._before(ticket)) is not None:
                return _again(before, end)
            raise
        output = order.output
        told = _told(order.turn, 1 + len(output.branches), output.written, differs)
        if order.turn:
            self._ended[ticket.nonce] = _Ended(end, reward, told)
            keep_newest(self._ended, REMEMBERED_MAX)
        return told

    # --- inside

    def _take(self, tasks: Iterable[AgentCalls]) -> Taken | None:
        """A ticket for the oldest episode that is offered."""
        offers = [(episode.at, calls) for calls in tasks for episode in calls.offers()]
        if not offers:
            return None
        at, calls = min(offers, key=lambda offer: offer[0])
        episode = calls.open(at)
        assert episode is not None
        text, ticket = make_ticket(self._key, *at)
        episode.claim(ticket.nonce)
        order = episode.order
        return Taken(
            text,
            calls.task,
            calls.row_of(order),
            order.rng_seed,
            *at,
            calls.samples,
            calls.silence_s,
        )

    def _read(self, text: str) -> Ticket:
        ticket = read_ticket(self._key, text)
        if ticket is None:
            raise CallRefusal(
                HTTPStatus.UNAUTHORIZED, "credential", "this is no ticket of this run"
            )
        return ticket

    def _find(self, ticket: Ticket) -> tuple[TaskRules, AgentEpisode]:
        for calls in self._tasks.values():
            episode = calls.open(ticket.at)
            if episode is None:
                continue
            if episode.nonce != ticket.nonce:
                raise over()
            return calls.task, episode
        is_over = self._before(ticket) is not None or any(
            ticket.nonce in calls.void for calls in self._tasks.values()
        )
        if not is_over and time.monotonic() < self._know_all_at:
            detail = (
                "the coordinator has started anew, and does not know this episode yet; come back"
            )
            raise CallRefusal(HTTPStatus.SERVICE_UNAVAILABLE, "late", detail)
        raise over()

    def _before(self, ticket: Ticket) -> _Ended | None:
        """The end of this ticket's episode, if it came before."""
        if any(calls.open(ticket.at) is not None for calls in self._tasks.values()):
            self._kept.pop(ticket.at, None)
        return self._ended.get(ticket.nonce) or self._kept.get(ticket.at)


def _told(turns: int, branches: int, written: int, differs: str = "") -> dict[str, Any]:
    said = {"ended": True, "turns": turns, "branches": branches}
    return {**said, "written": written, "differs": differs}


def _again(before: _Ended, end: AgentEnd) -> Mapping[str, Any]:
    """The answer to an end that comes again. CallRefusal: it is another one."""
    same = before.reward == end.reward if before.said is None else before.said == end
    if not same:
        detail = "this episode has ended already, and otherwise"
        raise CallRefusal(HTTPStatus.CONFLICT, "ended", detail)
    return before.told


def _branches_of(order: StepEnvironment) -> list[dict[str, Any]]:
    """The branches of an episode: whole token ids, and which of them were written, by which version."""
    output, prompt = order.output, unpack_tokens(order.prompt).tolist()
    tokens = unpack_tokens(output.tokens).tolist()
    found = []
    for start, end in pairwise((0, *output.branches, output.length)):
        shift = len(prompt) - start
        spans = [span for span in output.spans if start <= span.start < end]
        written: list[list[int]] = []
        for span in spans:
            if written and written[-1][1] == span.start + shift:
                written[-1][1] = span.end + shift
            else:
                written.append([span.start + shift, span.end + shift])
        versions = [[span.start + shift, span.end + shift, span.version] for span in spans]
        ids = prompt + tokens[start:end]
        found.append({"token_ids": ids, "written": written, "versions": versions})
    return found


def _difference(order: StepEnvironment, trace: Sequence[tuple[list[int], list[list[int]]]]) -> str:
    """What an agent saw otherwise than the run has it; empty: nothing.

    The run's record is what is trained on: an agent that saw another episode must not say what this
    one is worth.
    """
    branches = _branches_of(order)
    if len(trace) != len(branches):
        return f"{len(trace)} branches, where the run has {len(branches)}"
    for number, ((ids, written), branch) in enumerate(zip(trace, branches, strict=True)):
        if ids != branch["token_ids"]:
            return f"branch {number} has other tokens"
        if written != branch["written"]:
            return f"branch {number}: other tokens were written"
    return ""

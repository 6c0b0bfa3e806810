"""Episodes that agents outside the run play: one episode, the episodes of a task, the tickets of all tasks.

    StepEnvironment, turn 0 --> offered --a ticket is taken--> played --end--> EpisodeEnded
                                   ^                             |
                                   +-------- agent silent -------+

While it is played, its agent's calls are on one side and the core's turns on the other:

    the core: StepEnvironment --> turn --> EnvironmentStepped or EpisodeEnded
                                   |          ^
                                answer     next call, or end
                                   v          |
    the agent:                   one HTTP call after the other

A call whose tokens begin with all tokens of the newest branch is that branch's next turn; any other call
begins a branch. A call that is repeated, for example after a lost answer, gets the same answer.
Not here: HTTP (`net/gateway/episodes.py`), what a ticket is (`net/security/tickets.py`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import msgpack

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.trajectory import RewardPart, StoredGroup, unpack_tokens
from echo2d.core.rules.run import RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.episodes import has_room
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    ProbeRewards,
    RewardsProbed,
    StepEnvironment,
)
from echo2d.net.gateway.episodes import AgentEnd, Say, Taken, asked, full, over
from echo2d.net.gateway.errors import CallRefusal
from echo2d.net.security.tickets import Ticket, make_ticket, read_ticket, ticket_key
from echo2d.runtime.coordinator.prompt_calls import PromptCalls
from echo2d.tasks.episodes import Episodes
from echo2d.tasks.pool import TaskPrompt
from echo2d.tasks.process import TaskFailed

# --- one episode

AgentEvent = EnvironmentStepped | EpisodeEnded


class AgentEpisode:
    """One episode and its agent, if it has one.

    silence_s: an agent that is silent for this long is given up.
    room(order, given, is_branch): whether a call that adds these tokens, or begins a branch with them, may be answered.
    """

    def __init__(
        self,
        order: StepEnvironment,
        silence_s: float,
        room: Callable[[StepEnvironment, bytes, bool], bool],
    ) -> None:
        # The nonce of the episode's ticket. None: no agent has a ticket for it.
        self.nonce: bytes | None = None
        # How many messages the last call had, and their hash.
        self.heard: tuple[int, bytes] = (0, b"")
        self.branches: Counter[str] = Counter()
        self.order = order
        if order.state is not None:
            self.nonce, count, digest = msgpack.unpackb(order.state)
            self.heard = count, digest
        self._silence_s, self._room = silence_s, room
        self._calls = asyncio.Lock()
        self._moved = asyncio.Event()
        self._reply: asyncio.Future[AgentEvent] | None = None
        self._patience: asyncio.Timeout | None = None
        self._over = self._kept = False

    # --- the core's side

    def arrived(self, order: StepEnvironment) -> None:
        """Take a turn from the core, which waits for the agent's answer to it."""
        self.order, self._reply = order, asyncio.get_running_loop().create_future()
        self._wake_waiting()

    async def answer(self) -> AgentEvent:
        """Wait for the agent's answer to the turn. An agent that is silent for too long is given up."""
        order, reply = self.order, self._reply
        assert reply is not None
        try:
            async with asyncio.timeout(None) as self._patience:
                self._restart_silence()
                return await reply
        except TimeoutError:
            reason = f"its agent was silent for {self._silence_s:g} s"
            return self._ended(order, None, reason, again=True)
        finally:
            self._patience = None

    def close(self, *, ended: bool) -> None:
        """Close the episode, which the core does not continue. ended: the reason is that its end is durable."""
        self._over, self._kept = True, ended
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(self._ended(self.order, None, "the core has given it up"))
        self._wake_waiting()

    # --- the agent's side

    @property
    def at(self) -> tuple[GroupId, int]:
        return self.order.group, self.order.sample

    @property
    def is_offered(self) -> bool:
        """Whether an agent may take the episode."""
        return self.nonce is None and not self.order.turn and self._waits

    def claim(self, nonce: bytes) -> None:
        self.nonce = nonce
        self._restart_silence()

    async def ask(self, say: Say) -> StepEnvironment:
        """Make a call; returns the turn that answers it. say: makes the call's prompt, given the last turn.

        CallRefusal: the episode is over (410), or has no room (400). If `say` raises, the episode is unchanged.
        """
        async with self._calls:
            order = await self._at_turn()
            spoken = await say(order, self.heard)
            # The episode may have been given up while the call was read.
            await self._at_turn()
            so_far = order.prompt + order.output.branch
            if order.turn and spoken.tokens == asked(order):
                return order
            given, is_branch = spoken.tokens[len(so_far) :], False
            if not order.turn or not given or not spoken.tokens.startswith(so_far):
                given, is_branch = spoken.tokens[len(order.prompt) :], order.turn > 0
            if not self._room(order, given, is_branch):
                raise full()
            if is_branch:
                self.branches[spoken.branch or "tokens"] += 1
            self.heard = spoken.messages, spoken.digest
            state = msgpack.packb([self.nonce, *self.heard])
            at = order.group, order.sample, order.begun, order.turn
            self._reply_with(EnvironmentStepped(*at, given, state, is_branch))
            return await self._at_turn()

    async def finish(
        self, reward: float | None, reason: str, parts: tuple[RewardPart, ...]
    ) -> None:
        """End the episode, and wait until its end is durable. reward None: it failed, for this reason.

        CallRefusal: the episode is over already, or was given up meanwhile (410).
        """
        async with self._calls:
            order = await self._at_turn()
            again = not order.turn
            self._reply_with(self._ended(order, reward, reason, parts, again=again))
            while not self._over:
                await self._moved.wait()
            # An episode without a turn has nothing to keep: it is offered again to another agent.
            if not self._kept and not again:
                raise over()

    # --- inside

    @property
    def _waits(self) -> bool:
        """Whether the core waits for the agent."""
        return self._reply is not None and not self._reply.done()

    async def _at_turn(self) -> StepEnvironment:
        """Wait until the core waits for the agent; returns the turn."""
        while not self._waits:
            if self._over:
                raise over()
            await self._moved.wait()
        if self._over:
            raise over()
        return self.order

    def _reply_with(self, event: AgentEvent) -> None:
        assert self._reply is not None
        self._reply.set_result(event)

    def _wake_waiting(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def _restart_silence(self) -> None:
        """Restart the silence timer. An episode without an agent has none."""
        if self._patience is not None and self.nonce is not None:
            now = asyncio.get_running_loop().time()
            self._patience.reschedule(now + self._silence_s)

    def _ended(
        self,
        order: StepEnvironment,
        reward: float | None,
        reason: str,
        parts: Sequence[RewardPart] = (),
        *,
        again: bool = False,
    ) -> EpisodeEnded:
        at = order.group, order.sample, order.begun, order.turn
        return EpisodeEnded(*at, reward, reason, tuple(parts), again)


# --- the episodes of one task, for the core

At = tuple[GroupId, int]

# This many used-up tickets are remembered, the newest ones.
SPENT_MAX = 1 << 16


class AgentCalls:
    """The open episodes of one task.

    silence_s, rows: the values that the task's class gives. in_text: whether the task's agents send
    messages, not tokens. offered: set when an episode of any task is offered.
    """

    def __init__(
        self,
        episodes: Episodes,
        task: TaskRules,
        rules: RunRules,
        *,
        silence_s: float,
        rows: int,
        in_text: bool,
        offered: asyncio.Event,
    ) -> None:
        self.task, self.silence_s = task, silence_s
        self.draw = PromptCalls(self, task.name, rules.vocab_size).draw
        self.samples = rules.drawn(task)
        self._rules, self._episodes, self._in_text, self._rows = rules, episodes, in_text, rows
        self._open: dict[At, AgentEpisode] = {}
        self.offered = offered
        # The nonces of tickets that are no longer good.
        self.spent: dict[bytes, None] = {}

    # --- the core's side

    async def prompt(self, index: int) -> TaskPrompt | TaskFailed:
        """The tokens with which all calls of a row begin."""
        turn = await self._episodes.reset(index, index, 0)
        if isinstance(turn, TaskFailed):
            return turn
        self._episodes.drop(index)
        # For a conversation in text only the first token is fixed; the agent decides what follows.
        opening = turn.given[:4] if self._in_text else turn.given
        return TaskPrompt(opening, turn.tags, turn.row)

    def step(self, order: StepEnvironment) -> Coroutine[Any, Any, AgentEvent]:
        """Give a turn to its episode; returns the agent's answer. A sample that begins again gets another episode."""
        at = order.group, order.sample
        episode = self._open.get(at)
        if episode is None or episode.order.begun != order.begun:
            self._close(episode)
            episode = self._open[at] = AgentEpisode(order, self.silence_s, self._has_room)
        episode.arrived(order)
        if episode.is_offered:
            self.offered.set()
        return episode.answer()

    async def probe(self, action: ProbeRewards) -> RewardsProbed:
        """Probe nothing: the agents themselves give the rewards."""
        return RewardsProbed(action.task, 0, 0, "")

    def forget(self, order: ForgetEpisode) -> None:
        """Close an episode that the core has given up, or whose end is durable."""
        self._close(self._open.pop((order.group, order.sample), None), ended=order.ended)

    # --- the agents' side

    def open(self, at: At) -> AgentEpisode | None:
        return self._open.get(at)

    def offers(self) -> Iterator[AgentEpisode]:
        """The episodes that an agent may take, oldest offer first."""
        return (each for each in self._open.values() if each.is_offered)

    def row_of(self, order: StepEnvironment) -> int:
        return order.cursor % self._rows if self._rows else order.cursor

    # --- inside

    def _close(self, episode: AgentEpisode | None, *, ended: bool = False) -> None:
        if episode is not None:
            episode.close(ended=ended)
            if episode.nonce is not None:
                self.spent[episode.nonce] = None
                keep_newest(self.spent, SPENT_MAX)

    def _has_room(self, order: StepEnvironment, given: bytes, is_branch: bool) -> bool:  # noqa: FBT001
        prompt, output = order.prompt, order.output
        return has_room(self._rules, self.task, prompt, order.turn, output, given, anew=is_branch)


# --- tickets
#
# The state that the core keeps of an episode includes the ticket's nonce, so the ticket is good after a restart.
# An episode without a call is offered again after a restart, and its old ticket is refused: the ticket's holder
# may have made calls that were lost in the restart, and would then continue in the middle of a fresh episode.

# This many ends are remembered, the newest ones.
REMEMBERED_MAX = 1 << 16

log = logging.getLogger("echo2d.agents")


@dataclass(frozen=True, slots=True)
class _Ended:
    """An end that is durable."""

    # What the agent said. None: the end is from before a restart, and only its reward is known.
    said: AgentEnd | None
    reward: float | None
    # The answer that the agent got.
    told: Mapping[str, Any]


class Tickets:
    """Hands out the tickets, and takes the ends of the episodes.

    secret: the secret derived from the run's key. recovered: the groups of the ledger.
    """

    def __init__(
        self, tasks: Mapping[str, AgentCalls], secret: bytes, recovered: Iterable[StoredGroup]
    ) -> None:
        self._tasks = tasks
        self._key = ticket_key(secret)
        # The ends since the start, by the nonces of their tickets.
        self._ended: dict[bytes, _Ended] = {}
        # A lock for each nonce, while an end of that episode is being answered.
        self._ending = WeakValueDictionary[bytes, asyncio.Lock]()
        # The ends from before the start, by sample, until the sample begins again.
        self._kept: dict[At, _Ended] = {}
        # Until this time a ticket may be unknown only because its episode still waits for a worker's answer.
        silence_s = max((each.silence_s for each in tasks.values()), default=0.0)
        self._know_all_at = time.monotonic() + silence_s
        for group in recovered:
            for kept in group.record.trajectories if group.source.task in tasks else ():
                told = _make_answer(kept.turns, 1 + len(kept.branches), kept.written)
                self._kept[group.record.group, kept.sample] = _Ended(None, kept.reward, told)
        keep_newest(self._kept, REMEMBERED_MAX)

    async def take(self, task: str | None, wait_s: float) -> Taken | None:
        """Take an episode for an agent; see `net.gateway.episodes.TicketOffice`."""
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
        """CallRefusal: the text is no ticket of this run (401)."""
        self._read(text)

    def find(self, text: str) -> tuple[TaskRules, AgentEpisode]:
        """The open episode of a ticket; see `net.gateway.episodes.TicketOffice`."""
        return self._find(self._read(text))

    def record(self, text: str) -> Mapping[str, Any]:
        """The run's record of an open episode."""
        _, episode = self.find(text)
        order = episode.order
        return {
            "turns": order.turn,
            "branches": _branches_of(order),
            "branched": dict(episode.branches),
        }

    async def end(self, text: str, end: AgentEnd) -> Mapping[str, Any]:
        """End an episode as its agent says; see `net.gateway.episodes.TicketOffice`."""
        ticket = self._read(text)
        # If the same end arrives twice, the second one waits for the first, and then finds it.
        async with self._ending.setdefault(ticket.nonce, asyncio.Lock()):
            return await self._end(ticket, end)

    # --- inside

    async def _end(self, ticket: Ticket, end: AgentEnd) -> Mapping[str, Any]:
        if (before := self._find_end(ticket)) is not None:
            return _answer_again(before, end)
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
        await episode.finish(reward, reason, end.parts)
        output = order.output
        told = _make_answer(order.turn, 1 + len(output.branches), output.written, differs)
        if order.turn:
            self._ended[ticket.nonce] = _Ended(end, reward, told)
            keep_newest(self._ended, REMEMBERED_MAX)
        return told

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
        is_over = self._find_end(ticket) is not None or any(
            ticket.nonce in calls.spent for calls in self._tasks.values()
        )
        if not is_over and time.monotonic() < self._know_all_at:
            detail = "the coordinator has restarted, and does not know this episode yet; try again"
            raise CallRefusal(HTTPStatus.SERVICE_UNAVAILABLE, "late", detail)
        raise over()

    def _find_end(self, ticket: Ticket) -> _Ended | None:
        """The end of this ticket's episode, if it has one already."""
        if any(calls.open(ticket.at) is not None for calls in self._tasks.values()):
            self._kept.pop(ticket.at, None)
        return self._ended.get(ticket.nonce) or self._kept.get(ticket.at)


def _make_answer(turns: int, branches: int, written: int, differs: str = "") -> dict[str, Any]:
    said = {"ended": True, "turns": turns, "branches": branches}
    return {**said, "written": written, "differs": differs}


def _answer_again(before: _Ended, end: AgentEnd) -> Mapping[str, Any]:
    """The answer to a repeated end. CallRefusal: the two ends differ."""
    same = before.reward == end.reward if before.said is None else before.said == end
    if not same:
        detail = "this episode has already ended with another reward or error"
        raise CallRefusal(HTTPStatus.CONFLICT, "ended", detail)
    return before.told


def _branches_of(order: StepEnvironment) -> list[dict[str, Any]]:
    """The branches of an episode: all token ids, the ranges that workers wrote, and the versions that wrote them."""
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
    """The first difference between an agent's trace and the run's record; empty: there is none.

    The learner trains on the run's record, so an agent that saw another episode must not give its reward.
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

"""The episodes of one task that agents outside play, for the core.

    StepEnvironment, turn 0 --> offered --a ticket is taken--> played --end--> EpisodeEnded
                                   ^                             |
                                   +-------- agent silent -------+

Not here: tickets (`ticket_office`), one episode (`agent_episode`).
"""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import GroupId
from echo2d.core.rules.run import RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.episodes import has_room
from echo2d.core.work.events import (
    ForgetEpisode,
    ProbeRewards,
    RewardsProbed,
    StepEnvironment,
)
from echo2d.runtime.coordinator.agent_episode import AgentEpisode, AgentEvent
from echo2d.runtime.coordinator.prompt_calls import PromptCalls
from echo2d.tasks.episodes import Episodes
from echo2d.tasks.pool import TaskPrompt
from echo2d.tasks.process import TaskFailed

At = tuple[GroupId, int]

VOID_MAX = 1 << 16


class AgentCalls:
    """See the module docstring. silence_s, rows: as of the task's class. in_text: its agents call with messages.
    offered: is set when an episode of this task, or of another one, is offered.
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
        # The nonces of tickets that do not count any more.
        self.void: dict[bytes, None] = {}

    # --- the core's side

    async def prompt(self, index: int) -> TaskPrompt | TaskFailed:
        """What all calls of a row begin with."""
        turn = await self._episodes.reset(index, index, 0)
        if isinstance(turn, TaskFailed):
            return turn
        self._episodes.drop(index)
        # How a conversation goes on behind its first token, its agent says.
        opening = turn.given[:4] if self._in_text else turn.given
        return TaskPrompt(opening, turn.tags, turn.row)

    def step(self, order: StepEnvironment) -> Coroutine[Any, Any, AgentEvent]:
        """The core waits for this episode's agent."""
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
        """Nothing: agents say themselves what their episodes are worth."""
        return RewardsProbed(action.task, 0, 0, "")

    def forget(self, order: ForgetEpisode) -> None:
        """The core does not want the episode any more, or has made its end durable."""
        self._close(self._open.pop((order.group, order.sample), None), ended=order.ended)

    # --- the agents' side

    def open(self, at: At) -> AgentEpisode | None:
        return self._open.get(at)

    def offers(self) -> Iterator[AgentEpisode]:
        """The episodes that an agent may take, the first one that was offered first."""
        return (each for each in self._open.values() if each.is_offered)

    def row_of(self, order: StepEnvironment) -> int:
        return order.cursor % self._rows if self._rows else order.cursor

    # --- inside

    def _close(self, episode: AgentEpisode | None, *, ended: bool = False) -> None:
        if episode is not None:
            episode.close(ended=ended)
            if episode.nonce is not None:
                self.void[episode.nonce] = None
                keep_newest(self.void, VOID_MAX)

    def _has_room(self, order: StepEnvironment, given: bytes, anew: bool) -> bool:  # noqa: FBT001
        prompt, output = order.prompt, order.output
        return has_room(self._rules, self.task, prompt, order.turn, output, given, anew=anew)

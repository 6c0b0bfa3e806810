"""Samples of an environment: their turns, and what happens between two of them.

    leased --result--> parked --StepEnvironment--> the environment
                          |                              |
                          |<------ EnvironmentStepped ---+--- EpisodeEnded ---> kept, with a reward
                          v
                       waiting, with all tokens so far --leased--> ...

Episodes that agents outside play (`EpisodeRules.outside`) begin parked, at turn 0: the agent's first call is
the answer to it. What they call with may follow the prompt anew, as a branch (`Partial.branches`).

A parked sample has no lease and no slot. Its turn is durable before the environment hears of it, and the
environment's answer before the next turn begins. So an answered turn is never asked for again; one
without an answer is, after a restart, and says so. The next turn goes back to the worker of the last one while
that serves the version it served then, because it may still have the prefix in its KV cache.
Kept true: given tokens have no span; an episode's reward is counted once.
Not here: the leases (`groups`), unfinished turns (`partials`), episodes of evaluations (`evaluation`).
"""

import math
from collections.abc import Callable, Iterable

from echo2d.core.cluster.events import Persist
from echo2d.core.cluster.parts import RunParts
from echo2d.core.protocol.trajectory import Partial, TrajectoryRecord
from echo2d.core.work.episodes import Episode, Parked, ParkedEpisode
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeForgotten,
    ForgetEpisode,
    RecoveredTurn,
    RolloutAction,
    StepEnvironment,
    TurnAnswered,
)
from echo2d.core.work.training.group_table import GroupTable, OpenGroup, Waiting


class OpenEpisodes:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        parts: RunParts,
        *,
        groups: GroupTable,
        good: Callable[[Partial], bool],
    ) -> None:
        self._rules, self._members = parts.rules, parts.members
        self._statistics = parts.statistics
        self._groups = groups
        self._good = good

    def parked_episode(self, group: OpenGroup, sample: int) -> ParkedEpisode | None:
        """The parked sample that its environment, or an agent outside, is asked about."""
        parked = group.parked.get(sample)
        if parked is None:
            return None
        return ParkedEpisode(
            parked,
            group.episodes.get(sample),
            group.task,
            group.task.name,
            group.prompt.cursor,
            group.prompt.tokens,
            group.group,
            group.begun_anew[sample],
        )

    def go_on(
        self, group: OpenGroup, asked: ParkedEpisode, event: EnvironmentStepped, *, now: float
    ) -> list[RolloutAction]:
        """The environment has answered: the sample waits for its next turn."""
        self.measure(asked, now=now)
        episode = asked.answered(event)
        waiting = self._waiting(episode.partial, asked.parked, now)
        self._groups.go_on(group, event.sample, episode, waiting)
        answered = TurnAnswered(
            event.group, event.sample, event.turn, event.tokens, event.state, event.anew
        )
        return [*([] if event.turn else [Persist(asked.parked.turn)]), Persist(answered)]

    def measure(self, asked: ParkedEpisode, *, now: float) -> None:
        """The environment has answered. How long an agent outside takes to begin does not count."""
        if asked.parked.turn.turn:
            self._statistics.environment_took(asked.name, now - asked.parked.asked_at)

    def record(self, group: OpenGroup, parked: Parked) -> TrajectoryRecord:
        """The whole episode, without a reward."""
        turn = parked.turn
        partial = turn.partial
        return TrajectoryRecord(
            turn.sample,
            partial.tokens,
            partial.logprobs,
            partial.spans,
            turn.finish,
            given=partial.given,
            turns=turn.turn,
            source=group.prompt.source,
            branches=partial.branches,
            columns=partial.columns,
        )

    def begin_anew(self, group: OpenGroup, sample: int, *, now: float) -> list[RolloutAction]:
        """The turns of a waiting or parked sample do not count: it begins anew."""
        self._groups.begin_anew(group, sample, now=now)
        forgotten = Persist(EpisodeForgotten(group.group, sample))
        return [forgotten, self.forget(group, sample), *self.offer(group, sample)]

    def tell(self, group: OpenGroup, sample: int, *, again: bool = False) -> list[StepEnvironment]:
        """Tell the environment of the turn of a parked sample. again: it may have been told before."""
        asked = self.parked_episode(group, sample)
        return [] if asked is None else [asked.step(self._rules, again=again)]

    def offer(self, group: OpenGroup, sample: int) -> list[StepEnvironment]:
        """If agents outside play it: one of them may begin this episode."""
        parked = group.parked.get(sample)
        return [] if parked is None or parked.turn.turn else self.tell(group, sample)

    def forget(self, group: OpenGroup, sample: int, *, ended: bool = False) -> ForgetEpisode:
        return ForgetEpisode(group.group, sample, group.task.name, ended)

    def useless(self, group: OpenGroup) -> list[int]:
        """The waiting and parked samples of which earlier turns cannot become part of a batch any more."""
        found = [
            sample for sample, parked in group.parked.items() if not self._good(parked.turn.partial)
        ]
        return found + [
            sample
            for sample, episode in group.episodes.items()
            if sample in group.waiting and not self._good(episode.partial)
        ]

    def recover(self, group: OpenGroup, turns: Iterable[RecoveredTurn], *, now: float) -> None:
        """After a restart: each sample waits for its next turn, or is parked."""
        for sample in sorted(group.waiting):
            group.wait(sample, now=now)
        for turn in turns:
            self._recover(group, turn, now)

    def tell_again(self, group: OpenGroup, *, now: float) -> list[RolloutAction]:
        """After a restart: tell the environment of the parked samples. Those with useless turns begin anew."""
        actions: list[RolloutAction] = []
        for sample in self.useless(group):
            actions += self.begin_anew(group, sample, now=now)
        told = {action.sample for action in actions if isinstance(action, StepEnvironment)}
        for sample, parked in group.parked.items():
            if sample not in told:
                actions += self.tell(group, sample, again=parked.turn.turn > 0)
        return actions

    # --- inside

    def _recover(self, group: OpenGroup, turn: RecoveredTurn, now: float) -> None:
        kept, answered = turn.kept, turn.answered
        parked = Parked(kept, now, kept.worker, None, now)
        group.parked.pop(kept.sample, None)
        if answered is None:
            group.waiting.discard(kept.sample)
            group.parked[kept.sample] = parked
            if kept.partial.turn_start:
                before = kept.partial.first(kept.partial.turn_start)
                group.episodes[kept.sample] = Episode(kept.turn - 1, before, turn.state_before, now)
            return
        episode = parked.answered(answered.tokens, answered.state, anew=answered.anew)
        group.episodes[kept.sample] = episode
        group.waiting.add(kept.sample)
        group.partials[kept.sample] = self._waiting(episode.partial, parked, now)

    def _waiting(self, partial: Partial, parked: Parked, now: float) -> Waiting:
        """At its last worker while that serves what it served then."""
        peer = self._members.get(parked.worker)
        same = (
            peer is not None and parked.served is not None and peer.engine.serving == parked.served
        )
        if peer is None or not same:
            return Waiting(partial, math.inf, parked.since)
        # A worker reads 5,000 tokens/s of a prefix that it has not cached. A turn waits that long
        # for a slot at its last worker, because another one would take as long to read it.
        patience_s = partial.length / 5000.0
        rate = self._statistics.measurements.rate(peer.peer)
        if rate is not None and rate.value > 0:
            # Or until four slots have come free there, on average: they are not idle meanwhile. A
            # worker's rate is of whole episodes; each of their turns frees a slot.
            patience_s = max(patience_s, 4 / (rate.value * parked.turn.turn))
        return Waiting(partial, math.inf, parked.since, parked.worker, now + patience_s)

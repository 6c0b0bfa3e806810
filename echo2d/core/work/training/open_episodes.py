"""Samples of an environment: their turns, and what happens between two of them.

    leased --result--> parked --StepEnvironment--> the environment
                          |                              |
                          |<------ EnvironmentStepped ---+--- EpisodeEnded ---> kept, with a reward
                          v
                       waiting, with all tokens so far --leased--> ...

Episodes that external agents play (`EpisodeRules.outside`) begin parked, at turn 0: the agent's first call is
the answer to that turn. The tokens of a call may follow the prompt directly, as a branch (`Partial.branches`).

A parked sample has no lease and no slot. Its turn is durable before the environment gets it, and the
environment's answer is durable before the next turn begins. So an answered turn is never asked for again. After
a restart a turn without an answer is asked for again, and marked as such. The next turn goes back to the worker
of the last turn as long as that serves the same version, because it may still have the prefix in its KV cache.
Invariant: given tokens have no span; an episode's reward is counted once.
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
        """The parked sample that waits for its environment or for an external agent; None: it is not parked."""
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
        """Measure the environment's time. The time that an external agent takes to begin does not count."""
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
        """Forget the turns of a waiting or parked sample, which starts over."""
        self._groups.begin_anew(group, sample, now=now)
        forgotten = Persist(EpisodeForgotten(group.group, sample))
        return [forgotten, self.forget(group, sample), *self.offer(group, sample)]

    def tell(self, group: OpenGroup, sample: int, *, again: bool = False) -> list[StepEnvironment]:
        """Tell the environment about the turn of a parked sample. again: it may know it already."""
        asked = self.parked_episode(group, sample)
        return [] if asked is None else [asked.step(self._rules, again=again)]

    def offer(self, group: OpenGroup, sample: int) -> list[StepEnvironment]:
        """Offer this episode to external agents, if they play it and it has not begun."""
        parked = group.parked.get(sample)
        return [] if parked is None or parked.turn.turn else self.tell(group, sample)

    def forget(self, group: OpenGroup, sample: int, *, ended: bool = False) -> ForgetEpisode:
        return ForgetEpisode(group.group, sample, group.task.name, ended)

    def useless(self, group: OpenGroup) -> list[int]:
        """The waiting and parked samples whose earlier turns can no longer become part of a batch."""
        found = [
            sample for sample, parked in group.parked.items() if not self._good(parked.turn.partial)
        ]
        return found + [
            sample
            for sample, episode in group.episodes.items()
            if sample in group.waiting and not self._good(episode.partial)
        ]

    def recover(self, group: OpenGroup, turns: Iterable[RecoveredTurn], *, now: float) -> None:
        """After a restart: let each sample wait for its next turn, or park it."""
        for sample in sorted(group.waiting):
            group.wait(sample, now=now)
        for turn in turns:
            self._recover(group, turn, now)

    def tell_again(self, group: OpenGroup, *, now: float) -> list[RolloutAction]:
        """After a restart: tell the environment about parked samples. Samples with useless turns start over."""
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
        """The next turn waits for its last worker if that still serves the same version."""
        peer = self._members.get(parked.worker)
        same = (
            peer is not None and parked.served is not None and peer.engine.serving == parked.served
        )
        if peer is None or not same:
            return Waiting(partial, math.inf, parked.since)
        # A worker reads about 5000 tokens/s of a prefix that it has not cached. A turn waits for a slot at its
        # last worker for at least as long as another worker would take to read the prefix.
        patience_s = partial.length / 5000.0
        rate = self._statistics.measurements.rate(peer.peer)
        if rate is not None and rate.value > 0:
            # It also waits for as long as four slots there take on average to become free; no slot is idle in this
            # time. A worker's rate counts whole episodes, and each of their turns frees a slot.
            patience_s = max(patience_s, 4 / (rate.value * parked.turn.turn))
        return Waiting(partial, math.inf, parked.since, parked.worker, now + patience_s)

"""Samples of an environment: their turns, and what happens between two of them.

    leased --result--> parked --StepEnvironment--> the environment
                          |                              |
                          |<------ EnvironmentStepped ---+--- EpisodeEnded ---> kept, with a reward
                          v
                       waiting, with all tokens so far --leased--> ...

A parked sample has no lease and no slot. Its turn is durable before the environment hears of it, and the
environment's answer before the next turn begins. So an answered turn is never asked for again; one
without an answer is, after a restart, and says so. The next turn goes back to the worker of the last one while
that serves the version it served then, because it may still have the prefix in its KV cache.
Kept true: given tokens have no span; an episode's reward is counted once.
Not here: the leases (`groups`), unfinished turns (`partials`).
"""

import math
from collections.abc import Callable

from echo2d.core.base.ids import GroupId
from echo2d.core.cluster.events import Persist
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.protocol.seeds import episode_seed
from echo2d.core.protocol.trajectory import Partial, TrajectoryRecord
from echo2d.core.rollouts.events import (
    EnvironmentStepped,
    EpisodeForgotten,
    ForgetEpisode,
    RecoveredTurn,
    RolloutAction,
    StepEnvironment,
    TurnAnswered,
)
from echo2d.core.rollouts.group_table import Episode, GroupTable, OpenGroup, Parked, Waiting

# How fast a worker reads a prefix that it has not cached, in tokens/s: so long at least a turn waits for a slot at its
# last worker, because another one would take as long for that.
PREFILL_TOKENS_PER_S = 5000.0
# Or for so long as slots come free there so often, on average: the slots are not idle meanwhile.
FREED_SLOTS = 4


class Episodes:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        rules: RunRules,
        *,
        groups: GroupTable,
        members: Membership,
        statistics: Statistics,
        good: Callable[[Partial], bool],
    ) -> None:
        self._rules = rules
        self._groups, self._members = groups, members
        self._statistics = statistics
        self._good = good

    def step(self, group: OpenGroup, parked: Parked, *, again: bool = False) -> StepEnvironment:
        """Tell the environment of this turn."""
        turn, sample = parked.turn, parked.turn.sample
        partial = turn.partial
        before = group.episodes.get(sample)
        return StepEnvironment(
            group.group,
            sample,
            group.begun_anew[sample],
            turn.turn,
            group.prompt.cursor,
            episode_seed(self._rules.seed_key, group.group, sample),
            group.prompt.tokens,
            partial.tokens,
            partial.turn_start,
            turn.finish,
            None if before is None else before.state,
            group.task.name,
            again,
        )

    def asked(self, group: GroupId, sample: int, begun: int, turn: int) -> Parked | None:
        """The turn that an answer of the environment is about; None: nobody waits for that answer any more."""
        found = self._groups.get(group)
        parked = None if found is None else found.parked.get(sample)
        if found is None or parked is None or parked.turn.turn != turn:
            return None
        return parked if found.begun_anew[sample] == begun else None

    def has_room(self, group: OpenGroup, parked: Parked, given: bytes) -> bool:
        """Whether another turn may follow these given tokens."""
        rules = group.task.episode
        assert rules is not None
        length = parked.turn.partial.length + len(given) // 4
        limit = self._rules.limit(group.task, group.prompt.tokens, length)
        return parked.turn.turn < rules.turns_max and length < limit.tokens

    def go_on(
        self, group: OpenGroup, parked: Parked, event: EnvironmentStepped, *, now: float
    ) -> list[RolloutAction]:
        """The environment has answered: the sample waits for its next turn."""
        turn = parked.turn
        partial = turn.partial.with_given(event.tokens)
        episode = Episode(turn.turn, partial, event.state, parked.since)
        waiting = self._waiting(partial, parked, now)
        self._groups.go_on(group, event.sample, episode, waiting)
        answered = TurnAnswered(event.group, event.sample, event.turn, event.tokens, event.state)
        return [Persist(answered)]

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
        )

    def begin_anew(self, group: OpenGroup, sample: int) -> list[RolloutAction]:
        """The turns of a waiting or parked sample do not count: it begins anew."""
        self._groups.begin_anew(group, sample)
        return [Persist(EpisodeForgotten(group.group, sample)), self.forget(group, sample)]

    def forget(self, group: OpenGroup, sample: int) -> ForgetEpisode:
        return ForgetEpisode(group.group, sample, group.task.name)

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

    def recover(self, group: OpenGroup, turn: RecoveredTurn, *, now: float) -> None:
        """After a restart: the sample waits for its next turn, or is parked."""
        kept, answered = turn.kept, turn.answered
        worker = kept.partial.spans[-1].author
        parked = Parked(kept, now, worker, None)
        if answered is None:
            group.waiting.discard(kept.sample)
            group.parked[kept.sample] = parked
            if kept.turn > 1:
                before = kept.partial.first(kept.partial.turn_start)
                group.episodes[kept.sample] = Episode(kept.turn - 1, before, turn.state_before, now)
            return
        partial = kept.partial.with_given(answered.tokens)
        group.episodes[kept.sample] = Episode(kept.turn, partial, answered.state, now)
        group.partials[kept.sample] = self._waiting(partial, parked, now)

    # --- inside

    def _waiting(self, partial: Partial, parked: Parked, now: float) -> Waiting:
        """At its last worker while that serves what it served then."""
        peer = self._members.get(parked.worker)
        same = peer is not None and parked.served is not None and peer.serving == parked.served
        if peer is None or not same:
            return Waiting(partial, math.inf, parked.since)
        patience_s = partial.length / PREFILL_TOKENS_PER_S
        rate = self._statistics.measurements.rate(peer.peer)
        if rate is not None and rate.value > 0:
            # A worker's rate is of whole episodes; each of their turns frees a slot.
            patience_s = max(patience_s, FREED_SLOTS / (rate.value * parked.turn.turn))
        return Waiting(partial, math.inf, parked.since, parked.worker, now + patience_s)

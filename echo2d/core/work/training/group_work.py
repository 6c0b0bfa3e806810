"""The run's groups as work for the scheduler: which of their samples wait, and when a new group begins.

    waiting samples --place--> leased
    no sample waits --prompt--> a new group: its samples wait

A new group is admitted when its first sample finds a slot. The others take the next slots, at any worker,
before a newer group begins. A sample that has tokens continues alone, at a worker that serves the version of
its last token or a newer one. If it waits too long, any worker writes its turn from the beginning.
Not here: which worker gets a sample (`scheduler`), what comes back (`groups`), where the samples of a group
are (`group_table`), what an unfinished sample has (`partials`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.cluster.events import Persist, Send
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import LeaseGranted
from echo2d.core.protocol.seeds import sample_seeds
from echo2d.core.protocol.trajectory import NOTHING
from echo2d.core.work.events import LeaseGiven, PromptTaken, RolloutAction
from echo2d.core.work.kind import PendingSamples
from echo2d.core.work.training.group_table import OpenGroup
from echo2d.core.work.training.parts import TrainingParts
from echo2d.core.work.training.prompts import DrawnPrompt
from echo2d.core.work.training.staleness import NextGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOfGroup(PendingSamples):
    """Waiting samples of this group. A new group is not admitted yet."""

    group: OpenGroup


class GroupWork:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        parts: TrainingParts,
        next_group: GroupId,
    ) -> None:
        rules = parts.rules
        self._rules, self._versions = rules, parts.versions
        self._statistics = parts.statistics
        self._watch = parts.watch
        self._next_group = next_group
        self._prompts = parts.prompts
        self._groups = parts.groups
        self._staleness = parts.staleness
        self._scheduler = parts.scheduler
        self._can_begin_anew = True
        # The tasks that external agents play.
        self.outside = frozenset(
            task.name for task in rules.tasks if task.episode is not None and task.episode.outside
        )

    def admit_outside(self) -> Iterator[tuple[OpenGroup, list[RolloutAction]]]:
        """Begin the groups that external agents play: they wait for agents, not for slots."""
        newest = self._versions.newest
        if newest is None:
            return
        while (found := self._next(outside=True)) is not None:
            (task, _, oldest), prompt = found
            if newest.version < oldest:
                return
            group = OpenGroup(self._next_group, prompt, task, set(range(self._rules.drawn(task))))
            for sample in range(self._rules.drawn(task)):
                group.wait(sample, now=self._statistics.now)
            yield group, self._admit(group)

    def pending(self, *, now: float) -> Iterator[PendingOfGroup]:
        """Waiting samples first, those of the oldest group first; then new groups."""
        # While this generator runs, free slots only get fewer: once a sample cannot start over, no later sample can.
        self._can_begin_anew = True
        for group in self._groups.waiting():
            if group.task.name in self._watch.away:
                continue
            yield from self._with_tokens(group, now)
            fresh = sorted(group.waiting.difference(group.partials))
            if fresh and not group.returned:
                yield PendingOfGroup(fresh, self._staleness.oldest, group=group)
            elif fresh:
                yield from self._with_returned(group, fresh)
        while (found := self._next(outside=False)) is not None:
            (task, _, oldest), prompt = found
            samples = range(self._rules.drawn(task))
            group = OpenGroup(self._next_group, prompt, task, set(samples))
            yield PendingOfGroup(samples, oldest, group=group)
            if self._groups.get(group.group) is None:
                return

    def grant(
        self, pending: PendingOfGroup, worker: Peer, samples: Sequence[int], *, now: float
    ) -> list[RolloutAction]:
        group = pending.group
        actions = self._admit(group) if self._groups.get(group.group) is None else []
        assert worker.session is not None
        assert worker.engine.serving is not None
        given = self._groups.grant(
            group, worker.peer, worker.engine.serving, samples, now=now
        ).given
        if (base := given.base) is not NOTHING:
            self._statistics.handed_over(base.length - base.turn_start)
        return [
            *actions,
            Persist(given),
            Send(worker.session, self._grant_message(group, given)),
        ]

    # --- inside

    def _with_returned(self, group: OpenGroup, fresh: Sequence[int]) -> Iterator[PendingOfGroup]:
        """Samples without tokens, some of which were taken back from a worker that may lie."""
        oldest = self._staleness.oldest
        for sample in [each for each in fresh if each in group.returned]:
            suits = _all_but(group.returned[sample])
            yield PendingOfGroup((sample,), oldest, suits=suits, group=group)
        if others := [sample for sample in fresh if sample not in group.returned]:
            yield PendingOfGroup(others, oldest, group=group)

    def _with_tokens(self, group: OpenGroup, now: float) -> Iterator[PendingOfGroup]:
        """Each waiting sample that has tokens. Only workers of their version or a newer one may continue it."""
        for sample, waiting in sorted(group.partials.items()):
            oldest = self._staleness.oldest
            versions_grow = max(oldest, waiting.partial.version_last)
            suits = _all_but(group.returned[sample]) if sample in group.returned else None
            yield PendingOfGroup(
                (sample,),
                versions_grow,
                waiting.worker,
                suits=suits,
                there_alone=now < waiting.there_until,
                group=group,
            )
            # It has waited too long, and some worker could start it over: drop its tokens.
            late = sample in group.partials and now >= waiting.until
            if late and self._can_begin_anew:
                self._can_begin_anew = self._scheduler.free_from(oldest) > 0
                if self._can_begin_anew:
                    group.lose_partial(sample)

    def _next(self, *, outside: bool) -> tuple[NextGroup, DrawnPrompt] | None:
        """The next group to begin: one of the task that the open steps lack most, among the tasks that have a prompt.
        outside: whether only the tasks that external agents play count, or only the other tasks.
        """
        newest = self._versions.newest
        version = None if newest is None else newest.version
        for group in self._staleness.next_groups(self._groups.by_task):
            name = group.task.name
            if outside != (name in self.outside) or name in self._watch.away:
                continue
            prompt = self._prompts[group.task.name].next(version)
            if prompt is not None:
                return group, prompt
        return None

    def _admit(self, group: OpenGroup) -> list[RolloutAction]:
        self._prompts[group.task.name].take(group.prompt)
        self._next_group = GroupId(self._next_group + 1)
        self._groups.add(group)
        prompt = group.prompt
        sampling = group.task.sampling
        return [
            Persist(
                PromptTaken(
                    group.group, prompt.cursor, prompt.tokens, prompt.source, sampling, prompt.tags
                )
            )
        ]

    def _grant_message(self, group: OpenGroup, given: LeaseGiven) -> LeaseGranted:
        rules, base, task = self._rules, given.base, group.task
        start = written = earlier = branch = 0
        if base is not NOTHING:
            start, branch = base.turn_start, base.branch_start
            written = base.length - start
            earlier = base.written - written
        return LeaseGranted(
            given.lease,
            given.attempt,
            group.group,
            group.prompt.tokens + base.tokens[4 * branch :],
            given.samples,
            rules.limit(task, group.prompt.tokens, start, branch).tokens - start - written,
            task.sampling,
            task.stop_token_ids,
            max(self._staleness.oldest, base.version_last),
            rules.lease_silence_s,
            rng_seeds=sample_seeds(rules.seed_key, group.group, given.samples),
            written=written,
            stop_strings=task.stop_strings,
            earlier=earlier,
            columns=rules.columns,
        )


def _all_but(workers: Collection[PeerId]) -> Callable[[PeerId], bool]:
    return lambda worker: worker not in workers

"""Continues groups, episodes and leases after a restart of the coordinator or of a link.

    the ledger's groups --complete--> buffered
                        --otherwise--> open again: its newest attempts run, rewards and environments are asked again

Leases are durable: a worker that comes back keeps the leases that can still count.
Invariant: no worker is asked for samples that another attempt has taken over.
Not here: how groups continue from there (`judge`), where samples are (`group_table`).
"""

from collections import defaultdict
from collections.abc import Sequence

from echo2d.core.base.ids import GroupId
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import HeldLease
from echo2d.core.protocol.trajectory import StoredGroup
from echo2d.core.work.events import (
    LeaseGiven,
    RecoveredRollouts,
    RecoveredTurn,
    RolloutAction,
)
from echo2d.core.work.training.group_table import OpenGroup
from echo2d.core.work.training.judge import GroupJudge
from echo2d.core.work.training.parts import TrainingParts
from echo2d.core.work.training.prompts import prompt_of


class Recovery:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        parts: TrainingParts,
        judge: GroupJudge,
    ) -> None:
        self._rules, self._versions = parts.rules, parts.versions
        self._groups = parts.groups
        self._partials = parts.partials
        self._episodes = parts.episodes
        self._judge = judge
        self._staleness = parts.staleness
        self._audits = parts.audits

    def recover(self, recovered: RecoveredRollouts, *, now: float) -> list[RolloutAction]:
        """After a restart: buffer complete groups that are in no batch, and continue the others."""
        actions: list[RolloutAction] = []
        given: dict[GroupId, list[LeaseGiven]] = defaultdict(list)
        for attempt in recovered.given:
            given[attempt.group].append(attempt)
        turns: dict[GroupId, list[RecoveredTurn]] = defaultdict(list)
        for turn in recovered.turns:
            turns[turn.kept.group].append(turn)
        held = self._staleness.held()
        for stored in recovered.groups:
            if stored.record.group not in held:
                number = stored.record.group
                actions += self._recover_group(stored, given[number], turns[number], now)
        return actions

    def _recover_group(
        self,
        stored: StoredGroup,
        given: Sequence[LeaseGiven],
        turns: Sequence[RecoveredTurn],
        now: float,
    ) -> list[RolloutAction]:
        task = self._rules.task(stored.source.task)
        if task is None:
            return self._judge.discard(stored, "rules", "the run has no such task any more")
        record, size = stored.record, self._rules.drawn(task)
        kept = {trajectory.sample: trajectory for trajectory in record.trajectories}
        if any(sample >= size for sample in (*kept, *record.left_out)):
            return self._judge.discard(stored, "rules", "the group size has changed")
        if record.left_out and size - len(record.left_out) < self._rules.samples_min:
            return self._judge.discard(stored, "rules", "too few samples are left")
        group = OpenGroup(
            record.group,
            prompt_of(stored),
            task,
            set(range(size)) - set(kept) - set(record.left_out),
            kept,
            left_out=set(record.left_out),
        )
        if turns and task.episode is None:
            return self._judge.discard(stored, "rules", "its task is no environment any more")
        self._episodes.recover(group, turns, now=now)
        unscored = group.unscored()
        if (group.lacking or unscored) and record.sampling != task.sampling:
            return self._judge.discard(stored, "rules", "its task has another sampling now")
        if self._audits is not None:
            # The verdicts from before the restart are no longer known.
            for each in kept.values():
                self._audits.delivered(
                    group.group, record.prompt, each, sampling=record.sampling, now=now
                )
        waits = self._audits is not None and group.group in self._audits.waiting
        if group.lacking or unscored or waits:
            self._groups.add(group)
            actions = self._episodes.tell_again(group, now=now)
            self._groups.recover(
                group, given, lambda attempt: self._may_count(group, attempt), now=now
            )
            for each in unscored:
                actions += self._judge.ask_again((group.group, each.sample))
            return actions
        if len(kept) > self._rules.group_size:
            # It only waited for a verdict, and there is no audit any more.
            self._groups.add(group)
            return self._judge.complete(group)
        return (
            []
            if self._staleness.admit(stored)
            else self._judge.discard(stored, "stale", again=True)
        )

    def revive(self, peer: Peer, key: HeldLease, *, now: float) -> bool:
        """A worker has come back with an ended lease: it runs again with the samples that no other lease has now.

        If there are no such samples, the lease is kept nevertheless, because its results may be the
        first of their samples.
        """
        given = self._groups.wanted(peer.peer, key)
        group = None if given is None else self._groups.get(given.group)
        if given is None or group is None or not self._may_count(group, given):
            return False
        self._groups.revive(given, now=now)
        return True

    def _may_count(self, group: OpenGroup, given: LeaseGiven) -> bool:
        """Whether tokens of this attempt may still become part of a batch."""
        return (
            self._groups.fits_rules(group, given)
            and self._versions.live(given.served) is not None
            and self._partials.good(given.base)
            and not self._staleness.outdated(given.oldest, None)
        )

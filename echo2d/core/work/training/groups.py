"""The run's groups: judges what workers report about leases, and moves whole groups to the buffer.

    prompt taken --> samples waiting --> leased --> kept (durable) --> scored --> all: buffered
                        ^                  |                |            |
                        +-- lease ended ---+                +------------+--> group dropped

A group is dropped whole (I5), with everything that it has: when it is too old, too many of its
rewards failed, its leases or results failed too often, a version that wrote for it is revoked, or
all its rewards are the same. A sample whose reward failed, or for which the group has waited too long
(`patience`), is left out, as long as `group_min` others stay; the batch says so. Of a task that draws
twice as many samples (`contrast`), those that contrast least are left out, too. The first accepted
result of a sample counts. A kept sample goes back if the audit says that it may be a lie, or cannot say
so in time. A sample whose lease ended with tokens goes on from them, alone (`partials`). Leases are
durable: they continue after a restart.
Samples of an environment have several turns, and wait for it between two of them (`episodes`).
Kept true: every sample is waiting, in one running lease, parked, kept, or left out.
Not here: which worker gets a lease and when (`group_work`, `scheduler`), the gates and the batches
(`staleness`), repeated results (`accepted_results`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from echo2d.core.audit.audits import Audits
from echo2d.core.audit.waiting_samples import SampleVerdict
from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.events import Note, Persist, StopRun
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.rules import RunRules, TaskRules
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.protocol.control_messages import (
    HeldLease,
    SampleDelta,
    SampleFinished,
    VersionKey,
)
from echo2d.core.protocol.trajectory import (
    NOTHING,
    AuthoredSpan,
    Partial,
    StoredGroup,
    TrajectoryRecord,
)
from echo2d.core.work.episodes import ParkedEpisode, end_turn
from echo2d.core.work.events import (
    DrawPrompt,
    EnvironmentStepped,
    EpisodeEnded,
    GroupDropped,
    LeaseGiven,
    PromptDrawn,
    PromptFailed,
    PromptsEnded,
    RecoveredRollouts,
    RecoveredTurn,
    RolloutAction,
    SampleKept,
    SampleLeftOut,
    SampleReturned,
    SampleRewarded,
    SampleScored,
    ScoreSample,
)
from echo2d.core.work.kind import Cause, TaskWork
from echo2d.core.work.leases import TRAINING, Lease, answer
from echo2d.core.work.results import Written, written_by
from echo2d.core.work.scheduler import LeaseScheduler
from echo2d.core.work.training.accepted_results import AcceptedResults
from echo2d.core.work.training.contrast import VarianceFilter, most_contrasting, no_variance, spread
from echo2d.core.work.training.group_table import BetweenTurns, GroupTable, OpenGroup
from echo2d.core.work.training.group_work import GroupWork, PendingOfGroup
from echo2d.core.work.training.open_episodes import OpenEpisodes
from echo2d.core.work.training.partials import Partials
from echo2d.core.work.training.patience import Patience
from echo2d.core.work.training.prompts import DrawnPrompt, Prompts, prompt_fault
from echo2d.core.work.training.sampler import Sampler
from echo2d.core.work.training.staleness import Staleness
from echo2d.core.work.training.stragglers import Move, Stragglers

# Leases of one sample that failed or fell silent, before its group is dropped for good.
LEASE_FAILURES_MAX = 8
# Malformed results of one group, before it is dropped for good.
BAD_RESULTS_MAX = 3
# A sample that went back from one worker waits so long for another one; then its group begins anew.
RETURNED_WAIT_S = 60.0
# Why groups are dropped that were not worth training on. Other reasons say nothing against workers.
WORTHLESS = ("filtered", "refused")


class Groups(TaskWork[PendingOfGroup]):
    """See the module docstring. `now` is monotonic seconds.

    After every event call `age`, then the scheduler's `fill`, then `draw_ahead` and `offer_episodes`.
    """

    number = TRAINING

    def __init__(
        self,
        rules: RunRules,
        recovered: RecoveredRollouts,
        *,
        members: Membership,
        versions: PublishedVersions,
        staleness: Staleness,
        statistics: Statistics,
        scheduler: LeaseScheduler,
        audits: Audits | None = None,
        is_held_out: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._rules = rules
        self._audits = audits
        self._is_held_out = is_held_out
        self._members = members
        self._versions = versions
        self._staleness = staleness
        self._statistics = statistics
        self._prompts = {
            task.name: Prompts(
                recovered.next_cursor(task.name),
                Sampler(
                    task.row_filter, (row for row in recovered.rows if row.source.task == task.name)
                ),
                task.name,
                [each.cursor for each in recovered.given_back if each.task == task.name],
            )
            for task in rules.tasks
        }
        self._leases = scheduler.leases
        self._groups = GroupTable(rules.drawn, self._leases)
        self._partials = Partials(
            rules,
            leases=self._leases,
            versions=versions,
            staleness=staleness,
            statistics=statistics,
        )
        self._episodes = OpenEpisodes(
            rules,
            groups=self._groups,
            members=members,
            statistics=statistics,
            good=lambda partial: self._partials.good(partial) and not self._by_convicted(partial),
        )
        self._scheduler = scheduler
        self._work = GroupWork(
            rules,
            recovered.next_group,
            prompts=self._prompts,
            groups=self._groups,
            versions=versions,
            staleness=staleness,
            statistics=statistics,
            scheduler=scheduler,
        )
        scheduler.add(self)
        # Whether agents outside play some of the tasks.
        self.are_outside = bool(self._work.outside)
        self.stragglers = Stragglers(
            rules,
            groups=self._groups,
            leases=self._leases,
            members=members,
            versions=versions,
            statistics=statistics,
        )
        self._patience = Patience(rules, self._groups, self._is_last_step)
        self._accepted = AcceptedResults(recovered.answered)
        self._variance_filter = VarianceFilter(rules)
        # Groups with older versions than this have been dropped.
        self._aged_to: Version | None = None
        # By group with returned samples: when it is dropped if one of them still waits.
        self._returned: dict[GroupId, float] = {}
        # When the next partial has waited for long enough.
        self._patient_until: float | None = None

    @property
    def in_flight(self) -> int:
        """The number of admitted groups that are not complete yet."""
        return len(self._groups)

    @property
    def in_flight_by_task(self) -> Mapping[str, int]:
        """Those of each task."""
        return self._groups.by_task

    def between_turns(self) -> Mapping[str, BetweenTurns]:
        """The samples of each task that are between two turns."""
        return self._groups.between_turns()

    @property
    def prompts(self) -> Mapping[str, Prompts]:
        """The prompts of each task."""
        return self._prompts

    @property
    def ended(self) -> str:
        """The task whose prompts have ended, so that batch n can never be filled; or ""."""
        return next(
            (
                name
                for name, prompts in self._prompts.items()
                if prompts.over and self._groups.by_task[name] < self._staleness.lacking(name)
            ),
            "",
        )

    @property
    def unscored(self) -> int:
        """The number of groups whose results are all there, and that wait for rewards only."""
        whole = self._groups.whole
        # Those that wait for a verdict may have all their rewards.
        return whole if self._audits is None else max(0, whole - self._audits.waiting.groups)

    def lack_only_rewards(self, groups: int) -> bool:
        """Whether at least this many groups, and at least one, wait for rewards only."""
        return len(self._groups) >= max(1, groups) and self.unscored >= max(1, groups)

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

    # --- samples to workers

    def priority(self, *, now: float) -> int:  # noqa: ARG002 - training's never changes
        return 0

    def pending(self, *, now: float) -> Iterator[PendingOfGroup]:
        return self._work.pending(now=now)

    def grant(
        self, pending: PendingOfGroup, worker: Peer, samples: Sequence[int], *, now: float
    ) -> list[RolloutAction]:
        return self._work.grant(pending, worker, samples, now=now)

    # --- tasks

    def asks(self, task: str) -> bool:
        return task in self._prompts

    def prompt_drawn(self, event: PromptDrawn) -> list[RolloutAction]:
        """A prompt has come.

        A malformed prompt stops the run, because the task is at fault. A prompt that is too long
        for the model is left out.
        """
        prompts = self._prompts[event.source.task]
        name = f"prompt {event.cursor} of task {event.source.task!r}"
        fault = prompt_fault(event.tokens, self._rules.vocab_size)
        if fault:
            return [StopRun(f"{name} {fault}")]
        if self._is_held_out(event.source.row):
            text = f"{name} is held out: an evaluation asks it"
            if not prompts.skip(event.cursor):
                return [StopRun(f"{text}, and many before it")]
            return [self._statistics.fault("prompt", text)]
        context, length = self._rules.context_max, len(event.tokens) // 4
        if context is not None and length >= context:
            text = f"has {length} tokens; the model's context of {context} leaves no answer"
            if not prompts.skip(event.cursor):
                return [StopRun(f"{name}, like many before, {text}")]
            return [self._statistics.fault("prompt", f"{name} {text}")]
        prompts.drawn(DrawnPrompt(event.cursor, event.tokens, event.source, event.tags))
        return []

    def prompt_failed(self, event: PromptFailed) -> list[RolloutAction]:
        """The task cannot make this prompt, however often it is asked: it is left out."""
        text = f"prompt {event.cursor} of task {event.task!r} cannot be made: {event.reason}"
        if not self._prompts[event.task].skip(event.cursor):
            return [StopRun(f"{text}; neither could many before it")]
        return [self._statistics.fault("prompt", text)]

    def prompts_ended(self, event: PromptsEnded) -> list[RolloutAction]:
        """The task has no more prompts: its last groups are still trained on."""
        self._prompts[event.task].ended(event.cursor)
        return []

    def scored(self, event: SampleScored) -> list[RolloutAction]:
        """A reward has come, or failed. The last one completes its group.

        No reward is better than a wrong one: a sample whose reward failed is left out.
        """
        group = self._groups.get(event.group)
        kept = None if group is None else group.kept.get(event.sample)
        # The group may have been dropped while the reward was computed.
        if group is None or kept is None or not math.isnan(kept.reward):
            return []
        if event.reward is None or not math.isfinite(event.reward):
            return self._leave_out(group, event)
        group.kept[event.sample] = kept.scored(event.reward, event.parts)
        actions: list[RolloutAction] = [
            Persist(SampleRewarded(event.group, event.sample, event.reward, event.parts))
        ]
        if event.reason:
            actions.append(self._statistics.fault("unjudged", event.reason, event.group))
        if event.sample in group.unwanted:
            return [*actions, *self._return(group, event.sample)]
        return [*actions, *self._complete_if_scored(group)]

    # --- environments

    def parked_episode(self, group: GroupId, sample: int) -> ParkedEpisode | None:
        found = self._groups.get(group)
        return None if found is None else self._episodes.parked_episode(found, sample)

    def go_on(
        self, asked: ParkedEpisode, event: EnvironmentStepped, *, now: float
    ) -> list[RolloutAction]:
        return self._episodes.go_on(self._groups[event.group], asked, event, now=now)

    def end_episode(
        self,
        asked: ParkedEpisode,
        event: EpisodeEnded,
        *,
        cut_off: bool = False,  # noqa: ARG002 - its last turn says so
        now: float,
    ) -> list[RolloutAction]:
        """The environment has ended an episode, or failed: the sample is kept, and scored or left out."""
        group = self._groups[event.group]
        if event.again or not event.turn:
            group.failures[event.sample] += 1
            note = self._statistics.fault("episode", event.reason, event.group)
            if group.failures[event.sample] > LEASE_FAILURES_MAX:
                return [note, *self._drop(group, "lease", "its agents are gone")]
            return [note, *self._episodes.begin_anew(group, event.sample, now=now)]
        return self._keep_episode(group, asked, event, now)

    # --- the audit

    def judged(self, verdict: SampleVerdict) -> list[RolloutAction]:
        """A sample need not wait any more: its group may be complete, or the sample goes back."""
        group = self._groups.get(verdict.group)
        if group is None or verdict.sample not in group.kept:
            return []
        if not verdict.good:
            return self._give_back(group, verdict.sample, verdict.blamed)
        return self._complete_if_scored(group)

    def convicted(self, worker: PeerId, *, now: float) -> list[RolloutAction]:
        """Forget what this worker wrote, except in full batches. Its leases have ended."""

        def theirs(spans: Iterable[AuthoredSpan]) -> bool:
            return any(span.author == worker for span in spans)

        actions: list[RolloutAction] = []
        for lease in [each for each in self._leases if theirs(each.given.base.spans)]:
            actions += self._stop(lease, now)
        for stored in self._staleness.withdraw(
            lambda group: any(theirs(each.spans) for each in group.trajectories)
        ):
            actions += self.discard(stored, "convicted", again=True)
        for group in self._groups:
            for sample in [at for at, each in group.partials.items() if theirs(each.partial.spans)]:
                group.lose_partial(sample)
            actions += self._forget_turns(group, theirs, now)
            for sample in [at for at, kept in group.kept.items() if theirs(kept.spans)]:
                actions += self._give_back(group, sample, [worker])
        return actions

    # --- workers

    def progressed(
        self,
        peer: Peer,
        lease: Lease,
        deltas: Sequence[SampleDelta],
        *,
        now: float,  # noqa: ARG002 - as of every kind
    ) -> list[Note]:
        """What a sample has by now, another worker may go on from."""
        return self._partials.gather(peer, lease, deltas)

    def finished(
        self,
        peer: Peer,
        lease: Lease | None,  # noqa: ARG002 - a result of an attempt that is over counts, too
        message: SampleFinished,
        *,
        now: float,
    ) -> Sequence[RolloutAction] | None:
        """Judge a result and answer it: the first accepted result of a sample wins."""
        repeat = self._accepted.is_repeat(peer, message)
        if repeat is not None:
            text = "" if repeat else "a different result was accepted before"
            return self._scheduler.refuse(peer, message, text) if text else answer(peer, message)
        key = HeldLease(message.lease, message.attempt)
        group = self._groups.owner(peer.peer, key, message.sample)
        if group is None or not self._fits_rules(group.given[key], group.task):
            return None
        base = group.given[key].base
        if group.is_answered(message.sample, base):
            return self._scheduler.refuse(peer, message, "another attempt was first")
        written = written_by(
            peer.peer,
            message,
            base,
            rules=self._rules,
            task=group.task,
            prompt=group.prompt.tokens,
            believed=self._partials.believed(peer),
        )
        if isinstance(written, str):
            return self._bad_result(peer, group, message, written, now)
        # It is well-formed, but a version that wrote it has been revoked or is too old by now, or it
        # goes on from what a convicted worker wrote.
        lies = self._audits is not None and self._by_convicted(written.whole)
        if lies or not self._partials.good(written.whole):
            return self._scheduler.refuse(peer, message, "the lease is over")
        accept = self._accept if group.task.episode is None else self._end_turn
        return accept(peer, group, message, written, now)

    def lost(
        self,
        lease: Lease,
        cause: Cause,
        reason: str,  # noqa: ARG002 - what workers say is noted already
        *,
        now: float,
    ) -> list[RolloutAction]:
        """The attempt is over: its open samples wait for the next one."""
        return self._ended(lease, now, failures=int(cause != "drained"))

    def revive(self, peer: Peer, key: HeldLease, *, now: float) -> bool:
        """An ended lease runs again with the samples that no other lease has taken over; if there are none, it is
        still kept for results that may be the first of their samples.
        """
        given = self._groups.wanted(peer.peer, key)
        group = None if given is None else self._groups.get(given.group)
        if given is None or group is None or not self._may_count(given, group.task):
            return False
        self._groups.revive(given, now=now)
        return True

    # --- versions, time

    def revoke(self, keys: Collection[VersionKey], *, now: float) -> list[RolloutAction]:
        """Cancel the leases and drop the groups that these versions have written tokens for."""
        actions: list[RolloutAction] = []
        for lease in [each for each in self._leases if each.kind == TRAINING]:
            worker = self._members.get(lease.worker)
            serving = None if worker is None else worker.serving
            base = (span.key for span in lease.given.base.spans)
            if any(key in keys for key in (serving, lease.given.served, *base)):
                actions += self._stop(lease, now)
        for group in self._groups:
            if group.stored().record.uses(keys):
                actions += self._drop(group, "revoked", "", again=True)
            else:
                actions += self._forget_turns(
                    group, lambda spans: any(span.key in keys for span in spans), now
                )
        return actions

    def deadlines(self, *, now: float) -> list[RolloutAction]:
        """Drop the groups whose returned samples have waited for too long."""
        actions: list[RolloutAction] = []
        while self._returned and next(iter(self._returned.values())) <= now:
            number = next(iter(self._returned))
            del self._returned[number]
            group = self._groups.get(number)
            if group is not None and group.waiting.intersection(group.returned):
                actions += self._drop(group, "returned", "nobody else can write it", again=True)
        return actions

    def wake_at(self) -> float | None:
        """When something has waited for long enough."""
        # All wait equally long, so the first is due first.
        returned = next(iter(self._returned.values())) if self._returned else None
        times = (
            self._patient_until,
            returned,
            self.stragglers.wake_at(),
            self._patience.wake_at(),
        )
        return min((at for at in times if at is not None), default=None)

    def age(self, *, now: float) -> list[RolloutAction]:
        """Drop the groups and partials that have become useless; samples that came too late are left out."""
        self._variance_filter.opened(self._staleness.open_step)
        actions = self._age() if self._staleness.oldest != self._aged_to else []
        for group in self._patience.over(now=now):
            actions += self._leave_out_late(group)
        with_partials = [group for group in self._groups.waiting() if group.partials]
        self._patient_until = self._partials.forget(with_partials, now=now)
        return actions

    def before_batch(self, asked_step: int) -> list[RolloutAction]:
        """If the open step gets its batch now, groups that no later step can take go on without late samples."""
        if not self._staleness.may_freeze(asked_step):
            return []
        last = self._patience.last_call()
        return [action for group in last for action in self._leave_out_late(group)]

    def late_moves(self, *, now: float) -> list[Move]:
        """Which samples that a group waits for are to go on at faster workers, for `move`."""
        if not self.stragglers.any_late(now=now):
            return []
        self._scheduler.refresh(now=now)
        return self.stragglers.moves(self._scheduler.free_workers(self._staleness.oldest))

    def move(self, moves: Iterable[Move], *, now: float) -> list[RolloutAction]:
        """End these leases; the next `fill` of the scheduler grants their samples where they are to go on."""
        actions: list[RolloutAction] = []
        for lease, worker in moves:
            if self._leases.get(lease.key) is lease:
                actions += self._scheduler.stop(lease)
                group = self._groups.ended(lease)
                group.moves.update(lease.samples)
                actions += self._partials.left(group, lease, goes_to=worker, now=now)
        return actions

    def drop_held_out(self) -> list[RolloutAction]:
        """Which rows are held out is known now: groups of such rows are from before a restart."""
        actions: list[RolloutAction] = []
        for stored in self._staleness.withdraw(
            lambda group: self._is_held_out(group.trajectories[0].source.row)
        ):
            actions += self.discard(stored, "heldout")
        for group in self._groups:
            if self._is_held_out(group.prompt.source.row):
                actions += self._drop(group, "heldout", "an evaluation asks its question")
        return actions

    def offer_episodes(self) -> list[RolloutAction]:
        """Begin the groups whose samples agents outside play: those need no slot yet."""
        actions: list[RolloutAction] = []
        for group, admitted in self._work.admit_outside():
            actions += admitted
            for sample in sorted(group.parked):
                actions += self._episodes.offer(group, sample)
        return actions

    def draw_ahead(self, slots: int) -> list[DrawPrompt]:
        """Ask for the prompts that these slots can take next."""
        count = 1 + slots // self._rules.group_size
        return [ask for prompts in self._prompts.values() for ask in prompts.ask(count)]

    def discard(
        self, stored: StoredGroup, reason: str, detail: str = "", *, again: bool = False
    ) -> list[RolloutAction]:
        """Drop a complete group. again: its prompt is not to blame, and is used once more."""
        lengths = [trajectory.written for trajectory in stored.record.trajectories]
        return self._discard(stored, reason, detail, lengths, again=again)

    def _discard(
        self, stored: StoredGroup, reason: str, detail: str, lengths: Sequence[int], *, again: bool
    ) -> list[RolloutAction]:
        """lengths: in tokens, of all samples of the group, also of those not in `stored`."""
        if again and (prompts := self._prompts.get(stored.source.task)) is not None:
            prompts.give_back(_prompt_of(stored))
        self._statistics.dropped(reason, len(stored.record.trajectories), lengths)
        if reason in WORTHLESS:
            self._statistics.judged(stored.record.trajectories, trained=False)
        said = f"{reason}: {detail}" if detail else reason
        return [Persist(GroupDropped(stored.record.group, said, again))]

    # --- inside: results

    def _accept(
        self,
        peer: Peer,
        group: OpenGroup,
        message: SampleFinished,
        written: Written,
        now: float,
    ) -> list[RolloutAction]:
        """Keep a good result."""
        whole, finish = written
        record = TrajectoryRecord(
            message.sample,
            whole.tokens,
            whole.logprobs,
            whole.spans,
            finish,
            source=group.prompt.source,
            columns=whole.columns,
        )
        key = HeldLease(message.lease, message.attempt)
        lease = group.running.get(key)
        self._measure(whole, peer.peer, None if lease is None else lease.since, now)
        ended = self._groups.keep(group, record)
        is_last = self._is_whole(group)
        if not is_last:
            self.stragglers.kept(group)
            self._patience.kept(group, now=now)
        if key in group.running:
            self._leases.renew(group.running[key], tokens=True, now=now)
        peer.succeeded()
        self._statistics.tokens_accepted += whole.length
        fingerprint = self._accepted.add(peer, message)
        if self._audits is not None:
            self._audits.delivered(
                group.group, group.prompt.tokens, record, sampling=group.task.sampling, now=now
            )
        actions: list[RolloutAction] = [
            Persist(SampleKept(group.group, message.lease, message.attempt, record, fingerprint)),
            *answer(peer, message),
            *(self._scheduler.cancel(ended) if ended is not None and ended.key != key else []),
        ]
        # With over_stale "mask" the newest version counts, and only the last result tells it.
        if is_last and self._outdated(group):
            return [*actions, *self._drop(group, "stale", "", again=True)]
        return [
            *actions,
            # Not `_score`: this is for every sample of a run.
            ScoreSample(
                group.group,
                message.sample,
                group.prompt.cursor,
                whole.tokens,
                record.finish,
                group.task.name,
            ),
        ]

    def _end_turn(
        self,
        peer: Peer,
        group: OpenGroup,
        message: SampleFinished,
        written: Written,
        now: float,
    ) -> list[RolloutAction]:
        """A turn of an episode is over: it is durable, and the environment is told of it."""
        key, sample = HeldLease(message.lease, message.attempt), message.sample
        lease = group.running.get(key)
        parked = end_turn(
            peer,
            group.group,
            message,
            written,
            group.episodes.get(sample),
            fingerprint=self._accepted.add(peer, message),
            since=now if lease is None else lease.since,
            now=now,
        )
        ended = self._groups.park(group, parked)
        if key in group.running:
            self._leases.renew(group.running[key], tokens=True, now=now)
        peer.succeeded()
        self._statistics.tokens_accepted += len(message.tokens) // 4
        return [
            Persist(parked.turn),
            *answer(peer, message),
            *(self._scheduler.cancel(ended) if ended is not None and ended.key != key else []),
            *self._episodes.tell(group, sample),
        ]

    def _keep_episode(
        self, group: OpenGroup, asked: ParkedEpisode, event: EpisodeEnded, now: float
    ) -> list[RolloutAction]:
        """Keep an episode with its reward."""
        parked, turn = asked.parked, asked.parked.turn
        record = self._episodes.record(group, parked)
        self._episodes.measure(asked, now=now)
        self._measure(turn.partial, parked.worker, parked.since, now)
        self._groups.keep(group, record)
        if self._audits is not None:
            self._audits.delivered(
                group.group, group.prompt.tokens, record, sampling=group.task.sampling, now=now
            )
        if group.lacking:
            self.stragglers.kept(group)
            self._patience.kept(group, now=now)
        kept = SampleKept(group.group, turn.lease, turn.attempt, record, turn.fingerprint)
        actions: list[RolloutAction] = [Persist(kept)]
        stale = self._is_whole(group) and self._outdated(group)
        if stale:
            actions += self._drop(group, "stale", "", again=True)
        else:
            scored = SampleScored(
                event.group, event.sample, event.reward, event.reason, event.parts
            )
            actions += self.scored(scored)
        if group.task.episode is not None and group.task.episode.outside:
            # Its agent waits for this.
            actions.append(self._episodes.forget(group, event.sample, ended=not stale))
        return actions

    def _forget_turns(
        self, group: OpenGroup, void: Callable[[Iterable[AuthoredSpan]], bool], now: float
    ) -> list[RolloutAction]:
        """The waiting and parked samples of which such spans wrote an earlier turn begin anew."""
        found = [at for at, parked in group.parked.items() if void(parked.turn.partial.spans)]
        found += [
            at
            for at, episode in group.episodes.items()
            if at in group.waiting and void(episode.partial.spans)
        ]
        actions: list[RolloutAction] = []
        for sample in found:
            actions += self._episodes.begin_anew(group, sample, now=now)
        return actions

    def _measure(self, whole: Partial, worker: PeerId, since: float | None, now: float) -> None:
        """A trajectory is whole. worker: the last one that wrote for it."""
        measurements = self._statistics.measurements
        if len(whole.spans) == 1:
            measurements.accepted(worker, since, now=now)
        else:
            for author, share in whole.shares().items():
                own = since if author == worker else None
                measurements.accepted(author, own, share, now=now)

    def _bad_result(
        self, peer: Peer, group: OpenGroup, message: SampleFinished, fault: str, now: float
    ) -> list[RolloutAction]:
        """Refuse a malformed result: its sample waits for another lease unless one has it already.

        After BAD_RESULTS_MAX of them the group is dropped. A lease from before a restart may have
        had other limits, so its result is no fault.
        """
        resumed = self._leases.resumed(message.lease)
        if not resumed:
            group.bad_results += 1
            peer.rest(now)
        actions: list[RolloutAction] = [
            *self._scheduler.refuse(peer, message, fault, fault=not resumed)
        ]
        self._groups.put_back(group, HeldLease(message.lease, message.attempt), message.sample)
        if group.bad_results >= BAD_RESULTS_MAX:
            actions += self._drop(group, "result", fault)
        return actions

    # --- inside: ends

    def _leave_out(self, group: OpenGroup, event: SampleScored) -> list[RolloutAction]:
        """A reward failed: the group goes on without the sample, if enough others are left."""
        sample = event.sample
        note = self._statistics.fault(
            "reward", f"sample {sample} of group {event.group}: {event.reason}", event.group
        )
        if sample in group.unwanted:
            return [note, *self._return(group, sample)]
        if self._rules.drawn(group.task) - len(group.left_out) <= self._rules.group_min:
            return [note, *self._drop(group, "reward", event.reason)]
        if self._audits is not None:
            self._audits.waiting.withdraw(group.group, sample)
        self._groups.leave_out(group, sample)
        actions: list[RolloutAction] = [note, Persist(SampleLeftOut(group.group, sample))]
        # With over_stale "mask" its newest version may have gone with the sample.
        if self._is_whole(group) and self._outdated(group):
            return [*actions, *self._drop(group, "stale", "", again=True)]
        return [*actions, *self._complete_if_scored(group)]

    def _complete_if_scored(self, group: OpenGroup) -> list[RolloutAction]:
        return self._complete(group) if self._is_whole(group) and not group.unscored() else []

    def _complete(self, group: OpenGroup) -> list[RolloutAction]:
        """All samples are scored: buffer the group, unless its rewards are equal or it is old."""
        if self._audits is not None and group.group in self._audits.waiting:
            return []
        self.stragglers.complete(group)
        stored = group.stored()
        self._statistics.qualities.scored(stored.record.trajectories)
        actions: list[RolloutAction] = []
        sampler = self._prompts[group.task.name].sampler
        rewards = {each.sample: each.reward for each in group.kept.values()}
        if sampler.filters and len(rewards) > 1:
            judged = sampler.judged(
                stored.source,
                equal=no_variance(stored.record),
                spread=spread([*rewards.values()]),
                version=stored.record.version_max,
            )
            actions += [] if judged is None else [Persist(judged)]
        if self._variance_filter.concerns(stored.record):
            if self._variance_filter.filter():
                return [*actions, *self._drop(group, "filtered", "all rewards are the same")]
            text = "too many groups without variance; this one is taken"
            step = self._staleness.open_step
            actions.append(Note("variance", f"step {step}: {text}", group.group))
        if surplus := rewards.keys() - most_contrasting(rewards, self._rules.group_size):
            actions += self._leave_out_surplus(group, surplus)
            stored = group.stored()
        if not self._staleness.admit(stored):
            return [*actions, *self._drop(group, "stale", "", again=True)]
        self._groups.remove(group)
        return [*actions, Note("buffered", f"version_min={stored.record.version_min}", group.group)]

    def _leave_out_surplus(self, group: OpenGroup, surplus: Collection[int]) -> list[RolloutAction]:
        """More samples were drawn than are trained on. They have cost as much as the others."""
        unused = [group.kept[sample] for sample in sorted(surplus)]
        self._statistics.wasted("pairs", len(unused), [each.written for each in unused])
        self._statistics.judged(unused, trained=False)
        for each in unused:
            self._groups.leave_out(group, each.sample)
        return [Persist(SampleLeftOut(group.group, each.sample)) for each in unused]

    def _leave_out_late(self, group: OpenGroup) -> list[RolloutAction]:
        """The group goes on without the samples that it still waits for."""
        late = group.lacks()
        self._statistics.wasted("late", len(late), group.unfinished_lengths())
        actions: list[RolloutAction] = []
        for sample in late:
            ended = self._groups.leave_out(group, sample)
            actions.append(Persist(SampleLeftOut(group.group, sample)))
            actions += [] if ended is None else self._scheduler.cancel(ended)
            actions += self._forget_all(group, [sample])
        return [*actions, *self._complete_if_scored(group)]

    def _age(self) -> list[RolloutAction]:
        """The open batch has advanced: drop the groups that it cannot take any more.

        Groups that complete later are judged then.
        """
        self._aged_to = self._staleness.oldest
        actions: list[RolloutAction] = []
        for stored in self._staleness.age():
            actions += self.discard(stored, "stale", again=True)
        for group in self._groups:
            if self._outdated(group):
                actions += self._drop(group, "stale", "", again=True)
        return actions

    def _outdated(self, group: OpenGroup) -> bool:
        """Whether a group is too old, by the versions that have written or are writing for it."""
        oldest = [
            *[each.version_min for each in group.kept.values()],
            *[lease.given.oldest for lease in group.running.values()],
        ]
        for partial in group.earlier() if group.parked or group.episodes else ():
            # Of an agent's first call nothing is written yet.
            oldest += [] if partial.version_min is None else [partial.version_min]
        newest = _newest(group) if self._is_whole(group) else None
        return bool(oldest) and self._staleness.outdated(min(oldest), newest)

    def _is_last_step(self, group: OpenGroup) -> bool:
        """Whether the open step is the last one that can take what a group has."""
        oldest = min([each.version_min for each in group.kept.values()])
        return self._staleness.is_last_step(oldest, _newest(group))

    def _is_whole(self, group: OpenGroup) -> bool:
        return not (group.waiting or group.running or group.parked)

    def _stop(self, lease: Lease, now: float) -> list[RolloutAction]:
        """Its tokens cannot count: end the attempt. The end of an earlier one may have dropped its group."""
        if self._leases.get(lease.key) is not lease:
            return []
        return [*self._scheduler.stop(lease), *self._ended(lease, now, failures=0)]

    def _ended(self, lease: Lease, now: float, *, failures: int) -> list[RolloutAction]:
        """The attempt is over: its open samples wait for the next one.

        If one of them has failed too often, the group is dropped.
        """
        group = self._groups.ended(lease)
        group.failures.update(dict.fromkeys(lease.samples, failures))
        if max(group.failures.values()) > LEASE_FAILURES_MAX:
            return self._drop(group, "lease", "its leases failed")
        return [*self._partials.left(group, lease, now=now)]

    def _give_back(
        self, group: OpenGroup, sample: int, blamed: Iterable[PeerId]
    ) -> list[RolloutAction]:
        """A kept sample is not wanted; once it is scored, any worker but these may write it."""
        if self._audits is not None:
            self._audits.waiting.withdraw(group.group, sample)
        group.returned.setdefault(sample, set()).update(blamed)
        if math.isnan(group.kept[sample].reward):
            # Its reward must have come before another answer waits for one.
            group.unwanted.add(sample)
            return []
        return self._return(group, sample)

    def _return(self, group: OpenGroup, sample: int) -> list[RolloutAction]:
        now = self._statistics.now
        self._groups.give_back(group, sample, now=now)
        self._returned.setdefault(group.group, now + RETURNED_WAIT_S)
        return [Persist(SampleReturned(group.group, sample)), *self._episodes.offer(group, sample)]

    def _drop(
        self, group: OpenGroup, reason: str, detail: str, *, again: bool = False
    ) -> list[RolloutAction]:
        lengths = group.lengths()
        if self._audits is not None:
            self._audits.waiting.forget(group.group)
        actions: list[RolloutAction] = []
        for lease in self._groups.remove(group):
            actions += self._scheduler.stop(lease)
        actions += self._forget_all(group, {*group.parked, *group.episodes})
        return [*actions, *self._discard(group.stored(), reason, detail, lengths, again=again)]

    def _forget_all(self, group: OpenGroup, samples: Iterable[int]) -> list[RolloutAction]:
        """These episodes do not go on."""
        if group.task.episode is None:
            return []
        return [self._episodes.forget(group, sample) for sample in sorted(samples)]

    def _recover_group(
        self,
        stored: StoredGroup,
        given: Sequence[LeaseGiven],
        turns: Sequence[RecoveredTurn],
        now: float,
    ) -> list[RolloutAction]:
        task = self._rules.task(stored.source.task)
        if task is None:
            return self.discard(stored, "rules", "the run has no such task any more")
        record, size = stored.record, self._rules.drawn(task)
        kept = {trajectory.sample: trajectory for trajectory in record.trajectories}
        if any(sample >= size for sample in (*kept, *record.left_out)):
            return self.discard(stored, "rules", "the group size has changed")
        if record.left_out and size - len(record.left_out) < self._rules.group_min:
            return self.discard(stored, "rules", "too few samples are left")
        group = OpenGroup(
            record.group,
            _prompt_of(stored),
            task,
            set(range(size)) - set(kept) - set(record.left_out),
            kept,
            left_out=set(record.left_out),
        )
        if turns and task.episode is None:
            return self.discard(stored, "rules", "its task is no environment any more")
        self._episodes.recover(group, turns, now=now)
        unscored = group.unscored()
        if (group.lacking or unscored) and record.sampling != task.sampling:
            return self.discard(stored, "rules", "its task is sampled otherwise now")
        if self._audits is not None:
            # What was judged before a restart is not known any more.
            for each in kept.values():
                self._audits.delivered(
                    group.group, record.prompt, each, sampling=record.sampling, now=now
                )
        waits = self._audits is not None and group.group in self._audits.waiting
        if group.lacking or unscored or waits:
            self._groups.add(group)
            actions = self._episodes.tell_again(group, now=now)
            self._groups.recover(
                group, given, lambda attempt: self._may_count(attempt, task), now=now
            )
            return [*actions, *(_score(group, each) for each in unscored)]
        if len(kept) > self._rules.group_size:
            # It waited for a verdict only, and there is no audit now.
            self._groups.add(group)
            return self._complete(group)
        return [] if self._staleness.admit(stored) else self.discard(stored, "stale", again=True)

    def _fits_rules(self, given: LeaseGiven, task: TaskRules) -> bool:
        """Whether an attempt fits the rules: it may be from before a restart with other rules."""
        if max(given.samples) >= self._rules.drawn(task):
            return False
        base = given.base
        return base is NOTHING or base.length - base.turn_start < task.max_new_tokens

    def _may_count(self, given: LeaseGiven, task: TaskRules) -> bool:
        """Whether tokens of this attempt may still become part of a batch."""
        fits = self._fits_rules(given, task) and self._versions.live(given.served) is not None
        return (
            fits
            and self._partials.good(given.base)
            and not self._by_convicted(given.base)
            and not self._staleness.outdated(given.oldest, None)
        )

    def _by_convicted(self, partial: Partial) -> bool:
        """Whether a convicted worker wrote some of these tokens."""
        authors = (span.author for span in partial.spans)
        return self._audits is not None and self._audits.any_convicted(authors)

    def check(self) -> None:
        for prompts in self._prompts.values():
            prompts.check()
            prompts.sampler.check()
        self._accepted.check()
        self._groups.check()
        for group in self._groups:
            assert all(failures <= LEASE_FAILURES_MAX for failures in group.failures.values())
            assert all(self._partials.good(waiting.partial) for waiting in group.partials.values())
            assert group.bad_results < BAD_RESULTS_MAX
            assert group.group not in self._staleness.held()
            assert not self._outdated(group)
            assert group.task.episode is not None or not (group.parked or group.episodes)
            if group.task.episode is not None and group.task.episode.outside:
                assert group.waiting <= group.episodes.keys(), "no agent has begun its episode"


def _newest(group: OpenGroup) -> Version:
    return max([each.version_max for each in group.kept.values()])


def _prompt_of(stored: StoredGroup) -> DrawnPrompt:
    record = stored.record
    return DrawnPrompt(stored.cursor, record.prompt, stored.source, record.tags)


def _score(group: OpenGroup, kept: TrajectoryRecord) -> ScoreSample:
    return ScoreSample(
        group.group, kept.sample, group.prompt.cursor, kept.tokens, kept.finish, group.task.name
    )

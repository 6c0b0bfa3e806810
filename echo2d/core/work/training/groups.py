"""The run's groups as a kind of work: from a prompt to the buffer.

    prompt taken --> samples waiting --> leased --> kept (durable) --> scored --> all: buffered
                        ^                  |                |            |
                        +-- lease ended ---+                +------------+--> group dropped

This class gets the events of leases, prompts, versions, workers and time, and passes each to the module that decides:
`group_work` knows which samples wait, `judge` what a result is worth and what happens to its group, `recovery` what
continues after a restart, and `group_table` where each sample is. A sample whose lease ended with tokens continues from
them, alone (`partials`). A sample of an environment has several turns, and waits for the environment between two of
them (`open_episodes`). What a revoked version or a convicted worker wrote is taken back here.
Invariant: every sample is waiting, in one running lease, parked, kept, or left out.
Not here: which worker gets a lease and when (`scheduler`), the gates and the batches (`staleness`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from echo2d.core.audit.audits import Audits
from echo2d.core.audit.waiting_samples import SampleVerdict
from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.cluster.events import Note, StopRun
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import HeldLease, SampleDelta, SampleFinished, VersionKey
from echo2d.core.protocol.trajectory import AuthoredSpan, StoredGroup
from echo2d.core.work.episodes import ParkedEpisode
from echo2d.core.work.events import (
    DrawPrompt,
    EnvironmentStepped,
    EpisodeEnded,
    PromptDrawn,
    PromptFailed,
    PromptsEnded,
    RecoveredRollouts,
    RewardsProbed,
    RolloutAction,
    SampleScored,
)
from echo2d.core.work.kind import Cause, TaskWork
from echo2d.core.work.leases import TRAINING, Lease
from echo2d.core.work.scheduler import LeaseScheduler
from echo2d.core.work.training.group_table import (
    LEASE_FAILURES_MAX,
    BetweenTurns,
    OpenGroup,
)
from echo2d.core.work.training.group_work import GroupWork, PendingOfGroup
from echo2d.core.work.training.judge import GroupJudge
from echo2d.core.work.training.parts import make_training_parts
from echo2d.core.work.training.prompts import DrawnPrompt, Prompts, prompt_fault
from echo2d.core.work.training.recovery import Recovery
from echo2d.core.work.training.staleness import Staleness
from echo2d.core.work.training.stragglers import Move


class Groups(TaskWork[PendingOfGroup]):
    """See the module docstring. `now` is monotonic seconds.

    After every event call `age`, then the scheduler's `fill`, then `draw_ahead` and `offer_episodes`.
    """

    number = TRAINING

    def __init__(
        self,
        parts: RunParts,
        recovered: RecoveredRollouts,
        *,
        staleness: Staleness,
        scheduler: LeaseScheduler,
        audits: Audits | None = None,
        is_held_out: Callable[[str], bool] = lambda _: False,
    ) -> None:
        books = make_training_parts(
            parts, recovered, staleness=staleness, scheduler=scheduler, audits=audits
        )
        self._rules, self._members = parts.rules, parts.members
        self._statistics = parts.statistics
        self._audits = audits
        self._is_held_out = is_held_out
        self._staleness = staleness
        self._scheduler, self._leases = scheduler, scheduler.leases
        self._prompts, self._groups = books.prompts, books.groups
        self._partials, self._episodes = books.partials, books.episodes
        self.watch, self.stragglers = books.watch, books.stragglers
        self._work = GroupWork(books, recovered.next_group)
        scheduler.add(self)
        # Whether external agents play some of the tasks.
        self.are_outside = bool(self._work.outside)
        self._judge = GroupJudge(books, recovered.answered)
        self._patience = self._judge.patience
        self._recovery = Recovery(books, self._judge)
        # When the next partial will have waited long enough.
        self._patient_until: float | None = None

    @property
    def in_flight(self) -> int:
        """The number of admitted groups that are not complete yet."""
        return len(self._groups)

    @property
    def in_flight_by_task(self) -> Mapping[str, int]:
        """The number of admitted groups of each task that are not complete yet."""
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
        """The number of groups that have all their results, and wait only for rewards."""
        whole = self._groups.whole
        # Groups that wait for a verdict may have all their rewards.
        return whole if self._audits is None else max(0, whole - self._audits.waiting.groups)

    def lack_only_rewards(self, groups: int) -> bool:
        """Whether at least this many groups, and at least one, wait only for rewards."""
        return len(self._groups) >= max(1, groups) and self.unscored >= max(1, groups)

    # --- samples to workers

    def priority(self, *, now: float) -> int:
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
        """A prompt was drawn.

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
        actions = self._judge.scored(event)
        return [*actions, *self._watch_rewards()] if event.failed else actions

    def probed(self, event: RewardsProbed) -> list[RolloutAction]:
        """The expected answers of a task have been scored."""
        self.watch.probe_ended(event)
        return self._watch_rewards()

    # --- environments

    def parked_episode(self, group: GroupId, sample: int) -> ParkedEpisode | None:
        found = self._groups.get(group)
        return None if found is None else self._episodes.parked_episode(found, sample)

    def go_on(
        self, asked: ParkedEpisode, event: EnvironmentStepped, *, now: float
    ) -> list[RolloutAction]:
        return self._episodes.go_on(self._groups[event.group], asked, event, now=now)

    def end_episode(
        self, asked: ParkedEpisode, event: EpisodeEnded, *, cut_off: bool = False, now: float
    ) -> list[RolloutAction]:
        actions = self._judge.end_episode(asked, event, now=now)
        return [*actions, *self._watch_rewards()] if event.failed else actions

    # --- the audit

    def judged(self, verdict: SampleVerdict) -> list[RolloutAction]:
        return self._judge.judged(verdict)

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
            actions += self._judge.discard(stored, "convicted", again=True)
        for group in self._groups:
            for sample in [at for at, each in group.partials.items() if theirs(each.partial.spans)]:
                group.lose_partial(sample)
            actions += self._forget_turns(group, theirs, now)
            for sample in [at for at, kept in group.kept.items() if theirs(kept.spans)]:
                actions += self._judge.give_back(group, sample, [worker])
        return actions

    # --- workers

    def progressed(
        self, peer: Peer, lease: Lease, deltas: Sequence[SampleDelta], *, now: float
    ) -> list[Note]:
        """Keep the new tokens, so that another worker can continue from them."""
        notes: list[Note] = []
        for fault in self._partials.gather(peer, lease, deltas):
            notes += self._scheduler.misreported(peer, "progress", fault, now=now)
        return notes

    def finished(
        self, peer: Peer, lease: Lease | None, message: SampleFinished, *, now: float
    ) -> Sequence[RolloutAction] | None:
        return self._judge.finished(peer, lease, message, now=now)

    def lost(self, lease: Lease, cause: Cause, reason: str, *, now: float) -> list[RolloutAction]:
        """The attempt is over: its open samples wait for the next one."""
        return self._ended(lease, now, failures=int(cause not in ("late", "drained")))

    def revive(self, peer: Peer, key: HeldLease, *, now: float) -> bool:
        return self._recovery.revive(peer, key, now=now)

    def recover(self, recovered: RecoveredRollouts, *, now: float) -> list[RolloutAction]:
        """After a restart: buffer complete groups that are in no batch, and continue the others."""
        return self._recovery.recover(recovered, now=now)

    # --- versions, time

    def discard(
        self, stored: StoredGroup, reason: str, detail: str = "", *, again: bool = False
    ) -> list[RolloutAction]:
        """Drop a complete group. again: its prompt is not at fault, and is used again."""
        return self._judge.discard(stored, reason, detail, again=again)

    def deadlines(self, *, now: float) -> list[RolloutAction]:
        actions = self._judge.deadlines(now=now)
        return [*actions, *self._watch_rewards()] if self.watch.alert else actions

    def revoke(self, keys: Collection[VersionKey], *, now: float) -> list[RolloutAction]:
        """Cancel the leases and drop the groups that have tokens of these versions."""
        actions: list[RolloutAction] = []
        for lease in [each for each in self._leases if each.kind == TRAINING]:
            worker = self._members.get(lease.worker)
            serving = None if worker is None else worker.engine.serving
            base = (span.key for span in lease.given.base.spans)
            if any(key in keys for key in (serving, lease.given.served, *base)):
                actions += self._stop(lease, now)
        for group in self._groups:
            if group.stored().record.uses(keys):
                actions += self._judge.drop(group, "revoked", "", again=True)
            else:
                actions += self._forget_turns(
                    group, lambda spans: any(span.key in keys for span in spans), now
                )
        return actions

    def wake_at(self) -> float | None:
        """When a sample, a group or a task will have waited long enough."""
        times = (
            self._patient_until,
            self._judge.wake_at(),
            self.stragglers.wake_at(),
            self._patience.wake_at(),
            self.watch.wake_at() if self.watch.alert else None,
        )
        return min((at for at in times if at is not None), default=None)

    def age(self, *, now: float) -> list[RolloutAction]:
        """Drop the groups and partials that have become useless, and leave out the samples that are too late."""
        actions = self._judge.age()
        for group in self._patience.over(now=now):
            actions += self._judge.leave_out_late(group)
        with_partials = [group for group in self._groups.waiting() if group.partials]
        self._patient_until = self._partials.forget(with_partials, now=now)
        return actions

    def before_batch(self, asked_step: int) -> list[RolloutAction]:
        """If the open step gets its batch now, leave out the late samples of the groups that no later step can take."""
        if not self._staleness.may_freeze(asked_step):
            return []
        last = self._patience.last_call()
        return [action for group in last for action in self._judge.leave_out_late(group)]

    def late_moves(self, *, now: float) -> list[Move]:
        """The leases that should continue at faster workers because a group waits for them; to be passed to `move`."""
        if not self.stragglers.any_late(now=now):
            return []
        self._scheduler.refresh(now=now)
        return self.stragglers.moves(self._scheduler.free_workers(self._staleness.oldest))

    def move(self, moves: Iterable[Move], *, now: float) -> list[RolloutAction]:
        """End these leases; the next `fill` of the scheduler grants their samples to the chosen workers."""
        actions: list[RolloutAction] = []
        for lease, worker in moves:
            if self._leases.get(lease.key) is lease:
                actions += self._scheduler.stop(lease)
                group = self._groups.ended(lease)
                group.moves.update(lease.samples)
                actions += self._partials.left(group, lease, goes_to=worker, now=now)
        return actions

    def drop_held_out(self) -> list[RolloutAction]:
        """Drop the groups of held-out rows, which were begun before a restart.

        Only now it is known which rows are held out.
        """
        actions: list[RolloutAction] = []
        for stored in self._staleness.withdraw(
            lambda group: self._is_held_out(group.trajectories[0].source.row)
        ):
            actions += self._judge.discard(stored, "heldout")
        for group in self._groups:
            if self._is_held_out(group.prompt.source.row):
                actions += self._judge.drop(group, "heldout", "an evaluation asks its question")
        return actions

    def offer_episodes(self) -> list[RolloutAction]:
        """Begin the groups that external agents play: their samples need no slot yet."""
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

    # --- inside

    def _watch_rewards(self) -> list[RolloutAction]:
        """Some rewards fail: find out whose fault it is, and react."""
        watch, now = self.watch, self._statistics.now
        actions: list[RolloutAction] = []
        for task, verdict, reason in [*watch.verdicts(now=now)]:
            match verdict:
                case "stop":
                    actions.append(StopRun(f"the rewards of task {task!r} do not come: {reason}"))
                case "away":
                    watch.go_away(task, now=now)
                    text = f"the rewards of task {task!r} fail: no leases until one comes: {reason}"
                    actions.append(self._statistics.fault("reward", text))
                case "set aside":
                    actions.append(self._set_aside(task, reason))
        for waiting in watch.retries(now=now):
            actions += self._judge.ask_again(waiting)
        return [*actions, *watch.probes()]

    def _set_aside(self, task: str, reason: str) -> Note:
        """Set aside a worker whose answers break the scorer: it gets no leases until the operator allows it."""
        worker = self.watch.put_aside(task)
        peer = self._members.get(worker)
        if peer is not None:
            peer.service.cordoned = True
            self._members.changed.add(worker)
        name = worker if peer is None else peer.name
        return self._statistics.fault("reward", f"{name} is set aside: {reason}")

    def _forget_turns(
        self, group: OpenGroup, void: Callable[[Iterable[AuthoredSpan]], bool], now: float
    ) -> list[RolloutAction]:
        """Start over the waiting and parked samples whose earlier turns have void spans."""
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

    def _stop(self, lease: Lease, now: float) -> list[RolloutAction]:
        """End an attempt whose tokens cannot count. It may have ended already, because ending an earlier attempt may
        drop the group.
        """
        if self._leases.get(lease.key) is not lease:
            return []
        return [*self._scheduler.stop(lease), *self._ended(lease, now, failures=0)]

    def _ended(self, lease: Lease, now: float, *, failures: int) -> list[RolloutAction]:
        """The attempt is over: its open samples wait for the next one.

        If one of these samples has failed too often, the group is dropped.
        """
        group = self._groups.ended(lease)
        group.failures.update(dict.fromkeys(lease.samples, failures))
        if max(group.failures.values()) > LEASE_FAILURES_MAX:
            return self._judge.drop(group, "lease", "its leases failed")
        return [*self._partials.left(group, lease, now=now)]

    def check(self) -> None:
        for prompts in self._prompts.values():
            prompts.check()
            prompts.sampler.check()
        self._groups.check()
        self._judge.check()
        for group in self._groups:
            assert group.group not in self._staleness.held()
            assert group.task.episode is not None or not (group.parked or group.episodes)
            if group.task.episode is not None and group.task.episode.outside:
                assert group.waiting <= group.episodes.keys(), "no agent has begun its episode"

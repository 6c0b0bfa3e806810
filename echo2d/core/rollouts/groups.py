"""Groups: a prompt goes out as leases, results come in and are scored, a whole group goes to the buffer.

    prompt taken --> samples waiting --> leased --> kept (durable) --> scored --> all of them: buffered
                        ^                  |                |            |
                        +-- lease ended ---+                +------------+--> dropped, with everything it had

A group is dropped whole (I5): when it is too old, a reward failed, its leases or results failed too often, a version
that wrote for it is revoked, or all its rewards are the same. The first accepted result of a sample stands. A sample
whose lease ended with tokens goes on from them, alone (`partials`). Leases are durable: after a restart they run on.
Kept true: every sample is waiting, in one running lease, or kept.
Not here: who gets a lease and when (`scheduler`), the gates (`staleness`), batches.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence

from blake3 import blake3

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import GroupId, Version
from echo2d.core.cluster.events import Note, Persist, StopRun
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions, key_of
from echo2d.core.protocol.control_messages import (
    HeldLease,
    LeaseCancelled,
    LeaseFailed,
    LeaseProgress,
    SampleFinished,
    VersionKey,
)
from echo2d.core.protocol.result_check import result_fault
from echo2d.core.protocol.trajectory import GroupRecord, Partial, StoredGroup, TrajectoryRecord
from echo2d.core.rollouts.events import (
    DrawPrompt,
    GroupDropped,
    LeaseGiven,
    PromptDrawn,
    RecoveredRollouts,
    RolloutAction,
    SampleKept,
    SampleRewarded,
    SampleScored,
    ScoreSample,
)
from echo2d.core.rollouts.group_table import GroupTable, OpenGroup
from echo2d.core.rollouts.group_work import GroupWork
from echo2d.core.rollouts.leases import Lease, LeaseTable, answer, send_to
from echo2d.core.rollouts.partials import Partials
from echo2d.core.rollouts.prompts import DrawnPrompt, Prompts, prompt_fault
from echo2d.core.rollouts.scheduler import LeaseScheduler
from echo2d.core.rollouts.staleness import Staleness

LEASE_FAILURES_MAX = (
    8  # leases of one sample that failed or fell silent; then its group's prompt is given up
)
BAD_RESULTS_MAX = 3  # refused results of one group; then its prompt is given up
EXTRA_STEPS_MAX = 4  # a step draws at most 4 R trajectories more because groups had no variance
ANSWERED_MAX = (
    1 << 16
)  # accepted results whose repeats are recognised; workers repeat at most their newest 1024


class Groups:
    """See the module docstring. `now` is monotonic seconds.

    After every event call `age`, then the scheduler's `fill`, then `draw_ahead`.
    """

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
        tag: int,
    ) -> None:
        self._rules = rules
        self._members = members
        self._versions = versions
        self._staleness = staleness
        self._statistics = statistics
        self._prompts = Prompts(recovered.next_cursor)
        self.leases = LeaseTable(tag, rules.lease_silence_s)
        self._groups = GroupTable(rules.group_size, self.leases)
        self._partials = Partials(
            rules, leases=self.leases, versions=versions, staleness=staleness, statistics=statistics
        )
        self._scheduler = scheduler
        scheduler.add(
            GroupWork(
                rules,
                recovered.next_group,
                prompts=self._prompts,
                groups=self._groups,
                leases=self.leases,
                staleness=staleness,
                statistics=statistics,
                scheduler=scheduler,
            )
        )
        self._answered = {(each.key, each.sample): each.fingerprint for each in recovered.answered}
        keep_newest(self._answered, ANSWERED_MAX)
        self._extra = 0  # trajectories filtered while `_extra_step` was the open step
        self._extra_step = 0
        self._aged_to: Version | None = None  # older groups have been dropped
        self._patient_until: float | None = None  # when the next partial has waited for long

    @property
    def in_flight(self) -> int:
        return len(self._groups)

    @property
    def unscored(self) -> int:
        """Groups that are whole but for rewards that have been asked for."""
        return sum(map(self._is_whole, self._groups))

    def lack_only_rewards(self, groups: int) -> bool:
        """Whether so many of them do, and at least one."""
        return len(self._groups) >= max(1, groups) and self.unscored >= max(1, groups)

    def recover(self, recovered: RecoveredRollouts, *, now: float) -> list[RolloutAction]:
        """Take the stored groups that are in no batch: complete ones are buffered, the others go on."""
        actions: list[RolloutAction] = []
        given: dict[GroupId, list[LeaseGiven]] = defaultdict(list)
        for attempt in recovered.given:
            given[attempt.group].append(attempt)
        held = self._staleness.held()
        for stored in recovered.groups:
            if stored.record.group not in held:
                actions += self._recover_group(stored, given[stored.record.group], now)
        return actions

    # --- the data plane

    def prompt_drawn(self, event: PromptDrawn) -> list[RolloutAction]:
        """A prompt that no engine can take is the task's fault: the run cannot go on."""
        fault = prompt_fault(event.tokens, self._rules.vocab_size)
        if fault:
            return [StopRun(f"prompt {event.cursor} of the task {fault}")]
        self._prompts.drawn(event.cursor, event.tokens)
        return []

    def scored(self, event: SampleScored) -> list[RolloutAction]:
        """The last score of a group completes it; a failed reward ends it, for no reward is better than a wrong one."""
        group = self._groups.get(event.group)
        kept = None if group is None else group.kept.get(event.sample)
        if group is None or kept is None or not math.isnan(kept.reward):
            return []  # the group left meanwhile
        if event.reward is None or not math.isfinite(event.reward):
            note = self._statistics.fault(
                "reward",
                f"sample {event.sample} of group {event.group}: {event.reason}",
                event.group,
            )
            return [note, *self._drop(group, "reward", event.reason)]
        group.kept[event.sample] = kept.scored(event.reward)
        rewarded = Persist(SampleRewarded(event.group, event.sample, event.reward))
        done = self._is_whole(group) and not group.unscored()
        return [rewarded, *(self._complete(group) if done else [])]

    # --- workers

    def progressed(self, peer: Peer, message: LeaseProgress, *, now: float) -> list[RolloutAction]:
        """A sign of life; work on anything but the worker's own running leases is called off."""
        lease = self.leases.held(peer, message)
        if lease is None:
            return [*send_to(peer, LeaseCancelled(message.lease, message.attempt))]
        tokens = any(sample.tokens for sample in message.samples) or self._stands_still(peer)
        self.leases.renew(lease, tokens=tokens, now=now)
        return [*self._partials.gather(peer, lease, message.samples)]

    def finished(self, peer: Peer, message: SampleFinished, *, now: float) -> list[RolloutAction]:
        """Judge a result and answer it: the first accepted result of a sample wins."""
        key = HeldLease(message.lease, message.attempt)
        before = self._answered.get((key, message.sample))
        if before is not None:
            return self._answer_repeat(
                peer, message, identical=before == _fingerprint(peer, message)
            )
        group = self._groups.owner(peer.peer, key, message.sample)
        if group is None or not self._fits_rules(group.given[key]):
            known = self.leases.given(message.lease)
            return self._refuse(
                peer, message, "the lease is over" if known else "no such lease", fault=not known
            )
        if message.sample in group.kept:
            return self._refuse(peer, message, "another attempt was first")
        base = group.given[key].base
        fault = result_fault(
            message,
            vocab_size=self._rules.vocab_size,
            max_new_tokens=self._rules.max_new_tokens,
            believed=self._partials.believed(peer),
            base=base,
        )
        if fault:
            return self._bad_result(peer, group, message, fault, now)
        whole = base.plus(message.tokens, message.logprobs, message.spans, shift=base.length)
        if not self._partials.good(whole):
            return self._refuse(peer, message, "the lease is over")  # it came too late
        return self._accept(peer, group, message, whole, now)

    def failed(self, peer: Peer, message: LeaseFailed, *, now: float) -> list[RolloutAction]:
        """The worker gives a lease back; it rests a little."""
        lease = self.leases.held(peer, message)
        if lease is None:
            return []
        if peer.leaving:  # what crossed its notice, or what it could not finish: nobody's fault
            return self._end(lease, now, failures=0)
        note = self._statistics.fault("lease", f"{peer.name}: {message.reason}", lease.given.group)
        return [note, *self._lease_failed(lease, peer, now)]

    def rejoined(
        self, peer: Peer, held: Collection[HeldLease], *, now: float
    ) -> tuple[tuple[HeldLease, ...], tuple[HeldLease, ...], list[RolloutAction]]:
        """What a hello's leases become: kept, cancelled; running ones that the worker does not know end.

        One that ended runs on if nobody took over from it; else it is kept for results that may still be the first.
        """
        actions: list[RolloutAction] = []
        known = frozenset(held)  # a hello may name a million
        for lease in self.leases.of_worker(peer.peer):
            if lease.key in known:
                self.leases.renew(lease, tokens=False, now=now)
            else:
                actions += self._end(lease, now)
        kept = {key: None for key in held if self._goes_on(peer, key, now)}
        return tuple(kept), tuple(key for key in held if key not in kept), actions

    def worker_left(self, peer: Peer, *, revoked: bool = False, now: float) -> list[RolloutAction]:
        """It will not finish anything; of a revoked one no more is taken."""
        actions: list[RolloutAction] = []
        for lease in self.leases.of_worker(peer.peer):
            for sample in lease.samples if revoked else ():
                self.leases.gather(lease, sample, None)
            actions += self._end(lease, now)
        return actions

    # --- versions, time

    def revoke(self, keys: Collection[VersionKey], *, now: float) -> list[RolloutAction]:
        """Cancel the leases and drop the groups that these versions wrote for."""
        actions: list[RolloutAction] = []
        for lease in list(self.leases):
            worker = self._members.get(lease.worker)
            serving = None if worker is None else worker.serving
            base = (span.key for span in lease.given.base.spans)
            if any(key in keys for key in (serving, lease.given.served, *base)):
                actions += [*self._scheduler.cancel(lease), *self._end(lease, now, failures=0)]
        for group in self._groups:
            if group.stored().record.uses(keys):
                actions += self._drop(group, "revoked", "", again=True)
        return actions

    def deadlines(self, *, now: float) -> list[RolloutAction]:
        """Leases whose worker was silent, or made no token, for too long go to somebody else."""
        actions: list[RolloutAction] = []
        for lease in self.leases.expired(now=now):
            worker = self._members.get(lease.worker)
            name = lease.worker if worker is None else worker.name
            note = self._statistics.fault("lease", f"{name}: silent or stuck", lease.given.group)
            actions += [note, *self._scheduler.cancel(lease)]
            actions += self._lease_failed(lease, worker, now)
        return actions

    def wake_at(self) -> float | None:
        """When a lease expires, or a partial has waited for long enough."""
        times = (self.leases.wake_at(), self._patient_until)
        return min((at for at in times if at is not None), default=None)

    def age(self, *, now: float) -> list[RolloutAction]:
        """Drop the groups and partials that have become useless."""
        if self._staleness.open_step != self._extra_step:
            self._extra, self._extra_step = 0, self._staleness.open_step
        actions = self._age() if self._staleness.oldest != self._aged_to else []
        with_partials = [group for group in self._groups.waiting() if group.partials]
        self._patient_until = self._partials.forget(with_partials, now=now)
        return actions

    def draw_ahead(self, slots: int) -> list[DrawPrompt]:
        """Ask for the prompts that these slots can take next."""
        return self._prompts.ask(1 + slots // self._rules.group_size)

    def discard(
        self, stored: StoredGroup, reason: str, detail: str = "", *, again: bool = False
    ) -> list[RolloutAction]:
        """A complete group is of no use. again: for no fault of its prompt, which is used once more."""
        lengths = [trajectory.length for trajectory in stored.record.trajectories]
        return self._discard(stored, reason, detail, lengths, again=again)

    def _discard(
        self, stored: StoredGroup, reason: str, detail: str, lengths: Sequence[int], *, again: bool
    ) -> list[RolloutAction]:
        """lengths: of all its samples, those that are not in `stored` among them."""
        if again:
            self._prompts.give_back(DrawnPrompt(stored.cursor, stored.record.prompt))
        self._statistics.dropped(reason, len(stored.record.trajectories), lengths)
        return [
            Persist(GroupDropped(stored.record.group, f"{reason}: {detail}" if detail else reason))
        ]

    # --- inside: results

    def _accept(
        self, peer: Peer, group: OpenGroup, message: SampleFinished, whole: Partial, now: float
    ) -> list[RolloutAction]:
        """whole: the result behind what its attempt went on from."""
        record = TrajectoryRecord(
            message.sample, whole.tokens, whole.logprobs, whole.spans, math.nan, peer.peer
        )
        key = HeldLease(message.lease, message.attempt)
        lease = group.running.get(key)
        self._statistics.measurements.accepted(
            peer.peer, None if lease is None else lease.since, now=now
        )
        ended = self._groups.keep(group, record)
        if key in group.running:
            self.leases.renew(group.running[key], tokens=True, now=now)
        peer.succeeded()
        self._statistics.tokens_accepted += whole.length
        fingerprint = self._answered[key, message.sample] = _fingerprint(peer, message)
        keep_newest(self._answered, ANSWERED_MAX)
        actions: list[RolloutAction] = [
            Persist(SampleKept(group.group, message.lease, message.attempt, record, fingerprint)),
            *answer(peer, message),
            *(self._scheduler.cancel(ended) if ended is not None and ended.key != key else []),
        ]
        if self._is_whole(group) and self._outdated(group):  # with "mask" that is known only now
            return [*actions, *self._drop(group, "stale", "", again=True)]
        return [
            *actions,
            ScoreSample(group.group, message.sample, group.prompt.cursor, whole.tokens),
        ]

    def _bad_result(
        self, peer: Peer, group: OpenGroup, message: SampleFinished, fault: str, now: float
    ) -> list[RolloutAction]:
        """Refuse it; the sample waits for another lease unless one has it, and the group ends if this goes on."""
        group.bad_results += 1
        peer.rest(now)
        actions = self._refuse(peer, message, fault, fault=True)
        self._groups.put_back(group, HeldLease(message.lease, message.attempt), message.sample)
        if group.bad_results >= BAD_RESULTS_MAX:
            actions += self._drop(group, "result", fault)
        return actions

    def _refuse(
        self, peer: Peer, message: SampleFinished, reason: str, *, fault: bool = False
    ) -> list[RolloutAction]:
        self._statistics.refused_results["bad" if fault else reason] += 1
        notes = [self._statistics.fault("result", f"{peer.name}: {reason}")] if fault else []
        return [*notes, *answer(peer, message, reason)]

    def _answer_repeat(
        self, peer: Peer, message: SampleFinished, *, identical: bool
    ) -> list[RolloutAction]:
        if identical:
            return [*answer(peer, message)]
        return self._refuse(peer, message, "a different result was accepted before")

    # --- inside: ends

    def _complete(self, group: OpenGroup) -> list[RolloutAction]:
        """All samples are scored: into the buffer, unless the rewards say nothing or it is too old."""
        stored = group.stored()
        actions: list[RolloutAction] = []
        if self._rules.filter_zero_variance and _no_variance(stored.record):
            size = self._rules.group_size
            if self._extra + size <= EXTRA_STEPS_MAX * self._rules.trajectories_per_step:
                self._extra += size
                return self._drop(group, "filtered", "all rewards are the same")
            text = f"step {self._staleness.open_step}: too many groups without variance; this one is taken"
            actions = [Note("variance", text, group.group)]
        if not self._staleness.admit(stored):
            return self._drop(group, "stale", "", again=True)
        self._groups.remove(group)
        return [*actions, Note("buffered", f"version_min={stored.record.version_min}", group.group)]

    def _age(self) -> list[RolloutAction]:
        """Batch n has advanced: drop what it cannot take any more. What comes later is judged when it comes."""
        self._aged_to = self._staleness.oldest
        actions: list[RolloutAction] = []
        for stored in self._staleness.age():
            actions += self.discard(stored, "stale", again=True)
        for group in self._groups:
            if self._outdated(group):
                actions += self._drop(group, "stale", "", again=True)
        return actions

    def _outdated(self, group: OpenGroup) -> bool:
        """By the versions that are known to have written or to be writing for it."""
        kept = group.kept.values()
        oldest = [
            *[each.version_min for each in kept],
            *[lease.given.oldest for lease in group.running.values()],
        ]
        newest = max([each.version_max for each in kept]) if self._is_whole(group) else None
        return bool(oldest) and self._staleness.outdated(min(oldest), newest)

    def _is_whole(self, group: OpenGroup) -> bool:
        return len(group.kept) == self._rules.group_size

    def _lease_failed(self, lease: Lease, worker: Peer | None, now: float) -> list[RolloutAction]:
        if worker is not None:
            worker.rest(now, at_least_s=lease.idle_s(now))
        return self._end(lease, now)

    def _end(self, lease: Lease, now: float, *, failures: int = 1) -> list[RolloutAction]:
        """The attempt is over; its open samples wait for the next one, unless one has failed too often."""
        group = self._groups.end(lease)
        if group is None:
            return []  # it ended with its group just now
        group.failures.update(dict.fromkeys(lease.samples, failures))
        if max(group.failures.values()) > LEASE_FAILURES_MAX:
            return self._drop(group, "lease", "its leases failed")
        return [*self._partials.left(group, lease, now=now)]

    def _drop(
        self, group: OpenGroup, reason: str, detail: str, *, again: bool = False
    ) -> list[RolloutAction]:
        lengths = group.lengths()
        cancelled = [self._scheduler.cancel(lease) for lease in self._groups.remove(group)]
        actions = [action for actions in cancelled for action in actions]
        return [*actions, *self._discard(group.stored(), reason, detail, lengths, again=again)]

    def _recover_group(
        self, stored: StoredGroup, given: Sequence[LeaseGiven], now: float
    ) -> list[RolloutAction]:
        record, size = stored.record, self._rules.group_size
        kept = {trajectory.sample: trajectory for trajectory in record.trajectories}
        if any(sample >= size for sample in kept):
            return self.discard(stored, "rules", "the group size has changed")
        group = OpenGroup(
            record.group,
            DrawnPrompt(stored.cursor, record.prompt),
            set(range(size)) - set(kept),
            kept,
        )
        unscored = group.unscored()
        if group.waiting or unscored:
            self._groups.add(group)
            self._groups.recover(group, given, self._may_count, now=now)
            return [
                ScoreSample(group.group, each.sample, stored.cursor, each.tokens)
                for each in unscored
            ]
        return [] if self._staleness.admit(stored) else self.discard(stored, "stale", again=True)

    def _fits_rules(self, given: LeaseGiven) -> bool:
        """It may be from before a restart with others."""
        return (
            max(given.samples) < self._rules.group_size
            and given.base.length < self._rules.max_new_tokens
        )

    def _stands_still(self, peer: Peer) -> bool:
        """Whether it may make no token for a newer version's sake."""
        newest = self._versions.newest
        return (
            self._rules.mode == "exclusive"
            and newest is not None
            and peer.serving != key_of(newest)
        )

    def _may_count(self, given: LeaseGiven) -> bool:
        """Whether what this attempt makes may still become part of a batch."""
        fits = self._fits_rules(given) and self._versions.live(given.served) is not None
        return (
            fits
            and self._partials.good(given.base)
            and not self._staleness.outdated(given.oldest, None)
        )

    def _goes_on(self, peer: Peer, key: HeldLease, now: float) -> bool:
        """Whether a worker that comes back with this attempt is to keep it."""
        lease = self.leases.get(key)
        if lease is not None:
            return lease.worker == peer.peer
        given = self._groups.wanted(peer.peer, key)
        if given is None or not self._may_count(given):
            return False
        self._groups.revive(given, now=now)
        return True

    def check(self) -> None:
        self.leases.check()
        self._prompts.check()
        assert len(self._answered) <= ANSWERED_MAX
        self._groups.check()
        for group in self._groups:
            assert all(failures <= LEASE_FAILURES_MAX for failures in group.failures.values())
            assert all(self._partials.good(waiting.partial) for waiting in group.partials.values())
            assert group.bad_results < BAD_RESULTS_MAX
            assert group.group not in self._staleness.held()
            assert not self._outdated(group)


def _no_variance(record: GroupRecord) -> bool:
    """Of one trajectory alone nothing can be said."""
    return (
        len(record.trajectories) > 1
        and len({trajectory.reward for trajectory in record.trajectories}) == 1
    )


def _fingerprint(peer: Peer, message: SampleFinished) -> bytes:
    return blake3(peer.peer.encode() + pack(message)).digest(16)

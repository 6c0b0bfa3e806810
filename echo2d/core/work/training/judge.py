"""Judges results, rewards and groups: what a worker's result is worth, and what becomes of its group.

    a result --a repeat?--> answered as before
             --of a group, well-formed, of versions that may count?--> kept, or a turn of an episode is over
             --otherwise--> refused; malformed ones of three workers drop its group

    kept --rewards--> all scored: buffered, or dropped if it teaches nothing or is too old
      +--its reward fails, or it comes too late--> left out, as long as `group_min` others stay
      +--the audit does not believe it-----------> returned: another worker writes it

The first good result of a sample counts. A group is dropped whole (I5), with everything that it has.
Invariant: a result or a turn is durable before its worker, a task or an environment is told about it.
Not here: repeated results (`accepted_results`), the form of a result (`work.results`), which samples wait
(`group_work`), the buffer and its gates (`staleness`).
"""

import math
from collections.abc import Collection, Iterable, Sequence

from echo2d.core.audit.waiting_samples import SampleVerdict
from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.events import Note, Persist
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import HeldLease, SampleFinished
from echo2d.core.protocol.trajectory import Partial, StoredGroup, TrajectoryRecord
from echo2d.core.work.episodes import ParkedEpisode, end_turn
from echo2d.core.work.events import (
    AcceptedResult,
    EpisodeEnded,
    GroupDropped,
    RolloutAction,
    SampleKept,
    SampleLeftOut,
    SampleReturned,
    SampleRewarded,
    SampleScored,
    ScoreSample,
)
from echo2d.core.work.leases import Lease, answer
from echo2d.core.work.results import Written, written_by
from echo2d.core.work.training.accepted_results import AcceptedResults
from echo2d.core.work.training.contrast import VarianceFilter, most_contrasting, no_variance, spread
from echo2d.core.work.training.group_table import LEASE_FAILURES_MAX, OpenGroup
from echo2d.core.work.training.parts import TrainingParts
from echo2d.core.work.training.patience import Patience
from echo2d.core.work.training.prompts import prompt_of

# A sample that was given back waits this long for another worker. Then its group is dropped, and its prompt is used
# again.
RETURNED_WAIT_S = 60.0


class GroupJudge:
    """See the module docstring. `now` is monotonic seconds. answered: results accepted before a restart."""

    def __init__(
        self,
        parts: TrainingParts,
        answered: Iterable[AcceptedResult],
    ) -> None:
        self._rules = parts.rules
        self._watch = parts.watch
        self._accepted = AcceptedResults(answered)
        self._groups = parts.groups
        self._prompts = parts.prompts
        self._partials = parts.partials
        self._episodes = parts.episodes
        self._stragglers = parts.stragglers
        self._staleness = parts.staleness
        self._statistics = parts.statistics
        self._scheduler = parts.scheduler
        self._leases = parts.scheduler.leases
        self._audits = parts.audits
        self.patience = Patience(parts.rules, parts.groups, self.is_last_step)
        self._variance_filter = VarianceFilter(parts.rules)
        # Groups with older versions than this have been dropped.
        self._aged_to: Version | None = None
        # For each group with returned samples: when it is dropped if one of these still waits.
        self._returned: dict[GroupId, float] = {}

    # --- results

    def finished(
        self, peer: Peer, lease: Lease | None, message: SampleFinished, *, now: float
    ) -> Sequence[RolloutAction] | None:
        """Judge a result and answer it. None: it belongs to no group."""
        repeat = self._accepted.is_repeat(peer, message)
        if repeat is not None:
            text = "" if repeat else "a different result was accepted before"
            return self._scheduler.refuse(peer, message, text) if text else answer(peer, message)
        key = HeldLease(message.lease, message.attempt) if lease is None else lease.key
        group = self._groups.owner(peer.peer, key, message.sample)
        if group is None or not self._groups.fits_rules(group, group.given[key]):
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
        # The result is well-formed, but a version that wrote it was revoked or is too old by now, or it continues what
        # a convicted worker wrote.
        if not self._partials.good(written[0]):
            return self._scheduler.refuse(peer, message, "the lease is over")
        accept = self._accept if group.task.episode is None else self._end_turn
        return accept(peer, group, message, written, now)

    def end_episode(
        self, asked: ParkedEpisode, event: EpisodeEnded, *, now: float
    ) -> list[RolloutAction]:
        """The environment has ended an episode, or failed: the sample is kept, and scored or left out."""
        group = self._groups[event.group]
        if event.again or not event.turn:
            group.failures[event.sample] += 1
            note = self._statistics.fault("episode", event.reason, event.group)
            if group.failures[event.sample] > LEASE_FAILURES_MAX:
                return [note, *self.drop(group, "lease", "its agents are gone")]
            return [note, *self._episodes.begin_anew(group, event.sample, now=now)]
        return self._keep_episode(group, asked, event, now)

    def _accept(
        self, peer: Peer, group: OpenGroup, message: SampleFinished, written: Written, now: float
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
        self._measure(group, whole, peer.peer, None if lease is None else lease.since, now)
        ended = self._groups.keep(group, record)
        is_last = group.is_whole
        if not is_last:
            self._stragglers.kept(group)
            self.patience.kept(group, now=now)
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
        # With over_stale "mask" the group's newest version counts, which is known only with the last result.
        if is_last and self.is_outdated(group):
            return [*actions, *self.drop(group, "stale", "", again=True)]
        return [
            *actions,
            # The action is made here without a helper, because this runs for every sample of a run.
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
        self, peer: Peer, group: OpenGroup, message: SampleFinished, written: Written, now: float
    ) -> list[RolloutAction]:
        """A turn of an episode has ended: make it durable, and tell the environment."""
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
        self._measure(group, turn.partial, parked.worker, parked.since, now)
        self._groups.keep(group, record)
        if self._audits is not None:
            self._audits.delivered(
                group.group, group.prompt.tokens, record, sampling=group.task.sampling, now=now
            )
        if group.lacking:
            self._stragglers.kept(group)
            self.patience.kept(group, now=now)
        kept = SampleKept(group.group, turn.lease, turn.attempt, record, turn.fingerprint)
        actions: list[RolloutAction] = [Persist(kept)]
        stale = group.is_whole and self.is_outdated(group)
        if stale:
            actions += self.drop(group, "stale", "", again=True)
        else:
            scored = SampleScored(
                event.group,
                event.sample,
                event.reward,
                event.reason,
                event.parts,
                event.failed,
            )
            actions += self.scored(scored)
        if group.task.episode is not None and group.task.episode.outside:
            # The external agent waits for this action.
            actions.append(self._episodes.forget(group, event.sample, ended=not stale))
        return actions

    def _measure(
        self, group: OpenGroup, whole: Partial, worker: PeerId, since: float | None, now: float
    ) -> None:
        """Measure a whole trajectory. worker: the last worker that wrote tokens of it."""
        measurements, length = self._statistics.measurements, None
        if len(whole.spans) == 1:
            length = measurements.accepted(worker, since, now=now)
        else:
            for author, share in whole.shares().items():
                own = since if author == worker else None
                length = measurements.accepted(author, own, share, now=now) or length
        if length is not None:
            group.took.append(length)

    def _measure_unfinished(self, group: OpenGroup) -> None:
        """Measure the samples that still run by their time so far, because nothing waits for them any more."""
        measurements, now = self._statistics.measurements, self._statistics.now
        for lease in group.running.values():
            length = measurements.length(lease.given.worker, lease.since, now=now)
            group.took += [] if length is None else [length] * len(lease.samples)

    def _bad_result(
        self, peer: Peer, group: OpenGroup, message: SampleFinished, fault: str, now: float
    ) -> list[RolloutAction]:
        """Refuse a malformed result. Its sample waits for another lease, unless a lease has it already.

        The group is dropped if BAD_RESULTS_MAX workers sent malformed results, because a single worker must not decide
        that a group cannot be written; or after LEASE_FAILURES_MAX malformed results of any workers. A lease from
        before a restart may have had other limits, so its result is no fault.
        """
        if self._leases.resumed(message.lease):
            refused = self._scheduler.refuse(peer, message, fault)
        else:
            group.bad_results[peer.peer] = group.bad_results.get(peer.peer, 0) + 1
            refused = self._scheduler.refuse_bad(peer, message, fault, now=now)
        self._groups.put_back(group, HeldLease(message.lease, message.attempt), message.sample)
        is_hopeless = group.is_hopeless
        return [*refused, *(self.drop(group, "result", fault) if is_hopeless else ())]

    # --- rewards, and what becomes of groups

    def scored(self, event: SampleScored) -> list[RolloutAction]:
        """A reward was computed, or failed. The last one completes its group.

        A sample whose reward failed is left out, because no reward is better than a wrong one.
        """
        group = self._groups.get(event.group)
        kept = None if group is None else group.kept.get(event.sample)
        # The group may have been dropped while the reward was computed.
        if group is None or kept is None or not math.isnan(kept.reward):
            return []
        told: list[RolloutAction] = []
        if event.failed:
            if self._fails(group, event):
                return [self._statistics.fault("reward", event.reason, event.group)]
        elif self._watch.alert and event.reward is not None:
            for waiting in self._watch.succeeded(group.task.name):
                told += self.ask_again(waiting)
        if event.reward is None or not math.isfinite(event.reward):
            return self._leave_out(group, event)
        group.kept[event.sample] = kept.scored(event.reward, event.parts)
        actions: list[RolloutAction] = [
            *told,
            Persist(SampleRewarded(event.group, event.sample, event.reward, event.parts)),
        ]
        if event.reason:
            actions.append(self._statistics.fault("unjudged", event.reason, event.group))
        if event.sample in group.unwanted:
            return [*actions, *self._return(group, event.sample)]
        return [*actions, *self.complete_if_scored(group)]

    def _fails(self, group: OpenGroup, event: SampleScored) -> bool:
        """The task's code failed at an answer. Returns whether the sample waits until the task is back."""
        author = group.kept[event.sample].spans[-1].author
        number, cursor, now = (event.group, event.sample), group.prompt.cursor, self._statistics.now
        held = self._watch.failed(group.task.name, number, cursor, author, event.reason, now=now)
        # A sample of an episode, or one that will be given back, does not wait.
        if held and (group.task.episode is not None or event.sample in group.unwanted):
            self._watch.forget(group.task.name, number)
            return False
        return held

    def ask_again(self, waiting: tuple[GroupId, int]) -> list[RolloutAction]:
        """Ask for the reward of a kept sample again, unless its group is gone."""
        number, sample = waiting
        group = self._groups.get(number)
        kept = None if group is None else group.kept.get(sample)
        if group is None or kept is None or not math.isnan(kept.reward):
            for task in self._watch.away:
                self._watch.forget(task, waiting)
            return []
        name = group.task.name
        return [ScoreSample(number, sample, group.prompt.cursor, kept.tokens, kept.finish, name)]

    def judged(self, verdict: SampleVerdict) -> list[RolloutAction]:
        """The audit has judged a sample: its group may be complete now, or the sample is given back."""
        group = self._groups.get(verdict.group)
        if group is None or verdict.sample not in group.kept:
            return []
        if not verdict.good:
            return self.give_back(group, verdict.sample, verdict.blamed)
        return self.complete_if_scored(group)

    def deadlines(self, *, now: float) -> list[RolloutAction]:
        """Drop the groups whose returned samples have waited for too long."""
        actions: list[RolloutAction] = []
        for number in [each for each, due in self._returned.items() if due <= now]:
            del self._returned[number]
            group = self._groups.get(number)
            if group is not None and group.waiting.intersection(group.returned):
                actions += self.drop(group, "returned", "nobody else can write it", again=True)
            elif group is not None and not group.returned.keys() <= group.kept.keys():
                self._returned[number] = now + RETURNED_WAIT_S  # its lease may be lost
        return actions

    def wake_at(self) -> float | None:
        """When the next returned sample has waited for too long: all wait equally long, so the first is due first."""
        return next(iter(self._returned.values())) if self._returned else None

    def age(self) -> list[RolloutAction]:
        """If the open batch has advanced, drop the groups that it cannot take any more.

        Groups that complete later are judged then.
        """
        self._variance_filter.opened(self._staleness.open_step)
        if self._staleness.oldest == self._aged_to:
            return []
        self._aged_to = self._staleness.oldest
        actions: list[RolloutAction] = []
        for stored in self._staleness.age():
            actions += self.discard(stored, "stale", again=True)
        for group in self._groups:
            if self.is_outdated(group):
                actions += self.drop(group, "stale", "", again=True)
        return actions

    def is_outdated(self, group: OpenGroup) -> bool:
        """Whether a group is too old, by the versions that have written or are writing for it."""
        oldest = [
            *[each.version_min for each in group.kept.values()],
            *[lease.given.oldest for lease in group.running.values()],
        ]
        for partial in group.earlier() if group.parked or group.episodes else ():
            # Before an agent's first call nothing is written.
            oldest += [] if partial.version_min is None else [partial.version_min]
        newest = _newest(group) if group.is_whole else None
        return bool(oldest) and self._staleness.outdated(min(oldest), newest)

    def is_last_step(self, group: OpenGroup) -> bool:
        """Whether the open step is the last one that can take what a group has."""
        oldest = min([each.version_min for each in group.kept.values()])
        return self._staleness.is_last_step(oldest, _newest(group))

    def _leave_out(self, group: OpenGroup, event: SampleScored) -> list[RolloutAction]:
        """A reward failed: the group continues without the sample, if enough others are left."""
        sample = event.sample
        note = self._statistics.fault(
            "reward", f"sample {sample} of group {event.group}: {event.reason}", event.group
        )
        if sample in group.unwanted:
            return [note, *self._return(group, sample)]
        if self._rules.drawn(group.task) - len(group.left_out) <= self._rules.samples_min:
            return [note, *self.drop(group, "reward", event.reason)]
        if self._audits is not None:
            self._audits.waiting.withdraw(group.group, sample)
        self._groups.leave_out(group, sample)
        actions: list[RolloutAction] = [note, Persist(SampleLeftOut(group.group, sample))]
        # With over_stale "mask" the group may have lost its newest version together with the sample.
        if group.is_whole and self.is_outdated(group):
            return [*actions, *self.drop(group, "stale", "", again=True)]
        return [*actions, *self.complete_if_scored(group)]

    def leave_out_late(self, group: OpenGroup) -> list[RolloutAction]:
        """Continue the group without the samples that it still waits for."""
        late = group.lacks()
        self._measure_unfinished(group)
        self._statistics.wasted("late", len(late), group.unfinished_lengths())
        actions: list[RolloutAction] = []
        for sample in late:
            ended = self._groups.leave_out(group, sample)
            actions.append(Persist(SampleLeftOut(group.group, sample)))
            actions += [] if ended is None else self._scheduler.cancel(ended)
            actions += self._forget_all(group, [sample])
        return [*actions, *self.complete_if_scored(group)]

    def complete_if_scored(self, group: OpenGroup) -> list[RolloutAction]:
        return self.complete(group) if group.is_whole and not group.unscored() else []

    def complete(self, group: OpenGroup) -> list[RolloutAction]:
        """All samples are scored: buffer the group, unless its rewards are equal or it is too old."""
        if self._audits is not None and group.group in self._audits.waiting:
            return []
        self._stragglers.complete(group)
        self._statistics.measurements.lengths.add(group.took)
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
                return [*actions, *self.drop(group, "filtered", "all rewards are the same")]
            text = "too many groups without variance; this one is taken"
            step = self._staleness.open_step
            actions.append(Note("variance", f"step {step}: {text}", group.group))
        if surplus := rewards.keys() - most_contrasting(rewards, self._rules.group_size):
            actions += self._leave_out_surplus(group, surplus)
            stored = group.stored()
        if not self._staleness.admit(stored):
            return [*actions, *self.drop(group, "stale", "", again=True)]
        self._groups.remove(group)
        return [*actions, Note("buffered", f"version_min={stored.record.version_min}", group.group)]

    def _leave_out_surplus(self, group: OpenGroup, surplus: Collection[int]) -> list[RolloutAction]:
        """Leave out the samples beyond the number that is trained on. These samples have cost as much as the others."""
        unused = [group.kept[sample] for sample in sorted(surplus)]
        self._statistics.wasted("pairs", len(unused), [each.written for each in unused])
        self._statistics.judged(unused, trained=False)
        for each in unused:
            self._groups.leave_out(group, each.sample)
        return [Persist(SampleLeftOut(group.group, each.sample)) for each in unused]

    def drop(
        self, group: OpenGroup, reason: str, detail: str, *, again: bool = False
    ) -> list[RolloutAction]:
        lengths = group.lengths()
        if reason == "stale" and not group.is_whole:
            self._measure_unfinished(group)
            self._statistics.measurements.lengths.add(group.took)
        if self._audits is not None:
            self._audits.waiting.forget(group.group)
        actions: list[RolloutAction] = []
        for lease in self._groups.remove(group):
            actions += self._scheduler.stop(lease)
        actions += self._forget_all(group, {*group.parked, *group.episodes})
        return [*actions, *self._discard(group.stored(), reason, detail, lengths, again=again)]

    def discard(
        self, stored: StoredGroup, reason: str, detail: str = "", *, again: bool = False
    ) -> list[RolloutAction]:
        """Drop a complete group. again: its prompt is not at fault, and is used again."""
        lengths = [trajectory.written for trajectory in stored.record.trajectories]
        return self._discard(stored, reason, detail, lengths, again=again)

    def _discard(
        self, stored: StoredGroup, reason: str, detail: str, lengths: Sequence[int], *, again: bool
    ) -> list[RolloutAction]:
        """lengths: the tokens of each sample of the group, also of the samples that `stored` lacks."""
        if again and (prompts := self._prompts.get(stored.source.task)) is not None:
            prompts.give_back(prompt_of(stored))
        self._statistics.dropped(reason, len(stored.record.trajectories), lengths)
        # Groups that were dropped for these reasons were not worth training on. Other reasons say nothing about
        # workers.
        if reason in ("filtered", "refused"):
            self._statistics.judged(stored.record.trajectories, trained=False)
        said = f"{reason}: {detail}" if detail else reason
        return [Persist(GroupDropped(stored.record.group, said, again))]

    def give_back(
        self, group: OpenGroup, sample: int, blamed: Iterable[PeerId]
    ) -> list[RolloutAction]:
        """Give a kept sample back: once it is scored, any worker except the blamed ones may write it again."""
        if self._audits is not None:
            self._audits.waiting.withdraw(group.group, sample)
        group.returned.setdefault(sample, set()).update(blamed)
        if math.isnan(group.kept[sample].reward):
            # Its reward must come first; otherwise it could be taken for the reward of the next answer.
            group.unwanted.add(sample)
            return []
        return self._return(group, sample)

    def _return(self, group: OpenGroup, sample: int) -> list[RolloutAction]:
        now = self._statistics.now
        self._groups.give_back(group, sample, now=now)
        self._returned.setdefault(group.group, now + RETURNED_WAIT_S)
        return [Persist(SampleReturned(group.group, sample)), *self._episodes.offer(group, sample)]

    def _forget_all(self, group: OpenGroup, samples: Iterable[int]) -> list[RolloutAction]:
        """Tell the environment that these episodes do not continue."""
        if group.task.episode is None:
            return []
        return [self._episodes.forget(group, sample) for sample in sorted(samples)]

    def check(self) -> None:
        self._accepted.check()
        for group in self._groups:
            assert not group.is_hopeless
            assert all(failures <= LEASE_FAILURES_MAX for failures in group.failures.values())
            assert not self.is_outdated(group)
            assert not (group.waiting & group.returned.keys()) or group.group in self._returned


def _newest(group: OpenGroup) -> Version:
    return max([each.version_max for each in group.kept.values()])

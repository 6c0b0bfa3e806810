"""Judges what workers send, and what environments say of an episode: the first good result of a sample counts.

    a result --a repeat?--> answered as before
             --an attempt of a group, well-formed, of versions that may count?--> kept, and scored; or a turn is over
             --otherwise--> refused; the third malformed one drops its group

Kept true: a result or a turn is durable before its worker, a task or an environment hears of it.
Not here: rewards and the ends of groups (`endings`), repeated results (`accepted_results`), the form of a result
(`work.results`).
"""

from collections.abc import Iterable, Sequence

from echo2d.core.audit.audits import Audits
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import Persist
from echo2d.core.cluster.membership import Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.protocol.control_messages import (
    HeldLease,
    SampleFinished,
)
from echo2d.core.protocol.trajectory import (
    Partial,
    TrajectoryRecord,
)
from echo2d.core.work.episodes import ParkedEpisode, end_turn
from echo2d.core.work.events import (
    AcceptedResult,
    EpisodeEnded,
    RolloutAction,
    SampleKept,
    SampleScored,
    ScoreSample,
)
from echo2d.core.work.leases import answer
from echo2d.core.work.results import Written, written_by
from echo2d.core.work.scheduler import LeaseScheduler
from echo2d.core.work.training.accepted_results import AcceptedResults
from echo2d.core.work.training.endings import LEASE_FAILURES_MAX, GroupEndings
from echo2d.core.work.training.group_table import GroupTable, OpenGroup
from echo2d.core.work.training.open_episodes import OpenEpisodes
from echo2d.core.work.training.partials import Partials
from echo2d.core.work.training.patience import Patience
from echo2d.core.work.training.stragglers import Stragglers

# Malformed results of one group, before it is dropped for good.
BAD_RESULTS_MAX = 3


class ResultJudge:
    """See the module docstring. `now` is monotonic seconds. answered: results accepted before a restart."""

    def __init__(
        self,
        rules: RunRules,
        answered: Iterable[AcceptedResult],
        *,
        groups: GroupTable,
        partials: Partials,
        episodes: OpenEpisodes,
        endings: GroupEndings,
        stragglers: Stragglers,
        patience: Patience,
        statistics: Statistics,
        scheduler: LeaseScheduler,
        audits: Audits | None,
    ) -> None:
        self._rules = rules
        self._accepted = AcceptedResults(answered)
        self._groups = groups
        self._partials = partials
        self._episodes = episodes
        self._endings = endings
        self._stragglers = stragglers
        self._patience = patience
        self._statistics = statistics
        self._scheduler = scheduler
        self._leases = scheduler.leases
        self._audits = audits

    def finished(
        self, peer: Peer, message: SampleFinished, *, now: float
    ) -> Sequence[RolloutAction] | None:
        """Judge a result and answer it. None: it is of no group."""
        repeat = self._accepted.is_repeat(peer, message)
        if repeat is not None:
            text = "" if repeat else "a different result was accepted before"
            return self._scheduler.refuse(peer, message, text) if text else answer(peer, message)
        key = HeldLease(message.lease, message.attempt)
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
        # It is well-formed, but a version that wrote it has been revoked or is too old by now, or it
        # goes on from what a convicted worker wrote.
        if not self._partials.good(written.whole):
            return self._scheduler.refuse(peer, message, "the lease is over")
        accept = self._accept if group.task.episode is None else self._end_turn
        return accept(peer, group, message, written, now)

    def end_episode(
        self,
        asked: ParkedEpisode,
        event: EpisodeEnded,
        *,
        now: float,
    ) -> list[RolloutAction]:
        """The environment has ended an episode, or failed: the sample is kept, and scored or left out."""
        group = self._groups[event.group]
        if event.again or not event.turn:
            group.failures[event.sample] += 1
            note = self._statistics.fault("episode", event.reason, event.group)
            if group.failures[event.sample] > LEASE_FAILURES_MAX:
                return [note, *self._endings.drop(group, "lease", "its agents are gone")]
            return [note, *self._episodes.begin_anew(group, event.sample, now=now)]
        return self._keep_episode(group, asked, event, now)

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
        is_last = group.is_whole
        if not is_last:
            self._stragglers.kept(group)
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
        if is_last and self._endings.is_outdated(group):
            return [*actions, *self._endings.drop(group, "stale", "", again=True)]
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
            self._stragglers.kept(group)
            self._patience.kept(group, now=now)
        kept = SampleKept(group.group, turn.lease, turn.attempt, record, turn.fingerprint)
        actions: list[RolloutAction] = [Persist(kept)]
        stale = group.is_whole and self._endings.is_outdated(group)
        if stale:
            actions += self._endings.drop(group, "stale", "", again=True)
        else:
            scored = SampleScored(
                event.group, event.sample, event.reward, event.reason, event.parts
            )
            actions += self._endings.scored(scored)
        if group.task.episode is not None and group.task.episode.outside:
            # Its agent waits for this.
            actions.append(self._episodes.forget(group, event.sample, ended=not stale))
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
            actions += self._endings.drop(group, "result", fault)
        return actions

    def check(self) -> None:
        self._accepted.check()
        assert all(group.bad_results < BAD_RESULTS_MAX for group in self._groups)

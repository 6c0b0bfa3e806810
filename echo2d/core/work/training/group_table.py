"""The unfinished groups, and where each of their samples is: waiting, in one running lease, or kept.

    waiting --granted--> leased --answered--> kept
       ^                    |                  |
       +--- lease ended ----+--- not wanted ---+

    of an environment: leased --a turn ends--> parked --the environment answers--> waiting, or kept

If a late answer to an ended attempt counts, its sample is kept or parked, wherever it was before. A waiting sample may
already have tokens, and earlier turns. This module tracks samples and decides nothing.
Invariant: no sample is lost or in two places; every attempt ever granted for an unfinished group is known,
also after a restart, so that a late result finds its group.
Not here: which worker gets a lease, which results count, when a group is dropped.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from echo2d.core.base.ids import GroupId, LeaseId, PeerId, Version
from echo2d.core.protocol.control_messages import HeldLease, VersionKey
from echo2d.core.protocol.trajectory import (
    NOTHING,
    GroupRecord,
    Partial,
    StoredGroup,
    TrajectoryRecord,
)
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.episodes import Episode, Parked
from echo2d.core.work.events import LeaseGiven, unwritten
from echo2d.core.work.leases import TRAINING, Lease, LeaseTable
from echo2d.core.work.training.prompts import DrawnPrompt

# If this many leases of one sample failed or fell silent, its group is dropped for good.
LEASE_FAILURES_MAX = 8
# If this many workers sent malformed results of one group, it is dropped for good.
BAD_RESULTS_MAX = 3


@dataclass(frozen=True, slots=True)
class Waiting:
    """The tokens of a waiting sample."""

    partial: Partial
    until: float  # from then on it may be started over
    since: float  # when it was leased first
    worker: PeerId | None = None  # the worker that should continue it; None: any
    there_until: float = -math.inf  # until then it waits for a free slot at that worker


@dataclass(slots=True)
class OpenGroup:
    """One admitted group."""

    group: GroupId
    prompt: DrawnPrompt
    task: TaskRules
    waiting: set[int]
    # The accepted results by sample; a reward of NaN is not scored yet.
    kept: dict[int, TrajectoryRecord] = field(default_factory=dict)
    partials: dict[int, Waiting] = field(default_factory=dict)  # of waiting samples
    # Turns that the environment must answer.
    parked: dict[int, Parked] = field(default_factory=dict)
    # The earlier turns of samples that are not kept.
    episodes: dict[int, Episode] = field(default_factory=dict)
    # How many times each sample's episode was started over.
    begun_anew: Counter[int] = field(default_factory=Counter)
    given: dict[HeldLease, LeaseGiven] = field(default_factory=dict)  # every attempt
    # The ended attempts whose leases may have a next attempt.
    ended: list[HeldLease] = field(default_factory=list)
    running: dict[HeldLease, Lease] = field(default_factory=dict)  # the running leases
    # Kept samples that are given back as soon as they are scored.
    unwanted: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)  # samples that the group continues without
    # The seconds that each sample took, divided by the usual seconds of its worker (`Measurements.length`).
    took: list[float] = field(default_factory=list)
    # For each sample that was or will be given back, the workers that may not write it again.
    returned: dict[int, set[PeerId]] = field(default_factory=dict)
    moves: Counter[int] = field(default_factory=Counter)  # how often each sample has moved
    failures: Counter[int] = field(default_factory=Counter)  # how many leases of each sample failed
    # For each sample, how many leases in a row continued its partial and added nothing.
    fruitless: Counter[int] = field(default_factory=Counter)
    bad_results: dict[PeerId, int] = field(default_factory=dict)  # malformed results by worker
    # When the group had its first lease, or was recovered.
    begun: float = math.inf
    # The versions and the step for which the group's partials were found good (`partials`); None: a partial came
    # after this check.
    judged_at: tuple[int, Version] | None = None

    def stored(self) -> StoredGroup:
        """The group with the results that it has so far, in the order of samples."""
        trajectories = tuple(self.kept[sample] for sample in sorted(self.kept))
        prompt = self.prompt
        left_out = tuple(sorted(self.left_out))
        record = GroupRecord(
            self.group, prompt.tokens, trajectories, left_out, self.task.sampling, prompt.tags
        )
        return StoredGroup(record, prompt.cursor, prompt.source)

    def lengths(self) -> list[int]:
        """How many tokens were written of each sample with any; reported ones for unfinished samples."""
        kept = [kept.written for kept in self.kept.values() if kept.written]
        return [*kept, *self.unfinished_lengths()]

    def unfinished_lengths(self) -> list[int]:
        """How many tokens were reported of each sample that has any and is not kept."""
        unfinished = [waiting.partial.written for waiting in self.partials.values()]
        unfinished += [parked.turn.partial.written for parked in self.parked.values()]
        for lease in self.running.values():
            added = {
                sample: output.length
                for sample, output in lease.outputs.items()
                if output is not None
            }
            unfinished += [
                lease.given.base.written + added.get(sample, 0) for sample in lease.samples
            ]
        return [length for length in unfinished if length]

    @property
    def is_hopeless(self) -> bool:
        """Whether too many of the group's results were malformed."""
        bad = self.bad_results
        return len(bad) >= BAD_RESULTS_MAX or sum(bad.values()) >= LEASE_FAILURES_MAX

    @property
    def lacking(self) -> int:
        """A lower bound of how many samples are neither kept nor left out: the samples of a lease count as one."""
        return len(self.waiting) + len(self.running) + len(self.parked)

    def lacks(self) -> list[int]:
        """The samples that are neither kept nor left out."""
        leased = [sample for lease in self.running.values() for sample in lease.samples]
        return sorted([*self.waiting, *self.parked, *leased])

    def wait(self, sample: int, *, now: float) -> None:
        """Let a sample without tokens wait for a worker, or for an external agent."""
        if self.task.episode is not None and self.task.episode.outside:
            self.waiting.discard(sample)
            turn = unwritten(self.group, sample)
            self.parked[sample] = Parked(turn, now, turn.worker, None, now)
        else:
            self.waiting.add(sample)

    def offered(self) -> list[Parked]:
        """The turns of samples that wait for an external agent to begin."""
        return [parked for parked in self.parked.values() if not parked.turn.turn]

    @property
    def is_whole(self) -> bool:
        """Whether each sample is kept or left out."""
        return not (self.waiting or self.running or self.parked)

    def room(self, base: Partial) -> int:
        """How many tokens a turn may still have that continues from this base."""
        beyond = 0 if base is NOTHING else base.length - base.turn_start
        return self.task.max_new_tokens - beyond

    def is_answered(self, sample: int, base: Partial) -> bool:
        """Whether the sample already has a result for the turn of an attempt that continues from this base, or for a
        later turn.
        """
        if sample in self.kept or sample in self.left_out or sample in self.parked:
            return True
        if base.given or self.episodes:
            # If the attempt's earlier turns are not those of the present episode, they are of an episode that was given
            # back.
            episode = self.episodes.get(sample)
            return base.first(base.turn_start) != (NOTHING if episode is None else episode.partial)
        return False

    def lose_partial(self, sample: int) -> None:
        """Drop what a waiting sample has of an unfinished turn: the turn starts over."""
        self.partials.pop(sample, None)
        self.judged_at = None
        if (episode := self.episodes.get(sample)) is not None:
            self.partials[sample] = Waiting(episode.partial, math.inf, episode.since)

    def earlier(self) -> list[Partial]:
        """The earlier turns of samples that are not kept."""
        parked = [parked.turn.partial for parked in self.parked.values()]
        return parked + [episode.partial for episode in self.episodes.values()]

    def unscored(self) -> list[TrajectoryRecord]:
        """The accepted results without a reward."""
        return [kept for kept in self.kept.values() if math.isnan(kept.reward)]


@dataclass(slots=True)
class BetweenTurns:
    """How many samples no worker writes."""

    offered: int = 0  # samples that no external agent has begun
    parked: int = 0  # samples that wait for the environment
    waiting: int = 0  # samples that wait for a slot, with the environment's answer


class GroupTable:
    """See the module docstring. drawn: how many samples a group of a task has."""

    def __init__(self, drawn: Callable[[TaskRules], int], leases: LeaseTable) -> None:
        self._drawn = drawn
        self._leases = leases
        self._groups: dict[GroupId, OpenGroup] = {}
        # The number of groups of each task.
        self.by_task: Counter[str] = Counter()
        self._owners: dict[HeldLease, OpenGroup] = {}
        # The groups with waiting samples.
        self._waiting: set[GroupId] = set()
        # The groups that have all their results.
        self._whole: set[GroupId] = set()

    def __iter__(self) -> Iterator[OpenGroup]:
        """The groups in the order of admission. The table may change during the iteration."""
        return iter(list(self._groups.values()))

    def __len__(self) -> int:
        return len(self._groups)

    def waiting(self) -> list[OpenGroup]:
        """The groups with waiting samples, in the order of admission, which is that of group ids."""
        return [self._groups[group] for group in sorted(self._waiting)]

    def between_turns(self) -> dict[str, BetweenTurns]:
        """The samples of each task that are between two turns."""
        found: defaultdict[str, BetweenTurns] = defaultdict(BetweenTurns)
        for group in self._groups.values():
            of_task = found[group.task.name]
            offered = len(group.offered())
            of_task.offered += offered
            of_task.parked += len(group.parked) - offered
            of_task.waiting += sum(sample in group.waiting for sample in group.episodes)
        return found

    @property
    def whole(self) -> int:
        """The number of groups that have all their results."""
        return len(self._whole)

    def __getitem__(self, group: GroupId) -> OpenGroup:
        return self._groups[group]

    def get(self, group: GroupId) -> OpenGroup | None:
        return self._groups.get(group)

    def owner(self, peer: PeerId, key: HeldLease, sample: int) -> OpenGroup | None:
        """The group of this attempt, if the attempt gave this sample to this worker.

        The attempt may have ended.
        """
        group = self._owners.get(key)
        if group is None:
            return None
        given = group.given[key]
        return group if given.worker == peer and sample in given.samples else None

    def wanted(self, peer: PeerId, key: HeldLease) -> LeaseGiven | None:
        """This attempt, if it is this worker's and some of its samples have no result yet."""
        group = self._owners.get(key)
        given = None if group is None else group.given[key]
        if (
            group is None
            or given is None
            or given.worker != peer
            or all(group.is_answered(sample, given.base) for sample in given.samples)
        ):
            return None
        return given

    def fits_rules(self, group: OpenGroup, given: LeaseGiven) -> bool:
        """Whether an attempt fits the rules; before a restart the rules may have been others."""
        has_room = given.base is NOTHING or group.room(given.base) > 0
        return has_room and max(given.samples) < self._drawn(group.task)

    def add(self, group: OpenGroup) -> None:
        self._groups[group.group] = group
        self.by_task[group.task.name] += 1
        self._note(group)

    def remove(self, group: OpenGroup) -> list[Lease]:
        """Remove a finished or dropped group; returns its running leases, which the caller ends."""
        del self._groups[group.group]
        self.by_task[group.task.name] -= 1
        self._waiting.discard(group.group)
        self._whole.discard(group.group)
        for key in group.given:
            del self._owners[key]
        return list(group.running.values())

    def grant(
        self,
        group: OpenGroup,
        worker: PeerId,
        served: VersionKey,
        samples: Sequence[int],
        *,
        now: float,
    ) -> Lease:
        """Lease waiting samples, as the next attempt of an ended lease if there is one.

        A sample that has tokens is leased alone, and continues from them.
        """
        assert group.waiting.issuperset(samples)
        assert len(samples) == 1 or group.partials.keys().isdisjoint(samples)
        waiting = group.partials.pop(samples[0], None)
        base = NOTHING if waiting is None else waiting.partial
        lease = self._leases.start(
            group.ended.pop() if group.ended else None,
            group.group,
            worker,
            served,
            samples,
            base,
            room=group.room(base),
            since=now if waiting is None else waiting.since,
            now=now,
        )
        group.begun = min(group.begun, now)
        self._know(group, lease.given)
        self._take_up(group, lease)
        return lease

    def recover(
        self,
        group: OpenGroup,
        given: Sequence[LeaseGiven],
        runs: Callable[[LeaseGiven], bool],
        *,
        now: float,
    ) -> None:
        """Take in the attempts from before a restart, in the order in which they were granted.

        The newest attempt of each lease runs again with the samples that no later lease took over,
        if `runs` agrees.
        """
        group.begun = now
        holder: dict[int, LeaseGiven] = {}
        newest: dict[LeaseId, LeaseGiven] = {}
        for attempt in given:
            self._know(group, attempt)
            newest[attempt.lease] = attempt
            holder.update(dict.fromkeys(attempt.samples, attempt))
        for attempt in newest.values():
            samples = [
                each
                for each in attempt.samples
                if holder[each] is attempt
                and each in group.waiting
                and not group.is_answered(each, attempt.base)
            ]
            if samples and runs(attempt):
                for sample in samples:
                    group.partials.pop(sample, None)
                self._resume(group, attempt, samples, now)

    def revive(self, given: LeaseGiven, *, now: float) -> None:
        """A worker came back with an ended attempt: it runs again with its waiting samples."""
        group = self._owners[given.key]
        # Samples that were given back are left out: this worker has answered them, and may not answer again.
        samples = [
            sample
            for sample in group.waiting.intersection(given.samples).difference(group.returned)
            if not group.is_answered(sample, given.base)
        ]
        if samples and given.key in group.ended:
            group.ended.remove(given.key)
            for sample in samples:
                group.partials.pop(sample, None)
            self._resume(group, given, samples, now)

    def keep(self, group: OpenGroup, record: TrajectoryRecord) -> Lease | None:
        """Keep the result of a sample. Returns its lease if this was the lease's last open sample."""
        group.kept[record.sample] = record
        group.episodes.pop(record.sample, None)
        return self._take(group, record.sample)

    def park(self, group: OpenGroup, parked: Parked) -> Lease | None:
        """Park a sample whose turn has ended. Returns its lease if this was the lease's last open sample."""
        ended = self._take(group, parked.turn.sample)
        group.parked[parked.turn.sample] = parked
        self._note(group)
        return ended

    def go_on(self, group: OpenGroup, sample: int, episode: Episode, waiting: Waiting) -> None:
        """The environment has answered the turn of a parked sample: it waits for the next one."""
        del group.parked[sample]
        group.episodes[sample], group.partials[sample] = episode, waiting
        group.judged_at = None
        group.waiting.add(sample)
        self._note(group)

    def begin_anew(self, group: OpenGroup, sample: int, *, now: float) -> None:
        """Forget the episode of a waiting or parked sample, which then waits for its first turn."""
        group.episodes.pop(sample, None)
        group.partials.pop(sample, None)
        group.parked.pop(sample, None)
        group.begun_anew[sample] += 1
        group.wait(sample, now=now)
        self._note(group)

    def give_back(self, group: OpenGroup, sample: int, *, now: float) -> None:
        """Give a kept sample back: it waits for a worker other than those in `returned`."""
        del group.kept[sample]
        group.begun_anew[sample] += 1
        group.unwanted.discard(sample)
        group.wait(sample, now=now)
        self._note(group)

    def leave_out(self, group: OpenGroup, sample: int) -> Lease | None:
        """Continue the group without this sample. Returns its lease if this was the lease's last open sample."""
        group.left_out.add(sample)
        group.episodes.pop(sample, None)
        if group.kept.pop(sample, None) is not None:
            return None
        return self._take(group, sample)

    def put_back(self, group: OpenGroup, key: HeldLease, sample: int) -> None:
        """A result of this attempt was useless: its sample waits again.

        Nothing changes if another lease has the sample, or if it is kept.
        """
        lease = group.running.get(key)
        if lease is not None and sample in lease.samples:
            if self._take(group, sample) is not None:
                group.ended.append(key)
            group.waiting.add(sample)
            group.lose_partial(sample)
            self._note(group)

    def ended(self, lease: Lease) -> OpenGroup:
        """An attempt has ended: its open samples wait. Returns its group."""
        group = self._groups[lease.given.group]
        del group.running[lease.key]
        group.ended.append(lease.key)
        group.waiting.update(lease.samples)
        self._note(group)
        return group

    def _know(self, group: OpenGroup, given: LeaseGiven) -> None:
        key = given.key
        group.given[key], self._owners[key] = given, group

    def _resume(
        self, group: OpenGroup, given: LeaseGiven, samples: Sequence[int], now: float
    ) -> None:
        room = group.room(given.base)
        self._take_up(group, self._leases.resume(given, samples, room=room, now=now))

    def _take_up(self, group: OpenGroup, lease: Lease) -> None:
        group.waiting -= lease.samples
        group.running[lease.key] = lease
        self._note(group)

    def _take(self, group: OpenGroup, sample: int) -> Lease | None:
        group.waiting.discard(sample)
        group.partials.pop(sample, None)
        group.parked.pop(sample, None)
        ended = None
        for lease in group.running.values():
            if sample in lease.samples:
                ended = lease if self._leases.answer(lease, sample) else None
                break
        if ended is not None:
            del group.running[ended.key]
        self._note(group)
        return ended

    def _note(self, group: OpenGroup) -> None:
        """Record that the waiting or the kept samples of this group have changed."""
        (self._waiting.add if group.waiting else self._waiting.discard)(group.group)
        lacks = group.waiting or group.running or group.parked
        (self._whole.discard if lacks else self._whole.add)(group.group)

    def check(self) -> None:
        running: dict[HeldLease, Lease] = {}
        for group in self._groups.values():
            places = sorted([*group.lacks(), *group.kept, *group.left_out])
            drawn = self._drawn(group.task)
            assert places == list(range(drawn)), "a sample is lost or in two places"
            assert group.partials.keys() <= group.waiting
            assert group.waiting & group.episodes.keys() <= group.partials.keys()
            assert group.episodes.keys() <= set(group.lacks())
            assert group.unwanted <= group.kept.keys()
            assert all(group.given[key] is lease.given for key, lease in group.running.items())
            running |= group.running
        assert list(self._groups) == sorted(self._groups)
        assert +self.by_task == Counter(group.task.name for group in self._groups.values())
        assert self._waiting == {group.group for group in self._groups.values() if group.waiting}
        assert self._whole == {
            number for number, group in self._groups.items() if not group.lacking
        }
        assert running == {lease.key: lease for lease in self._leases if lease.kind == TRAINING}
        assert self._owners == {
            key: group for group in self._groups.values() for key in group.given
        }

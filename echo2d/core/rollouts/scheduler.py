"""Granting: which samples go to which worker, and when: the engines are kept full.

    waiting samples --place--> leased to workers with room: newest version first, then most room
    no sample waits --prompt--> a new group, all of it leased at once

A sample that has tokens goes on alone, at a worker of the version that wrote its last one or a newer one; after a while
at any, from its beginning. The others of a group are placed together, or not at all.
Not here: what comes back (`groups`), where the samples of a group are (`group_table`), what one has (`partials`).
"""

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.events import Persist, Send
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.protocol.control_messages import LeaseGranted
from echo2d.core.rollouts.events import LeaseGiven, PromptTaken, RolloutAction
from echo2d.core.rollouts.group_table import GroupTable, OpenGroup
from echo2d.core.rollouts.leases import LeaseTable
from echo2d.core.rollouts.partials import Partials
from echo2d.core.rollouts.placement import place
from echo2d.core.rollouts.prompts import Prompts
from echo2d.core.rollouts.staleness import Staleness
from echo2d.core.rollouts.worker_ranking import WorkerChoice, WorkerRanking


class LeaseScheduler:
    """See the module docstring. `now` is monotonic seconds. lent: the gateway's leases, whose slots are not there."""

    def __init__(
        self,
        rules: RunRules,
        next_group: GroupId,
        *,
        prompts: Prompts,
        groups: GroupTable,
        leases: LeaseTable,
        lent: LeaseTable,
        partials: Partials,
        members: Membership,
        versions: PublishedVersions,
        staleness: Staleness,
        statistics: Statistics,
    ) -> None:
        self._rules = rules
        self._next_group = next_group
        self._prompts = prompts
        self._groups = groups
        self._leases = leases
        self._lent = lent
        self._partials = partials
        self._members = members
        self._versions = versions
        self._staleness = staleness
        self._statistics = statistics
        self._ranking = WorkerRanking()
        self._patient_until: float | None = None  # a partial has waited for long enough
        self._no_room_from: Version | None = None  # now, for what needs this version or a newer one

    @property
    def slots(self) -> int:
        """Of all alive workers."""
        return self._ranking.slots

    @property
    def free_slots(self) -> int:
        """Of those that have rested and serve a version."""
        return self._ranking.free

    @property
    def changes(self) -> int:
        """One more whenever a worker is another than before."""
        return self._ranking.changes

    def wake_at(self) -> float | None:
        """When a worker has rested, or a partial has waited for long enough."""
        return min(
            (at for at in (self._ranking.wake_at(), self._patient_until) if at is not None),
            default=None,
        )

    def fill(self, *, now: float) -> list[RolloutAction]:
        """Grant what may be granted: waiting samples first, then new groups."""
        actions: list[RolloutAction] = []
        waiting = self._groups.waiting()
        self._patient_until = self._partials.forget(
            [group for group in waiting if group.partials], now=now
        )
        self._no_room_from = None
        for group in waiting:
            if group.partials:
                actions += self._go_on(group, now)
            if group.waiting.difference(group.partials):
                actions += self._grant(group, self.rooms(self._staleness.oldest, now), now)
            if not self._ranking.free:
                break  # for they may be many
        return [*actions, *self._admit(now)]

    def rooms(self, oldest: Version, now: float) -> WorkerChoice:
        """The workers that may write for a group, best first: newest version, then most room."""
        self.refresh(now=now)
        return self._ranking.choose(oldest, self._versions.live)

    def refresh(self, *, now: float) -> None:
        """Take note of what has changed of the workers and of what they hold."""
        self._ranking.rested(now=now)
        measurements = self._statistics.measurements
        for worker in self._members.changed | self._leases.changed | self._lent.changed:
            peer = self._members.get(worker)
            load = self._leases.load(worker)
            self._ranking.refresh(worker, peer, load, self._lent.load(worker))
            if peer is not None and peer.kind == "worker":
                measurements.holds(worker, peer.slots, load, now=self._statistics.now)
        for changed in (self._members.changed, self._leases.changed, self._lent.changed):
            changed.clear()

    def free(self, worker: PeerId) -> int:
        """Its free slots, as far as changes have been taken note of."""
        return self._ranking.free_of(worker)

    def check(self) -> None:
        self._ranking.check(self._members, self._leases.load, self._lent.load)

    # --- inside

    def _admit(self, now: float) -> list[RolloutAction]:
        actions: list[RolloutAction] = []
        samples = range(self._rules.group_size)
        while True:
            rooms = self.rooms(self._staleness.oldest_start(len(self._groups)), now)
            if not place(samples, rooms):
                return actions
            prompt = self._prompts.take()
            if prompt is None:
                return actions
            group = OpenGroup(self._next_group, prompt, set(samples))
            self._next_group = GroupId(self._next_group + 1)
            self._groups.add(group)
            actions.append(Persist(PromptTaken(group.group, prompt.cursor, prompt.tokens)))
            actions += self._grant(group, rooms, now)

    def _go_on(self, group: OpenGroup, now: float) -> list[RolloutAction]:
        """Lease each waiting sample that has tokens to a worker that may go on from them, where there is one."""
        actions: list[RolloutAction] = []
        for sample, waiting in sorted(group.partials.items()):
            oldest = self._staleness.oldest
            placed = self._place_one(sample, max(oldest, waiting.partial.version_last), now)
            if not placed and now >= waiting.until and self._place_one(sample, oldest, now):
                del group.partials[
                    sample
                ]  # it has waited for long, and there is somebody who can begin it anew
            actions += self._lease(group, placed, now)
        return actions

    def _place_one(
        self, sample: int, oldest: Version, now: float
    ) -> list[tuple[PeerId, tuple[int, ...]]]:
        if self._no_room_from is not None and oldest >= self._no_room_from:
            return []
        placed = place([sample], self.rooms(oldest, now))
        if not placed:
            self._no_room_from = oldest
        return placed

    def _grant(self, group: OpenGroup, rooms: WorkerChoice, now: float) -> list[RolloutAction]:
        """Lease all samples that wait with nothing, if there is room for all of them."""
        return self._lease(
            group, place(sorted(group.waiting.difference(group.partials)), rooms), now
        )

    def _lease(
        self, group: OpenGroup, placed: list[tuple[PeerId, tuple[int, ...]]], now: float
    ) -> list[RolloutAction]:
        actions: list[RolloutAction] = []
        for worker, samples in placed:
            peer = self._members.get(worker)
            assert peer is not None
            assert peer.session is not None
            assert peer.serving is not None
            given = self._groups.grant(group, worker, peer.serving, samples, now=now).given
            self._statistics.handed_over(given.base.length)
            actions += [Persist(given), Send(peer.session, self._grant_message(group, given))]
        return actions

    def _grant_message(self, group: OpenGroup, given: LeaseGiven) -> LeaseGranted:
        rules, base = self._rules, given.base
        return LeaseGranted(
            given.lease,
            given.attempt,
            group.group,
            group.prompt.tokens + base.tokens,
            given.samples,
            rules.max_new_tokens - base.length,
            rules.temperature,
            rules.top_p,
            rules.stop_token_ids,
            max(self._staleness.oldest, base.version_last),
            rules.lease_silence_s,
        )

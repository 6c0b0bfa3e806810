"""Decides which samples move to a faster worker, because their whole group waits for them.

    a sample is kept --> its group lacks at most half --> the end of each missing sample is predicted
                                                                  |
    a faster worker has a free slot --takes, with its tokens, the one that will have taken longest-->

The slot that a sample leaves takes the next sample, so no slot is idle: long answers end at fast workers, and new
answers begin at slow ones. A worker's speed is its rate per slot with all slots leased; lengths are predicted
(`answer_lengths`).
Not here: ending the lease and granting the next one (`groups`, `group_work`).
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import PROGRESS_S, HeldLease
from echo2d.core.work.leases import Lease, LeaseTable
from echo2d.core.work.ranking import FreeSlots
from echo2d.core.work.training.answer_lengths import AnswerLengths
from echo2d.core.work.training.group_table import GroupTable, OpenGroup

# A sample moves only if this saves at least this share of its remaining time, and PROGRESS_S seconds, because tokens
# that its worker has not reported yet are written again.
_GAIN_MIN = 0.25
# A sample moves at most this many times.
MOVES_MAX = 4
# All late samples are judged again after this share of a sample's usual time, but not more often than every second.
JUDGED_SHARE = 0.1
JUDGED_S_MIN = 1.0


class Late(NamedTuple):
    """A lease that a group waits for."""

    whole_s: float  # the seconds from its beginning to its end, if it stays where it is
    lease: HeldLease
    left_s: float  # the seconds of these that are left
    speed: float  # of its worker


class Move(NamedTuple):
    lease: Lease
    worker: PeerId


class Stragglers:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        parts: RunParts,
        *,
        groups: GroupTable,
        leases: LeaseTable,
    ) -> None:
        rules = parts.rules
        # By task: a group that lacks this many samples or fewer waits for its last samples. The limit is
        # half of the group's samples, and at least one.
        self._lacks_max = {
            task.name: max(1, int(rules.drawn(task) * 0.5))
            if rules.group_size > 1 and rules.move_stragglers
            else 0
            for task in rules.tasks
        }
        self._size = rules.group_size
        self._groups, self._leases = groups, leases
        self._members, self._versions = parts.members, parts.versions
        self._measurements = parts.statistics.measurements
        self._lengths = {task.name: AnswerLengths() for task in rules.tasks}
        # The groups that lack few samples; ended ones are forgotten at the next judgement.
        self._waiting: dict[GroupId, None] = {}
        self._late: list[Late] = []
        self._judge_at = 0.0
        # The speed of each worker.
        self._speeds: dict[PeerId, float] = {}
        # How many times the rates had been settled when the speeds were computed.
        self._settled = -1
        # Other workers are much faster than a worker below this speed.
        self._fast = 0.0

    def kept(self, group: OpenGroup) -> None:
        """Record that one more sample of the group is kept."""
        # If a lease has several samples, more samples may be missing than `lacking` counts.
        lacking = group.lacking
        if 0 < lacking <= self._lacks_max[group.task.name]:
            self._waiting[group.group] = None

    def complete(self, group: OpenGroup) -> None:
        """Take in the lengths of a group that has all its samples."""
        lengths = [kept.written for kept in group.kept.values()]
        self._lengths[group.task.name].finished(group.prompt.source.row, lengths)

    def waited_for(self) -> Iterator[tuple[OpenGroup, Lease, float]]:
        """The running leases of waiting groups at workers that are much slower than others: (group, lease, the
        worker's speed).
        """
        fast = self._fast
        # At most 1,024 groups are judged, those that have waited longest first.
        for number in islice(self._waiting, 1024):
            group = self._groups.get(number)
            for lease in () if group is None else group.running.values():
                speed = self._speeds.get(lease.given.worker, fast)
                if group is not None and speed < fast:
                    yield group, lease, speed

    def wake_at(self) -> float | None:
        """When samples must be judged again. Possibly nothing else happens before the last sample ends."""
        return self._judge_at if self._waiting else None

    def any_late(self, *, now: float) -> bool:
        """Whether a sample would end much sooner elsewhere, if a slot there were free."""
        if self._waiting and now >= self._judge_at:
            self._judge(now)
        return bool(self._late)

    def moves(self, free: Iterable[FreeSlots]) -> list[Move]:
        """Which leases end now, and which workers continue their samples. free: the workers with free slots."""
        # At most this many workers with free slots are looked at.
        some = islice(free, 32)
        faster = [(self._speeds.get(each.worker, 0.0), each) for each in some]
        found: list[Move] = []
        for speed, each in sorted(faster, key=lambda pair: -pair[0]):
            found += self._moves_to(each, speed) if speed else []
        return found

    # --- inside

    def _judge(self, now: float) -> None:
        usual = self._measurements.t_gen.estimate
        self._judge_at = now + max(JUDGED_S_MIN, JUDGED_SHARE * (usual.value if usual else 0.0))
        if self._settled != self._measurements.settled:
            self._settled = self._measurements.settled
            self._learn_speeds()
        if min(self._speeds.values(), default=0.0) >= self._fast:
            self._waiting.clear()  # all workers are about equally fast
        for number in [each for each in self._waiting if self._groups.get(each) is None]:
            del self._waiting[number]
        self._late = sorted(
            (
                Late(now - lease.since + left_s, lease.key, left_s, speed)
                for group, lease, speed in self.waited_for()
                if (left_s := self._left_s(group, lease, speed))
            ),
            reverse=True,
        )

    def _left_s(self, group: OpenGroup, lease: Lease, speed: float) -> float:
        """Seconds that the lease still takes there; 0: its worker has reported nothing, or it has moved too often."""
        lengths = self._lengths[group.task.name]
        told, moves = lease.longest, group.moves
        written = lease.given.base.written + min([told.get(sample, 0) for sample in lease.samples])
        moved = max([moves.get(sample, 0) for sample in lease.samples])
        if not written or not lengths.answers or moved >= MOVES_MAX:
            return 0.0
        siblings = [len(kept.tokens) // 4 for kept in group.kept.values()]
        left = lengths.left(written, group.prompt.source.row, siblings)
        # A slot makes `speed` answers of mean length per second.
        return left / lengths.mean / speed

    def _moves_to(self, free: FreeSlots, speed: float) -> list[Move]:
        found: list[Move] = []
        room, version = free.free, self._version(self._members.get(free.worker))
        # Of each worker, the latest 32 samples are looked at.
        for late in self._late[:32]:
            gain = 1.0 - late.speed / speed
            if gain < _GAIN_MIN or gain * late.left_s < PROGRESS_S:
                continue
            lease = self._leases.get(late.lease)
            if lease is None or len(lease.samples) > room:
                continue
            # A sample is continued by its last version or a newer one.
            if version >= self._version(self._members.get(lease.worker)):
                found.append(Move(lease, free.worker))
                room -= len(lease.samples)
                if not room:
                    break
        if found:
            moved = {move.lease.key for move in found}
            self._late = [late for late in self._late if late.lease not in moved]
        return found

    def _learn_speeds(self) -> None:
        """Compute the answers/s per slot of each worker whose rate is known.

        Each rate is moved towards the mean of all: further if its error is larger, and completely if the rates differ
        no more than their errors. Among many equal workers, some look slow and some fast by chance.
        """
        known: list[tuple[PeerId, float, float]] = []
        for peer in self._members:
            slots = self._measurements.slots(peer.peer) if peer.service.active and peer.alive else 0
            if slots and (rate := self._measurements.rate(peer.peer)) is not None:
                # The rate's error counts a group as one result; here the samples of a group come one by one.
                off = (rate.sd / rate.value) ** 2 / self._size
                known.append((peer.peer, math.log(rate.value / slots), off))
        if not known:
            return
        logs = [each for _, each, _ in known]
        mean = sum(logs) / len(known)
        errors = sum([off for _, _, off in known]) / len(known)
        real = max(0.0, sum([(each - mean) ** 2 for each in logs]) / len(known) - errors)
        self._speeds = {
            worker: math.exp(mean + (each - mean) * real / (real + off))
            for worker, each, off in known
        }
        self._fast = (1.0 - _GAIN_MIN) * max(self._speeds.values())

    def _version(self, peer: Peer | None) -> int:
        record = None if peer is None else self._versions.live(peer.engine.serving)
        return -1 if record is None else record.version

"""Which weights of clients the workers hold, and as which versions.

    waited for --others make room--> published as a version --> held --> makes room

A *snapshot* is the weights in one folder, or the base model. Workers hold HELD_MAX adapters at a time beside the base,
or as many as they can, and draw from all of them at once. Whole weights are held alone. When a snapshot is wanted and
there is no room, the one whose last use is longest ago goes, if nothing is drawn from it and nothing waits for it. If
all are in use, the one that came to the workers first goes: after SNAPSHOT_SWITCH_S nothing more of it is begun. So of
many snapshots each has its turn: callers take turns, and of one caller's snapshots the one that waits longest is next.
A snapshot that comes again is published as a new version with the same bytes.

Nothing is drawn from a version before a worker holds it, and none is published before the one before has come to one:
workers skip a version when a newer one is there.
Not here: the samples themselves (`draw_queue`), how many are drawn at once (`samplers`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import Send
from echo2d.core.tinker.draw_queue import AskedSample, DrawQueue

# Each takes the memory of an adapter in every engine.
HELD_MAX = 4
SNAPSHOT_SWITCH_S = 20.0
# When a worker has a version, the next version waits until all workers have it, but at most this long.
SPREAD_S_MAX = 5.0
# When a version has been sent and no worker holds it, workers have this long to load it.
LOAD_S_MAX = 120.0


class HoldingWorkers(Protocol):
    """What workers hold, as `cluster.holding.Holding` says it."""

    @property
    def room(self) -> int: ...

    def hold(self, versions: Sequence[Version]) -> Sequence[Send]: ...

    def spread(self, version: Version) -> bool: ...

    def arrived(self, version: Version) -> bool: ...

    def coming(self, version: Version) -> bool: ...

    def possible(self, version: Version) -> bool: ...


@dataclass(slots=True)
class _Held:
    version: Version
    # When it came to a worker; before, when it was last seen on its way.
    since: float
    whole: bool
    used: int  # when it was used last, in turns
    arrived: bool = False


class HeldSnapshots:
    """See the module docstring. `now` is monotonic seconds.

    queue: the samples that wait to be drawn. prompts: those whose prompts wait to be read.
    """

    def __init__(self, queue: DrawQueue, prompts: DrawQueue, workers: HoldingWorkers) -> None:
        self._queue, self._prompts, self._workers = queue, prompts, workers
        # Whether workers read prompts, too.
        self.reads = False
        # By folder, in the order in which they were published.
        self._held: dict[str, _Held] = {}
        # How many samples workers draw from each version, and how many prompts they read.
        self._under_way = Counter[Version]()
        # Whether the one that is published next is whole.
        self._whole_comes = False
        # When each caller had its last turn.
        self._turns = Counter[str]()
        self._turn = 0

    @property
    def versions(self) -> Mapping[str, Version]:
        """By folder. The last one is the one that was published last."""
        return {folder: each.version for folder, each in self._held.items()}

    @property
    def whole(self) -> bool:
        """Whether the workers hold full weights, and so no other ones."""
        return any(each.whole for each in self._held.values())

    def open_to(self, *, now: float) -> Mapping[str, Version]:
        """From which folders samples may be begun, and as which versions."""
        self.look(now=now)
        closed = self._making_room(self._next()) if self._switches(now) else []
        return {
            folder: each.version
            for folder, each in self._held.items()
            if each.arrived and folder not in closed
        }

    def begun(self, folder: str) -> None:
        """A sample from this folder is begun, or its prompt."""
        held = self._held[folder]
        self._turn += 1
        held.used = self._turn
        self._under_way[held.version] += 1

    def ended(self, version: Version) -> None:
        """Workers are done with a sample from this version, or with its prompt."""
        self._under_way[version] -= 1
        if not self._under_way[version]:
            del self._under_way[version]

    def look(self, *, now: float) -> None:
        """See which versions have come to workers, and forget those that no worker can hold any more."""
        workers = self._workers
        for folder, each in list(self._held.items()):
            if not workers.possible(each.version):
                del self._held[folder]
            elif not each.arrived:
                each.arrived = workers.arrived(each.version)
                if each.arrived or workers.coming(each.version):
                    each.since = now

    def wanted(self, *, now: float) -> str | None:
        """The folder to publish next; None: there is none, or the others are in use."""
        self.look(now=now)
        folder = self._next()
        going = self._making_room(folder)
        used = [each for each in going if not self._idle(each)]
        if (
            any(self._under_way[self._held[each].version] for each in going)
            or (used and not self._switches(now))
            or self._spreads_until(going) > now
        ):
            return None
        return folder

    def make_room(self, folder: str) -> list[Version]:
        """This folder is published now. Returns the versions that stay beside it."""
        self._whole_comes = self._whole(folder)
        # Now, and not when it is published: a caller that cancels meanwhile has had its turn.
        self._turn += 1
        for waiting in self._firsts(folder):
            self._turns[waiting.sampler.caller] = self._turn
        for each in self._making_room(folder):
            del self._held[each]
        return [each.version for each in self._held.values()]

    def published(self, folder: str, version: Version, *, now: float) -> None:
        self._turn += 1
        self._held[folder] = _Held(version, now, self._whole_comes, self._turn)

    def lost(self, version: Version) -> None:
        """No worker holds this version any more."""
        self._held = {
            folder: each for folder, each in self._held.items() if each.version != version
        }

    def wake_at(self, now: float) -> float | None:
        """When `open_to` or `wanted` change by time alone. What could not be done then waits for another event."""
        going = self._making_room(self._next())
        times = (self._switch_at(), self._spreads_until(going))
        return min((at for at in times if at is not None and at > now), default=None)

    # --- inside

    def _next(self) -> str | None:
        """The folder that is published next, of those that are not held."""
        waiting = [
            (self._turns[each.sampler.caller], each.since, place, folder)
            for place, folder in enumerate(self._lacking())
            for each in self._firsts(folder)
        ]
        return min(waiting)[3] if waiting else None

    def _queues(self) -> tuple[DrawQueue, ...]:
        """The queues of what waits for workers."""
        return (self._queue, self._prompts) if self.reads else (self._queue,)

    def _lacking(self) -> Iterator[str]:
        """The folders that are waited for and are not held."""
        folders = dict.fromkeys(folder for queue in self._queues() for folder in queue.folders)
        return (each for each in folders if each not in self._held)

    def _firsts(self, folder: str) -> Iterator[AskedSample]:
        """What waits first for this folder, of each caller."""
        for queue in self._queues():
            yield from (queue.first(folder, caller) for caller in queue.callers(folder))

    def _whole(self, folder: str) -> bool:
        """Whether these are the weights of a whole model, for which a sample waits."""
        return any(each.sampler.whole for each in self._firsts(folder))

    def _making_room(self, folder: str | None) -> list[str]:
        """Those that are held and must go before this folder can be held."""
        if folder is None:
            return []
        if self._whole(folder) or self.whole:
            return list(self._held)
        if len(self._held) < min(HELD_MAX, self._workers.room):
            return []
        idle = [each for each in self._held if self._idle(each)]
        if idle:
            return [min(idle, key=lambda each: self._held[each].used)]
        return [min(self._held, key=lambda each: self._since(self._held[each]))]

    def _idle(self, folder: str) -> bool:
        drawn = self._under_way[self._held[folder].version]
        return not drawn and not any(folder in queue.folders for queue in self._queues())

    def _switches(self, now: float) -> bool:
        at = self._switch_at()
        return at is not None and at <= now

    def _switch_at(self) -> float | None:
        """When those in use must make room for the next one; None: none must."""
        going = self._making_room(self._next())
        used = [self._since(self._held[each]) for each in going if not self._idle(each)]
        if not used:
            return None
        since = min(each.since for folder in self._lacking() for each in self._firsts(folder))
        return max(since, *used) + SNAPSHOT_SWITCH_S

    def _since(self, held: _Held) -> float:
        """When its turn began, or begins at the latest."""
        return held.since if held.arrived else held.since + LOAD_S_MAX

    def _spreads_until(self, going: list[str]) -> float:
        """Until when the next version waits for workers that lack the one before."""
        newest = next(reversed(self._held), None)
        if newest is None or newest in going:
            return -math.inf
        held = self._held[newest]
        if held.arrived and self._workers.spread(held.version):
            return -math.inf
        return self._since(held) + SPREAD_S_MAX

    def check(self) -> None:
        assert len(self._held) <= HELD_MAX
        assert len(self._held) <= 1 or not self.whole
        assert all(count > 0 for count in self._under_way.values())

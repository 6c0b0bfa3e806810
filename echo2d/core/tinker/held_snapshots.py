"""Which weights of clients the workers hold, and as which versions.

    waited for --others make room--> published as a version --> held --> makes room

A *snapshot* is the weights in one folder, or the base model. Workers hold HELD_MAX adapters at a time beside the base,
and draw from all of them at once. Whole weights are held alone. When a snapshot is wanted and there is no room, the one
whose last use is longest ago goes, if nothing is drawn from it and nothing waits for it. If all are in use, the
one that was published first goes: after SNAPSHOT_SWITCH_S nothing more of it is begun. So of many snapshots each has
its turn: callers take turns, and of one caller's snapshots the one that waits longest is next. A snapshot that comes
again is published as a new version with the same bytes.
Not here: the samples themselves (`draw_queue`), how many are drawn at once (`samplers`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from echo2d.core.base.ids import Version
from echo2d.core.tinker.draw_queue import AskedSample, DrawQueue

# Each takes the memory of an adapter in every engine.
HELD_MAX = 4
SNAPSHOT_SWITCH_S = 20.0
# So long a new version may be on its way to the last worker before the next one follows: workers skip a version when a
# newer one is there.
SPREAD_S_MAX = 5.0


@dataclass(slots=True)
class _Held:
    version: Version
    since: float
    whole: bool
    used: int  # when it was used last, in turns


class HeldSnapshots:
    """See the module docstring. `now` is monotonic seconds.

    queue: the samples that wait to be drawn. prompts: those whose prompts wait to be read. spread: whether all workers
    that can hold a version do.
    """

    def __init__(
        self, queue: DrawQueue, prompts: DrawQueue, spread: Callable[[Version], bool]
    ) -> None:
        self._queue, self._prompts, self._spread = queue, prompts, spread
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
        closed = self._making_room(self._next()) if self._switches(now) else []
        return {folder: at for folder, at in self.versions.items() if folder not in closed}

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

    def wanted(self, *, now: float) -> str | None:
        """The folder to publish next; None: there is none, or the others are in use."""
        folder = self._next()
        going = self._making_room(folder)
        used = [each for each in going if not self._idle(each)]
        if (
            any(self._under_way[self._held[each].version] for each in going)
            or (used and not self._switches(now))
            or (self._spreads_until(going) or now) > now
        ):
            return None
        return folder

    def make_room(self, folder: str) -> list[Version]:
        """This folder is published now. Returns the versions that stay beside it."""
        self._whole_comes = self._whole(folder)
        for each in self._making_room(folder):
            del self._held[each]
        return [each.version for each in self._held.values()]

    def published(self, folder: str, version: Version, *, now: float) -> None:
        self._turn += 1
        self._held[folder] = _Held(version, now, self._whole_comes, self._turn)
        for waiting in self._firsts(folder):
            self._turns[waiting.sampler.caller] = self._turn

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
        """Of what waits for workers."""
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
        if len(self._held) < HELD_MAX:
            return []
        idle = [each for each in self._held if self._idle(each)]
        return [
            min(idle, key=lambda each: self._held[each].used) if idle else next(iter(self._held))
        ]

    def _idle(self, folder: str) -> bool:
        drawn = self._under_way[self._held[folder].version]
        return not drawn and not any(folder in queue.folders for queue in self._queues())

    def _switches(self, now: float) -> bool:
        at = self._switch_at()
        return at is not None and at <= now

    def _switch_at(self) -> float | None:
        """When those in use must make room for the next one; None: none must."""
        going = self._making_room(self._next())
        used = [self._held[each].since for each in going if not self._idle(each)]
        if not used:
            return None
        since = min(each.since for folder in self._lacking() for each in self._firsts(folder))
        return max(since, *used) + SNAPSHOT_SWITCH_S

    def _spreads_until(self, going: list[str]) -> float | None:
        """Until when the next version waits for workers that lack the one before; None: it need not."""
        newest = next(reversed(self._held), None)
        if newest is None or newest in going or self._spread(self._held[newest].version):
            return None
        return self._held[newest].since + SPREAD_S_MAX

    def check(self) -> None:
        assert len(self._held) <= HELD_MAX
        assert len(self._held) <= 1 or not self.whole
        assert all(count > 0 for count in self._under_way.values())

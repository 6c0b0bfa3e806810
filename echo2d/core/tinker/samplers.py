"""The samplers of clients: each draws from the weights that it was opened with, for as long as it lives.

    asked [--> prompt scored] --> waits --weights held--> drawn by workers [--> scored by the learner] --> ended
                                    ^                          |
                                    +--- a worker was lost ----+

Of the samples whose weights workers hold, one of the caller for whom the fewest sequences are drawn is next. A prompt
is scored by the learner, or by a worker that may read it and holds the weights, whichever is free first.
Not here: which workers may read prompts (`prompt_orders`), which weights are held (`held_snapshots`), who may use a
sampler (`service`), workers (`core/work/calls`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from echo2d.core.base.ids import Version
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.tinker.draw_queue import BASE, AskedSample, DrawQueue, WeightsSampler
from echo2d.core.tinker.events import (
    DrawSample,
    SamplerName,
    SamplerOpened,
    SamplerOver,
    SessionName,
)
from echo2d.core.tinker.futures import FutureId
from echo2d.core.tinker.held_snapshots import HeldSnapshots, HoldingWorkers

# Beyond this many samplers of one caller the oldest one ends. Each of full weights keeps 2 bytes for each weight on the
# learner's disk.
CALLER_SAMPLERS_MAX, CALLER_WHOLE_SAMPLERS_MAX = 256, 8
# Sequences that workers draw at the same time, of one caller and of all: half of what the gateway's calls may have, so
# that they are never refused.
CALLER_DRAWN_MAX, DRAWN_MAX = 192, 384
# Longer questions about a prompt, and longer answers, do not fit into a message between worker and coordinator.
READ_BYTES_MAX = 3 << 20
# A sample that workers failed this often fails.
DRAW_TRIES_MAX = 5


@dataclass(slots=True)
class SampleQueue:
    """What one session samples now: numbers of samplers and of samples."""

    samplers: int = 0
    drawn: int = 0
    # They wait for workers; `other_weights` of them for weights that no worker holds.
    waiting: int = 0
    other_weights: int = 0
    # Their prompts or sequences wait to be scored, or workers read them.
    unscored: int = 0


class Samplers:
    """See the module docstring. `now` is monotonic seconds. workers: what they hold."""

    def __init__(self, workers: HoldingWorkers) -> None:
        self._samplers: dict[SamplerName, WeightsSampler] = {}
        self._waiting = DrawQueue()
        # Those whose prompts the learner or workers must read next, and those whose prompts workers read now.
        self._unread = DrawQueue()
        self._read_now: dict[FutureId, AskedSample] = {}
        # Those whose prompts or sequences only the learner can score.
        self._unscored: dict[FutureId, AskedSample] = {}
        self.held = HeldSnapshots(self._waiting, self._unread, workers)
        self._drawn: dict[FutureId, AskedSample] = {}
        # By caller: sequences under way, samples that are not, and the bytes of all.
        self._sequences, self._waits, self._bytes = Counter[str](), Counter[str](), Counter[str]()
        # When each caller had its last turn to have a sample scored, in turns.
        self._scored_turn = Counter[str]()
        self._turns = 0

    # --- samplers

    def open(self, opened: SamplerOpened) -> list[SamplerOver]:
        """Beyond the limits the caller's oldest one ends. Returns those that have."""
        mine = [each for each in self._samplers.values() if each.caller == opened.caller]
        over = [each.name for each in mine[: max(0, len(mine) + 1 - CALLER_SAMPLERS_MAX)]]
        whole = [each.name for each in mine if each.whole]
        if opened.whole and len(whole) >= CALLER_WHOLE_SAMPLERS_MAX:
            over = list(dict.fromkeys([*over, whole[0]]))
        for oldest in over:
            del self._samplers[oldest]
        self._samplers[opened.sampler] = WeightsSampler(
            opened.sampler,
            opened.caller,
            opened.session,
            opened.folder,
            opened.base,
            opened.path,
            opened.model,
            opened.steps,
            opened.follows,
            opened.whole,
        )
        return [*map(SamplerOver, over)]

    def follow(self, newest: SamplerOpened) -> list[SamplerOpened]:
        """The samplers that follow its model go on to its weights. Returns what they are now."""
        followers = [
            each
            for each in self._samplers.values()
            if each.follows and each.model == newest.model and each.name != newest.sampler
        ]
        for each in followers:
            before, each.folder, each.steps = each.folder, newest.folder, newest.steps
            self._waiting.moved(each, before)
            self._unread.moved(each, before)
        return [replace(newest, sampler=each.name) for each in followers]

    def get(self, caller: str, name: SamplerName) -> WeightsSampler | None:
        found = self._samplers.get(name)
        return found if found is not None and found.caller == caller else None

    def end_session(self, session: SessionName) -> list[AskedSample]:
        """The session has ended, and its samplers with it. Returns what it still waited for."""
        over = [each.name for each in self._samplers.values() if each.session == session]
        for name in over:
            del self._samplers[name]
        return [each for each in self._all() if each.sampler.session == session]

    def folders(self) -> set[str]:
        """The folders that samplers, and what is under way, still need."""
        needed = [*self._samplers.values(), *(each.sampler for each in self._all())]
        drawn_with = {each.drawn_with for each in self._all()}
        return {*drawn_with, *(each.folder for each in needed)} - {BASE}

    # --- samples

    def ask(self, sample: AskedSample) -> None:
        order = sample.order
        if sample.drawn is None and (sample.scores is not None or not order.scored):
            self._waiting.put(sample)
        elif (
            sample.drawn is not None
            or sample.by_learner
            or max(len(order.scored), order.scores_bytes) > READ_BYTES_MAX
        ):
            self._unscored[sample.future] = sample
        else:
            self._unread.put(sample)
        self._waits[sample.sampler.caller] += 1
        self._bytes[sample.sampler.caller] += sample.size

    @property
    def has_to_score(self) -> bool:
        return bool(self._unscored or self._unread)

    @property
    def has_to_read(self) -> bool:
        """Whether prompts wait that workers may read."""
        return bool(self._unread)

    def next_to_score(self) -> AskedSample | None:
        """Take the sample whose prompt or sequences the learner must score next."""
        first = self._next_turn([*self._unscored.values(), *self._unread])
        if first is not None:
            self._unread.take(first.future)
            self._unscored.pop(first.future, None)
            self._forget(first)
        return first

    def next_to_read(self, folders: Mapping[str, VersionKey]) -> AskedSample | None:
        """Take the sample whose prompt a worker must read next that holds the weights of these folders."""
        found = [
            self._unread.first(folder, caller)
            for folder in folders
            for caller in self._unread.callers(folder)
        ]
        first = self._next_turn(found)
        if first is not None:
            self._read_now[first.future] = first
            self._unread.take(first.future)
            first.version = folders[first.sampler.folder].version
            self.held.begun(first.sampler.folder)
        return first

    def read(self, sample: AskedSample, scores: bytes | None) -> None:
        """A worker has read this prompt. None: it could not, so the learner must."""
        if self._stop_reading(sample.future) is None:
            return
        self._forget(sample)
        sample.scores, sample.by_learner = scores, scores is None
        self.ask(sample)

    def waiting(self, caller: str) -> tuple[int, int]:
        """How many samples of this caller wait, and the bytes of all its samples."""
        return self._waits[caller], self._bytes[caller]

    def queues(self) -> defaultdict[SessionName, SampleQueue]:
        """What each session samples. What the learner scores now is not among them."""
        found = defaultdict[SessionName, SampleQueue](SampleQueue)
        for sampler in self._samplers.values():
            found[sampler.session].samplers += 1
        for each in self._drawn.values():
            found[each.sampler.session].drawn += 1
        held = self.held.versions
        for each in self._waiting:
            found[each.sampler.session].waiting += 1
            found[each.sampler.session].other_weights += each.sampler.folder not in held
        for each in (*self._unscored.values(), *self._unread, *self._read_now.values()):
            found[each.sampler.session].unscored += 1
        return found

    def names(self) -> dict[str, Version]:
        """Whose weights workers hold, and as which versions: the path of a checkpoint, the id of a sampler, or the
        base model's name. The last one was published last.
        """
        return {self._name_of(folder): version for folder, version in self.held.versions.items()}

    def _name_of(self, folder: str) -> str:
        of = next((each for each in self._samplers.values() if each.folder == folder), None)
        if of is None:
            return f"a sampler that has ended ({folder[:8]})"
        return of.path or (of.name if folder else of.base)

    def drawn(self, future: FutureId) -> AskedSample | None:
        """A sample that workers draw now; None: they do not draw this one."""
        return self._drawn.get(future)

    def sample(self, future: FutureId) -> AskedSample | None:
        """The same, also if it is not drawn yet."""
        asked = self._waiting.get(future) or self._unread.get(future)
        scored = self._unscored.get(future) or self._read_now.get(future)
        return self._drawn.get(future) or asked or scored

    def paused(self, future: FutureId) -> bool:
        """Whether a sample waits for its weights because full weights are held, or because it needs some itself."""
        sample = self._waiting.get(future)
        if sample is None or not self.held.versions or sample.sampler.folder in self.held.versions:
            return False
        return sample.sampler.whole or self.held.whole

    def drop(self, future: FutureId) -> bool:
        """Forget a sample that its client needs no longer. Returns whether workers draw it now."""
        waits = self._waiting.take(future) or self._unread.take(future)
        waits = waits or self._unscored.pop(future, None) or self._stop_reading(future)
        if waits is not None:
            self._forget(waits)
        return self._end(future) is not None

    def ended(self, future: FutureId, *, again: bool, now: float) -> bool:
        """Workers are done with a sample. again: they failed. Returns whether it waits again."""
        sample = self._end(future)
        if sample is None or not again or sample.tries >= DRAW_TRIES_MAX:
            return False
        self._waiting.put_back(sample, now=now)
        self._waits[sample.sampler.caller] += 1
        self._bytes[sample.sampler.caller] += sample.size
        return True

    def begin(self, *, now: float) -> Iterator[DrawSample]:
        """What workers can draw now."""
        folders = self.held.open_to(now=now)
        callers = dict.fromkeys(
            name for folder in folders for name in self._waiting.callers(folder)
        )
        while callers:
            caller = min(callers, key=lambda each: self._sequences[each])
            sample = self._waiting.ready(folders, caller, now=now)
            mine, every = self._sequences[caller], self._sequences.total()
            if sample is None or (mine and mine + sample.order.count > CALLER_DRAWN_MAX):
                del callers[caller]
                continue
            if every and every + sample.order.count > DRAWN_MAX:
                return
            self._waiting.take(sample.future)
            _subtract(self._waits, caller, 1)
            self._drawn[sample.future] = sample
            self._sequences[caller] += sample.order.count
            sample.tries, sample.drawn_with = sample.tries + 1, sample.sampler.folder
            sample.version = folders[sample.drawn_with]
            self.held.begun(sample.drawn_with)
            yield DrawSample(sample.future, caller, sample.order, sample.version)

    def fail(self, folder: str) -> list[AskedSample]:
        """These weights cannot be published. Returns what waited for them."""
        lost = [*self._waiting.of(folder), *self._unread.of(folder)]
        for each in lost:
            self.drop(each.future)
        return lost

    def wake_at(self, now: float) -> float | None:
        """When something can be drawn, or must make room, by time alone."""
        times = (self._waiting.wake_at(now), self.held.wake_at(now))
        return min((at for at in times if at is not None), default=None)

    # --- inside

    def _all(self) -> list[AskedSample]:
        scored = (*self._unscored.values(), *self._unread, *self._read_now.values())
        return [*scored, *self._waiting, *self._drawn.values()]

    def _next_turn(self, waiting: Sequence[AskedSample]) -> AskedSample | None:
        """The first of these of the caller whose last turn was longest ago."""
        if not waiting:
            return None
        first = min(waiting, key=lambda each: self._scored_turn[each.sampler.caller])
        self._turns += 1
        self._scored_turn[first.sampler.caller] = self._turns
        return first

    def _stop_reading(self, future: FutureId) -> AskedSample | None:
        """Workers read this prompt no longer; None: they do not."""
        sample = self._read_now.pop(future, None)
        if sample is not None and sample.version is not None:
            self.held.ended(sample.version)
        return sample

    def _forget(self, sample: AskedSample) -> None:
        """A sample that is not drawn counts no longer."""
        _subtract(self._waits, sample.sampler.caller, 1)
        _subtract(self._bytes, sample.sampler.caller, sample.size)

    def _end(self, future: FutureId) -> AskedSample | None:
        sample = self._drawn.pop(future, None)
        if sample is not None and sample.version is not None:
            self.held.ended(sample.version)
            _subtract(self._sequences, sample.sampler.caller, sample.order.count)
            _subtract(self._bytes, sample.sampler.caller, sample.size)
        return sample

    def check(self) -> None:
        assert not self._drawn.keys() & {each.future for each in self._waiting}
        self._waiting.check()
        self._unread.check()
        self.held.check()
        sequences, waits, sizes = Counter[str](), Counter[str](), Counter[str]()
        for each in self._all():
            drawn = each.future in self._drawn
            sequences[each.sampler.caller] += drawn * each.order.count
            waits[each.sampler.caller] += not drawn
            sizes[each.sampler.caller] += each.size
        assert (sequences, waits, sizes) == (self._sequences, self._waits, self._bytes)


def _subtract(counted: Counter[str], name: str, what: int) -> None:
    counted[name] -= what
    if not counted[name]:
        del counted[name]

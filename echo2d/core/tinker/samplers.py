"""The samplers of clients: each draws from the weights that it was opened with, for as long as it lives.

    asked [--> prompt scored by the learner] --> waits --weights served--> drawn by workers --> ended
                                                  ^                          |
                                                  +--- a worker was lost ----+

The workers serve one version at a time. So one *snapshot*, the weights of one folder or the base model, is served at a
time: what waits for it is drawn, and when nothing of it is under way any more, the next snapshot is published again,
as a new version with the same bytes: callers take turns, and of one caller's snapshots the one that waits longest is
next. When the present one was served for SNAPSHOT_SWITCH_S while
another one waited, nothing more of it is begun.
Not here: who may use a sampler (`service`), workers (`core/work/calls`).
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from echo2d.core.base.ids import Digest, Version
from echo2d.core.tinker.events import (
    DrawSample,
    SampleOrder,
    SamplerName,
    SamplerOpened,
    SamplerOver,
    SessionName,
)
from echo2d.core.tinker.futures import FutureId
from echo2d.core.tinker.operations import ModelId

SNAPSHOT_SWITCH_S = 20.0
# Beyond this many samplers of one caller the oldest one ends.
CALLER_SAMPLERS_MAX = 256
# Sequences that workers draw at the same time, of one caller and of all: half of what the gateway's calls may have, so
# that they are never refused.
CALLER_DRAWN_MAX, DRAWN_MAX = 192, 384
# A sample that workers failed this often fails.
DRAW_TRIES_MAX = 5
DRAW_RETRY_S = 1.0
# The folder of the base model.
BASE = ""


@dataclass(slots=True)
class WeightsSampler:
    """name: its caller's. folder: of its weights on the learner's disk."""

    name: SamplerName
    caller: str
    session: SessionName
    folder: str
    base: str  # the name of the base model
    path: str | None  # the checkpoint
    # As in `SamplerOpened`.
    model: ModelId | None = None
    steps: int = 0
    follows: bool = False
    # The digests of its calls, by number: only the newest.
    digests: dict[int, Digest] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """What the names of its sequences say of its weights; the learner reads it (`learner/tinker/datums`)."""
        return "" if self.model is None else f"@{self.model.rpartition(':')[2]}.{self.steps}"


@dataclass(slots=True)
class AskedSample:
    future: FutureId
    sampler: WeightsSampler
    order: SampleOrder
    since: float
    tries: int = 0
    # What the learner found of the prompt: a part of the result. None: it has not looked.
    scores: bytes | None = None
    # It is not drawn again before this time.
    retry_at: float = -math.inf
    # Whether its client needs it no longer.
    dropped: bool = False


@dataclass(slots=True)
class SampleQueue:
    """What one session samples now: numbers of samplers and of samples."""

    samplers: int = 0
    drawn: int = 0
    # They wait for workers; `other_weights` of them for other weights than those that are served.
    waiting: int = 0
    other_weights: int = 0
    # Their prompts wait for the learner.
    unscored: int = 0


class Samplers:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._samplers: dict[SamplerName, WeightsSampler] = {}
        self._waiting: dict[FutureId, AskedSample] = {}
        self._drawn: dict[FutureId, AskedSample] = {}
        # Those whose prompt the learner must score first.
        self._unscored: dict[FutureId, AskedSample] = {}
        # Sequences under way, by caller.
        self._sequences: Counter[str] = Counter()
        # When each caller had its last turn, in turns: to have a prompt scored, or a snapshot served.
        self._scored_turn, self._served_turn = Counter[str](), Counter[str]()
        self._turns = 0
        # What the workers serve, or are about to, and since when.
        self._served: tuple[str, Version] | None = None
        self._served_at = 0.0

    # --- samplers

    def open(self, opened: SamplerOpened) -> list[SamplerOver]:
        """Beyond CALLER_SAMPLERS_MAX the caller's oldest one ends. Returns those that have."""
        mine = [each.name for each in self._samplers.values() if each.caller == opened.caller]
        over = mine[: max(0, len(mine) + 1 - CALLER_SAMPLERS_MAX)]
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
            each.folder, each.steps = newest.folder, newest.steps
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
        return {each.folder for each in needed} - {BASE}

    # --- samples

    def ask(self, sample: AskedSample) -> None:
        if sample.order.scored and sample.scores is None:
            self._unscored[sample.future] = sample
        else:
            self._waiting[sample.future] = sample

    @property
    def has_to_score(self) -> bool:
        return bool(self._unscored)

    def next_to_score(self) -> AskedSample | None:
        """Take the sample whose prompt the learner must score next."""
        if not self._unscored:
            return None
        turns = self._scored_turn
        first = min(self._unscored.values(), key=lambda each: turns[each.sampler.caller])
        self._turns += 1
        turns[first.sampler.caller] = self._turns
        return self._unscored.pop(first.future)

    def waiting(self, caller: str) -> tuple[int, int]:
        """How many samples of this caller wait. And the bytes of all its samples: of their prompts, and of what the
        learner finds out about these.
        """
        mine = [each for each in self._all() if each.sampler.caller == caller]
        sizes = [
            len(each.order.prompt) + len(each.order.scored) + each.order.scores_bytes
            for each in mine
        ]
        return sum(each.future not in self._drawn for each in mine), sum(sizes)

    def queues(self) -> defaultdict[SessionName, SampleQueue]:
        """What each session samples. The prompt that the learner scores now is not among them."""
        found = defaultdict[SessionName, SampleQueue](SampleQueue)
        for sampler in self._samplers.values():
            found[sampler.session].samplers += 1
        for each in self._drawn.values():
            found[each.sampler.session].drawn += 1
        for each in self._waiting.values():
            found[each.sampler.session].waiting += 1
        for each in self._others():
            found[each.sampler.session].other_weights += 1
        for each in self._unscored.values():
            found[each.sampler.session].unscored += 1
        return found

    @property
    def served(self) -> tuple[str, Version] | None:
        """Whose weights the workers serve, or are about to, and as which version; None: it is not known."""
        if self._served is None:
            return None
        folder, version = self._served
        of = next((each for each in self._samplers.values() if each.folder == folder), None)
        if of is None:
            return "a sampler that has ended", version
        return (of.path or (of.name if folder else of.base)), version

    def drawn(self, future: FutureId) -> AskedSample | None:
        """A sample that workers draw now; None: they do not draw this one."""
        return self._drawn.get(future)

    def sample(self, future: FutureId) -> AskedSample | None:
        """The same, also if it is not drawn yet."""
        found = self._drawn.get(future) or self._waiting.get(future)
        return found or self._unscored.get(future)

    def drop(self, future: FutureId) -> bool:
        """Forget a sample that its client needs no longer. Returns whether workers draw it now."""
        self._waiting.pop(future, None)
        self._unscored.pop(future, None)
        return self._end(future) is not None

    def ended(self, future: FutureId, *, again: bool, now: float) -> bool:
        """Workers are done with a sample. again: they failed. Returns whether it waits again."""
        sample = self._end(future)
        if sample is None or not again or sample.tries >= DRAW_TRIES_MAX:
            return False
        sample.since, sample.retry_at = now, now + DRAW_RETRY_S
        self._waiting = {future: sample, **self._waiting}
        return True

    def begin(self, *, now: float) -> Iterator[DrawSample]:
        """What workers can draw now."""
        if self._served is None or self._switches(now):
            return
        folder, version = self._served
        queues: dict[str, deque[AskedSample]] = {}
        for each in self._waiting.values():
            if each.sampler.folder == folder and now >= each.retry_at:
                queues.setdefault(each.sampler.caller, deque()).append(each)
        while queues:
            # The caller for whom the fewest sequences are drawn is next.
            caller = min(queues, key=lambda each: self._sequences[each])
            sample = queues[caller].popleft()
            count, every = sample.order.count, self._sequences.total()
            if every and every + count > DRAWN_MAX:
                return
            if not queues[caller]:
                del queues[caller]
            if self._sequences[caller] and self._sequences[caller] + count > CALLER_DRAWN_MAX:
                continue
            del self._waiting[sample.future]
            self._drawn[sample.future] = sample
            self._sequences[caller] += count
            sample.tries += 1
            yield DrawSample(sample.future, caller, sample.order, version)

    def wanted(self, *, now: float) -> str | None:
        """The folder to publish next; None: there is none, or the present one is in use."""
        others = self._others()
        if (
            self._drawn
            or not others
            or (len(others) < len(self._waiting) and not self._switches(now))
        ):
            return None
        turns = self._served_turn
        return min(others, key=lambda each: (turns[each.sampler.caller], each.since)).sampler.folder

    def published(self, folder: str, version: Version, *, now: float) -> None:
        self._served, self._served_at = (folder, version), now
        self._turns += 1
        for each in self._waiting.values():
            if each.sampler.folder == folder:
                self._served_turn[each.sampler.caller] = self._turns

    def unpublished(self) -> None:
        """It is not known what the workers serve."""
        self._served = None

    def fail(self, folder: str) -> list[AskedSample]:
        """These weights cannot be published. Returns what waited for them."""
        lost = [each for each in self._waiting.values() if each.sampler.folder == folder]
        for each in lost:
            del self._waiting[each.future]
        return lost

    def wake_at(self, now: float) -> float | None:
        """When the snapshot that is served must make room for another one, or a sample is drawn again."""
        retries = [each.retry_at for each in self._waiting.values() if each.retry_at > now]
        switch_at = self._switch_at()
        later = [] if switch_at is None or switch_at <= now else [switch_at]
        # What could not be done when its time came waits for another event.
        return min([*retries, *later], default=None)

    # --- inside

    def _all(self) -> list[AskedSample]:
        return [*self._unscored.values(), *self._waiting.values(), *self._drawn.values()]

    def _others(self) -> list[AskedSample]:
        served = None if self._served is None else self._served[0]
        return [each for each in self._waiting.values() if each.sampler.folder != served]

    def _switches(self, now: float) -> bool:
        at = self._switch_at()
        return at is not None and at <= now

    def _switch_at(self) -> float | None:
        since = min((each.since for each in self._others()), default=None)
        return None if since is None else max(since, self._served_at) + SNAPSHOT_SWITCH_S

    def _end(self, future: FutureId) -> AskedSample | None:
        sample = self._drawn.pop(future, None)
        if sample is not None:
            caller = sample.sampler.caller
            self._sequences[caller] -= sample.order.count
            if not self._sequences[caller]:
                del self._sequences[caller]
        return sample

    def check(self) -> None:
        assert not self._waiting.keys() & self._drawn.keys()
        counted: Counter[str] = Counter()
        for each in self._drawn.values():
            counted[each.sampler.caller] += each.order.count
        assert counted == self._sequences

"""The samples of clients that wait for workers, by the folder of their weights and by their caller.

    put --> waits --take--> drawn by workers
             ^                |
             +--- put_back ---+  workers failed it: it rests, and is then the first of its caller

Not here: which folders workers hold (`held_snapshots`), which caller is next (`samplers`).
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from echo2d.core.base.ids import Digest, Version
from echo2d.core.tinker.events import SampleOrder, SamplerName, SessionName
from echo2d.core.tinker.futures import FutureId
from echo2d.core.tinker.operations import ModelId

# A sample that workers failed is not drawn again before so long.
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
    # Whether these are the weights of a whole model, and not an adapter.
    whole: bool = False
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
    # What the learner or a worker found of the prompt: a part of the result. None: neither has looked.
    scores: bytes | None = None
    # Whether a worker could not read the prompt, so that only the learner does.
    by_learner: bool = False
    # The sequences, which the learner must score too, and the folder of the weights that draw them.
    drawn: bytes | None = None
    drawn_with: str = BASE
    # It is not drawn again before this time.
    retry_at: float = -math.inf
    # The version from which workers draw it or read its prompt, or did so last.
    version: Version | None = None
    # Whether its client needs it no longer.
    dropped: bool = False

    def answer(self, sequences: bytes) -> bytes:
        """The result. Two protobuf messages, one after the other, are one message with the fields of both."""
        return sequences + (self.scores or b"")

    @property
    def size(self) -> int:
        """Bytes of its prompt, and of what the learner finds out."""
        return len(self.order.prompt) + len(self.order.scored) + self.order.scores_bytes


class DrawQueue(Collection[AskedSample]):
    """See the module docstring. `now` is monotonic seconds. Folders and callers are only those of samples that wait."""

    def __init__(self) -> None:
        self._samples: dict[FutureId, AskedSample] = {}
        # By folder and caller, in the order in which they are drawn.
        self._places: dict[str, dict[str, dict[FutureId, AskedSample]]] = {}
        self._resting: dict[FutureId, AskedSample] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[AskedSample]:
        return iter(self._samples.values())

    def __contains__(self, future: object) -> bool:
        return future in self._samples

    @property
    def folders(self) -> Collection[str]:
        return self._places.keys()

    def callers(self, folder: str) -> Collection[str]:
        return self._places.get(folder, {}).keys()

    def get(self, future: FutureId) -> AskedSample | None:
        return self._samples.get(future)

    def of(self, folder: str) -> list[AskedSample]:
        return [each for mine in self._places.get(folder, {}).values() for each in mine.values()]

    def first(self, folder: str, caller: str) -> AskedSample:
        """The next sample of this caller from this folder, also if it rests. KeyError: none waits."""
        return next(iter(self._places[folder][caller].values()))

    def ready(self, folders: Iterable[str], caller: str, *, now: float) -> AskedSample | None:
        """The sample of this caller that is next from these folders; None: none is ready."""
        heads = (
            next((each for each in mine.values() if each.retry_at <= now), None)
            for folder in folders
            if (mine := self._places.get(folder, {}).get(caller))
        )
        return min((each for each in heads if each), key=lambda each: each.since, default=None)

    def put(self, sample: AskedSample) -> None:
        self._samples[sample.future] = sample
        self._place(sample)[sample.future] = sample

    def put_back(self, sample: AskedSample, *, now: float) -> None:
        """Workers failed it."""
        sample.since, sample.retry_at = now, now + DRAW_RETRY_S
        self._samples[sample.future] = self._resting[sample.future] = sample
        mine = self._place(sample)
        later = dict(mine)
        mine.clear()
        mine.update({sample.future: sample} | later)

    def take(self, future: FutureId) -> AskedSample | None:
        """Take it out; None: it does not wait."""
        sample = self._samples.pop(future, None)
        self._resting.pop(future, None)
        if sample is not None:
            self._unplace(sample, sample.sampler.folder)
        return sample

    def moved(self, sampler: WeightsSampler, before: str) -> None:
        """The sampler has other weights than those of the folder before."""
        for each in list(self._places.get(before, {}).get(sampler.caller, {}).values()):
            if each.sampler is sampler:
                self._unplace(each, before)
                self._place(each)[each.future] = each

    def wake_at(self, now: float) -> float | None:
        """When a sample has rested; None: none rests."""
        self._resting = {name: each for name, each in self._resting.items() if each.retry_at > now}
        return min((each.retry_at for each in self._resting.values()), default=None)

    def _place(self, sample: AskedSample) -> dict[FutureId, AskedSample]:
        callers = self._places.setdefault(sample.sampler.folder, {})
        return callers.setdefault(sample.sampler.caller, {})

    def _unplace(self, sample: AskedSample, folder: str) -> None:
        caller, callers = sample.sampler.caller, self._places[folder]
        del callers[caller][sample.future]
        if not callers[caller]:
            del callers[caller]
        if not callers:
            del self._places[folder]

    def check(self) -> None:
        placed = [(folder, each) for folder in self._places for each in self.of(folder)]
        assert {each.future for _, each in placed} == self._samples.keys()
        assert len(placed) == len(self._samples)
        assert all(each.sampler.folder == folder for folder, each in placed)
        assert all(mine for callers in self._places.values() for mine in callers.values())
        assert self._resting.keys() <= self._samples.keys()

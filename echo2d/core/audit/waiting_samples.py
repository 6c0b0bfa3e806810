"""The samples that wait for a verdict, with their groups, and what is decided about them.

    begin --> waits --every author is judged good--> good: its group may go on
                 |--one is not, or wait_s passed---> bad: another worker gets the sample

A sample that another worker continued has several authors, and each is judged. Decisions are handed
out by `take_decided` only, because a group must not go on in the middle of a turn.
Not here: which samples wait, and how an author is judged (`audits`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from echo2d.core.base.ids import GroupId, PeerId


@dataclass(slots=True)
class WaitingSample:
    """A kept sample whose group waits for its verdict."""

    group: GroupId
    sample: int
    since: float
    # The workers that wrote it and are still to be judged.
    authors: set[PeerId] = field(default_factory=set)
    # The verdict is known, but `take_decided` has not returned it yet.
    decided: bool = False


@dataclass(frozen=True, slots=True)
class SampleVerdict:
    """What to do with a sample that waited."""

    group: GroupId
    sample: int
    # It may be trained on; otherwise a worker that is not `blamed` makes it again.
    good: bool
    blamed: frozenset[PeerId] = frozenset()


class WaitingSamples:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._groups: dict[GroupId, dict[int, WaitingSample]] = {}
        # When to look at a sample that still waits: (time, number, sample), a heap.
        self._looks: list[tuple[float, int, WaitingSample]] = []
        self._looks_made = 0
        self._decided: list[SampleVerdict] = []
        # How long a verdict takes, a moving average; None: there was no verdict yet.
        self.delay_s: float | None = None

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __contains__(self, group: GroupId) -> bool:
        return group in self._groups

    def waits(self, group: GroupId, number: int) -> bool:
        return number in self._groups.get(group, {})

    @property
    def groups(self) -> int:
        return len(self._groups)

    @property
    def wake_at(self) -> float | None:
        return self._looks[0][0] if self._looks else None

    def begin(self, author: PeerId, group: GroupId, number: int, now: float) -> WaitingSample:
        """Wait for the verdict about one more author of this sample."""
        samples = self._groups.setdefault(group, {})
        if number not in samples:
            samples[number] = WaitingSample(group, number, now)
            self.look_later(samples[number], now)
        samples[number].authors.add(author)
        return samples[number]

    def look_later(self, sample: WaitingSample, now: float) -> None:
        """Look at this sample again after `wait_s`."""
        self._looks_made += 1
        heappush(self._looks, (now + self._wait_s, self._looks_made, sample))

    def overdue(self, now: float) -> Iterator[WaitingSample]:
        """The samples that have waited for `wait_s`; each is yielded once."""
        while self._looks and self._looks[0][0] <= now:
            sample = heappop(self._looks)[2]
            if self._waits(sample):
                yield sample

    def settle(self, sample: WaitingSample | None, author: PeerId, *, good: bool) -> None:
        """A sample got a verdict about this author, or will not get one."""
        if sample is None or not self._waits(sample):
            return
        if not good:
            self.refuse(sample, {author})
            return
        sample.authors.discard(author)
        if not sample.authors:
            self._decide(sample, SampleVerdict(sample.group, sample.sample, good=True))

    def refuse(self, sample: WaitingSample, blamed: Iterable[PeerId]) -> None:
        """The sample goes back: it may be a lie of these authors."""
        verdict = SampleVerdict(sample.group, sample.sample, good=False, blamed=frozenset(blamed))
        self._decide(sample, verdict)

    def measure(self, sample: WaitingSample | None, now: float) -> None:
        """A verdict was given: measure how long it took."""
        if sample is not None and self._waits(sample):
            before = now - sample.since if self.delay_s is None else self.delay_s
            # An old delay keeps 1/e of its weight after 64 verdicts.
            self.delay_s = before + (now - sample.since - before) / 64

    def withdraw(self, group: GroupId, number: int) -> None:
        """The sample is given back: its verdict does not matter any more."""
        samples = self._groups.get(group, {})
        if samples.pop(number, None) is not None and not samples:
            del self._groups[group]

    def forget(self, group: GroupId) -> None:
        """The group has ended: none of its samples waits any more."""
        self._groups.pop(group, None)

    def take_decided(self) -> list[SampleVerdict]:
        """What was decided since the last call.

        Samples that go back come first, so that no group is complete with one of them.
        """
        decided = sorted(self._decided, key=lambda each: each.good)
        self._decided = []
        for verdict in decided:
            sample = self._groups.get(verdict.group, {}).get(verdict.sample)
            if sample is not None and sample.decided:
                self.withdraw(verdict.group, verdict.sample)
        return decided

    def _decide(self, sample: WaitingSample, verdict: SampleVerdict) -> None:
        # The sample waits until its verdict is taken: its group must not go on before.
        sample.decided = True
        self._decided.append(verdict)

    def _waits(self, sample: WaitingSample) -> bool:
        """Whether the sample still waits: it is undecided, its group runs, and no other worker got it meanwhile."""
        if sample.decided:
            return False
        return self._groups.get(sample.group, {}).get(sample.sample) is sample

    def check(self) -> None:
        assert all(self._groups.values())
        assert all(
            each.authors or each.decided
            for samples in self._groups.values()
            for each in samples.values()
        )

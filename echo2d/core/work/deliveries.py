"""Measures what each worker delivers, and decides how many samples it may therefore hold.

    new tokens, reported or in a result --> tokens/s while it holds samples --> its share of the pool's
                                                                                       |
        allowed = window x share, of the slots that it offers <------------------------+

The window is the number of samples that may be under way (docs/design/staleness.md). By Little's law a worker that
holds its share of the window finishes its samples before they are too old, and a worker that holds more does not. So
the slots are only an offer, and the delivered tokens decide. While the window has room, a worker that is about as fast
as usual may hold more and more.

A newcomer begins with one group; while no worker has delivered anything, it begins with a fair share of the window.
Newcomers of one access token share their token's part of the window. What a worker may hold grows while it is loaded
and delivers, and shrinks while it is loaded and does not deliver. A worker whose share is less than one sample keeps
one on trial, but all such workers of a token together keep at most a group.
Not here: which worker gets a sample (`ranking`), what a slow worker must give back (`scheduler`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.membership import SLOTS_MAX
from echo2d.core.protocol.control_messages import PROGRESS_S
from echo2d.core.work.events import WorkerDelivery

# A worker is slow if a sample takes this many times as long there as usual.
SLOW_TIMES = 3.0
# A worker that is as fast as usual may hold this many times as many samples as it holds now.
GROWTH = 1.5
# After this many seconds of work, delivered tokens have lost all but 1/e of their weight.
MEMORY_S = 5.0 * PROGRESS_S
# A worker that has held samples for this long and delivered nothing is no longer a newcomer.
TRIAL_S = 4.0 * PROGRESS_S
# A worker's rate is known after this many seconds of work: reports come every PROGRESS_S.
_KNOWN_S = 2.0 * PROGRESS_S
# Seconds between two records of what workers may hold.
KEEP_S = 30.0
# Ranks of speed, each a factor of two: 0 is usual, more is slower.
RANK_MIN, RANK_MAX = -2, 6
RANK_SLOW = 2  # from this rank on a worker comes after all others, whatever version it serves


# How many samples a worker may hold, and its rank.
Bounds = tuple[int, int]
UNBOUND: Bounds = (SLOTS_MAX, 0)


@dataclass(slots=True)
class _Worker:
    """The work of one worker. Older work weighs less, see MEMORY_S."""

    tokens: float = 0.0  # delivered up to the last review
    busy_s: float = 0.0  # seconds in which it held samples
    held_s: float = 0.0  # sample-seconds
    fresh_tokens: int = 0  # delivered since the last review
    holds: int = 0  # how many samples it holds
    at: float = 0.0  # the time up to which the seconds are counted
    # The name of the access token that it joined with.
    token: str = ""
    slots: int = 0  # the slots that it offers; 0: it is not here
    allowed: int = 0  # how many samples it may hold
    capacity: float = 0.0  # tokens/s when it last had enough to do
    rank: int = 0
    tried_s: float = 0.0  # how long it has held samples in all
    delivered: bool = False  # whether it ever wrote a token
    wrote_at: float = 0.0
    idle_since: float = 0.0

    def until(self, now: float) -> None:
        """Count the time since `at`, in which `holds` was constant."""
        if self.holds and now > self.at:
            keep = math.exp((self.at - now) / MEMORY_S)
            spent_s = MEMORY_S * (1.0 - keep)
            self.tokens *= keep
            self.busy_s = self.busy_s * keep + spent_s
            self.held_s = self.held_s * keep + self.holds * spent_s
        self.at = now

    def take_in(self, now: float) -> None:
        self.until(now)
        self.tokens += self.fresh_tokens
        self.fresh_tokens = 0

    @property
    def rate(self) -> float:
        """Tokens/s while it holds samples."""
        return self.tokens / self.busy_s if self.busy_s else 0.0

    @property
    def speed(self) -> float:
        """Tokens/s of one sample."""
        return self.tokens / self.held_s if self.held_s else 0.0

    def weight(self, now: float) -> float:
        """Its tokens, which count less the longer it has not written."""
        return self.tokens * math.exp((self.wrote_at - now) / MEMORY_S)

    @property
    def is_new(self) -> bool:
        return self.slots > 0 and not self.delivered and self.tried_s < TRIAL_S

    @property
    def is_known(self) -> bool:
        return not self.is_new and self.busy_s >= _KNOWN_S

    @property
    def rate_if_loaded(self) -> float:
        """Its tokens/s if it held at least half of what it may hold. No single sample is assumed to become faster."""
        most = min(self.allowed, self.slots)
        if 2.0 * self.load >= most:
            return self.load * self.speed
        return min(max(self.capacity, self.rate), most * self.speed)

    @property
    def load(self) -> float:
        """How many samples the worker holds now, or its recent average if that is more."""
        return max(self.holds, self.held_s / self.busy_s if self.busy_s else 0.0)


class Deliveries:
    """See the module docstring. `now` is monotonic seconds.

    window: how many samples may be under way. group: how many a worker may hold at first.
    """

    def __init__(
        self, window: int, group: int, kept: Iterable[WorkerDelivery] = (), *, now: float = 0.0
    ) -> None:
        # A newcomer may hold at least 8 samples, however small the groups are.
        self._window, self._group = window, max(8, group)
        self._workers: dict[PeerId, _Worker] = {}
        # When `review` is due.
        self.review_at = now
        # Tokens/s of one sample at the worker that wrote the median token.
        self._usual = 0.0
        # The mean length of an answer in tokens.
        self._answer = 0.0
        self._kept: dict[PeerId, WorkerDelivery] = {}
        self._keep_at = now + KEEP_S
        for each in kept:
            self._remember(each, now)

    def bounds(self, worker: PeerId) -> Bounds:
        """How many samples the worker may hold, even beyond the slots that it offers, and its rank: a worker
        of rank 0 is as fast as usual, one of rank 1 takes twice as long for a sample.
        """
        work = self._workers.get(worker)
        return (self._group, 0) if work is None else (work.allowed, work.rank)

    def rate(self, worker: PeerId) -> float | None:
        """The tokens/s that the worker delivered lately while it held samples; None: its rate or the usual one is
        unknown."""
        work = self._workers.get(worker)
        return work.rate if work is not None and work.is_known and self._usual else None

    def slower(self, worker: PeerId) -> float | None:
        """How many times as long as usual a sample takes at this worker; None: it delivers nothing, or is not known."""
        work = self._workers.get(worker)
        known = work is not None and work.is_known and work.speed and self._usual
        return self._usual / work.speed if work is not None and known else None

    @property
    def answer_s(self) -> float:
        """Mean seconds of an answer at a worker that is as fast as usual; 0: not known."""
        return self._answer / self._usual if self._usual else 0.0

    def is_slow(self, worker: PeerId) -> bool:
        """Whether a sample takes at least SLOW_TIMES times as long there as usual."""
        work = self._workers.get(worker)
        return work is not None and work.is_known and SLOW_TIMES * work.speed < self._usual

    def slow(self) -> list[PeerId]:
        """The slow workers that hold samples, the slowest first."""
        found = [each for each, work in self._workers.items() if work.holds and self.is_slow(each)]
        return sorted(found, key=lambda each: self._workers[each].speed)

    def speed(self, worker: PeerId) -> float:
        """Tokens/s of one sample there; the usual speed if the worker's is not known."""
        work = self._workers.get(worker)
        return work.speed if work is not None and work.is_known else self._usual

    def gain_s(self, worker: PeerId, elsewhere: float, written: int, idle_s: float) -> float:
        """How many seconds earlier a sample ends if it is continued elsewhere.

        elsewhere: tokens/s of one sample at the other worker. written: the sample's tokens so far.
        idle_s: seconds since the last token.
        """
        speed = self._workers[worker].speed
        if idle_s >= TRIAL_S or not speed:
            return math.inf
        # The answer's final length is not known: at least a quarter of mean plus written tokens is assumed to be left.
        left = max(self._answer - written, (self._answer + written) / 4)
        return left / speed - left / elsewhere

    # --- what happens

    def holds(self, worker: PeerId, token: str, slots: int, samples: int, *, now: float) -> Bounds:
        """Record that the worker holds this many samples from now on; call this at every change. Returns its bounds."""
        work = self._workers.get(worker)
        if work is None:
            work = self._workers[worker] = _Worker(at=now)
        if samples != work.holds:
            if work.holds:
                work.tried_s += now - work.at
            work.until(now)
            work.holds, work.idle_since = samples, now
        if (slots > 0) != (work.slots > 0):
            self.review_at = now
        work.slots, work.token = slots, token
        return work.allowed, work.rank

    def wrote(self, worker: PeerId, tokens: int, *, answer: int = 0) -> None:
        """Record that the worker delivered this many new tokens. answer: the length of an answer that they ended."""
        if answer:
            # The mean is that of the newest 128 answers.
            self._answer += (answer - self._answer) * (1 / 128 if self._answer else 1.0)
        work = self._workers.get(worker)
        if work is not None:
            work.fresh_tokens += tokens

    def stood_still(self, worker: PeerId, seconds: float) -> None:
        """Record that the worker's engines just stood still for this many seconds, to load a version."""
        work = self._workers.get(worker)
        keep = math.exp(-seconds / MEMORY_S)
        still_s = MEMORY_S * (1.0 - keep)
        if work is not None and work.busy_s > still_s:
            work.tokens /= keep
            work.busy_s = (work.busy_s - still_s) / keep
            work.held_s = max(0.0, work.held_s - work.holds * still_s) / keep

    def left_alone(self, worker: PeerId) -> None:
        """Forget its rate: it wrote nothing of a sample for as long as an answer takes."""
        work = self._workers.get(worker)
        if work is not None:
            work.tokens = work.busy_s = work.held_s = work.capacity = 0.0
            work.allowed, work.rank = 1, RANK_SLOW

    def review(self, *, now: float) -> set[PeerId]:
        """Decide what each worker may hold, every PROGRESS_S. Returns the workers for which that changed."""
        self.review_at = now + PROGRESS_S
        self._forget()
        before = {each: (work.allowed, work.rank) for each, work in self._workers.items()}
        for work in self._workers.values():
            if work.holds:
                work.tried_s += now - work.at
            if work.fresh_tokens:
                work.delivered, work.wrote_at = True, now
            work.take_in(now)
        speed = usual_speed([(work.speed, work.weight(now)) for work in self._workers.values()])
        # If a worker hangs and all others wait for it, its speed must not become the usual speed. So the usual speed
        # falls by at most 3 % in one review, which is by half in three quarters of a minute.
        self._usual = max(speed, 0.97 * self._usual)
        known = [work for work in self._workers.values() if work.is_known]
        for work in known:
            work.capacity = work.rate_if_loaded
        capacity = sum([work.capacity for work in known if work.slots])
        for work in known:
            self._judge(work, capacity)
            # A slow worker that has held nothing for two minutes gets one sample, which shows whether it
            # is still slow.
            if work.rank >= RANK_SLOW and not work.holds and now >= work.idle_since + 120.0:
                work.rank, work.allowed = RANK_SLOW - 1, max(1, work.allowed)
        self._admit_newcomers(capacity)
        self._keep_on_trial()
        return {
            each
            for each, work in self._workers.items()
            if before[each] != (work.allowed, work.rank)
        }

    def to_keep(self, *, now: float) -> tuple[WorkerDelivery, ...]:
        """What a restart should know, every KEEP_S: the workers that may hold another number than before."""
        if now < self._keep_at:
            return ()
        self._keep_at = now + KEEP_S
        changed = tuple(
            WorkerDelivery(each, work.allowed, work.rate, work.speed)
            for each, work in self._workers.items()
            if work.is_known
            and (each not in self._kept or self._kept[each].allowed != work.allowed)
        )
        self._kept |= {each.worker: each for each in changed}
        return changed

    # --- inside

    def _remember(self, kept: WorkerDelivery, now: float) -> None:
        """Take over what was known before a restart; it weighs as much as a few seconds of work."""
        tokens = kept.tokens_per_s * _KNOWN_S
        self._workers[kept.worker] = _Worker(
            tokens,
            _KNOWN_S,
            tokens / kept.speed if kept.speed else _KNOWN_S * max(1, kept.allowed),
            at=now,
            allowed=kept.allowed,
            tried_s=TRIAL_S,
            delivered=tokens > 0,
            wrote_at=now,
        )
        self._kept[kept.worker] = kept

    def _judge(self, work: _Worker, capacity: float) -> None:
        """Decide what a worker with a known rate may hold. capacity: tokens/s of all workers that are here."""
        if not self._usual:
            return
        slower = math.log2(self._usual / work.speed) if work.speed else RANK_MAX
        work.rank = max(RANK_MIN, min(RANK_MAX, round(slower)))
        share = self._window / capacity if capacity else 0.0
        most = work.capacity * max(share, GROWTH / self._usual)
        if most > work.allowed or work.tried_s >= TRIAL_S:
            work.allowed = math.ceil(min(SLOTS_MAX, most))

    def _admit_newcomers(self, capacity: float) -> None:
        """Newcomers of one token share the token's part of the window: a group each, as long as some of it is left.

        capacity: as in `_judge`; 0: no worker has delivered anything yet.
        """
        new: dict[str, list[_Worker]] = defaultdict(list)
        for work in self._workers.values():
            if work.is_new:
                new[work.token].append(work)
        if not new:
            return
        here = [work for work in self._workers.values() if work.slots]
        if len(here) == 1:
            here[0].allowed = SLOTS_MAX  # it is the only worker
            return
        tokens = len({work.token for work in here})
        part = max(self._window, self._group * len(here)) // tokens
        if capacity:
            # Newcomers share a quarter of their token's part of the window once the pool works.
            part //= 4
        for works in new.values():
            left = max(self._group, part)
            each = max(self._group, left // len(works))
            for work in works:
                work.allowed = max(1, min(each, left))
                left -= work.allowed

    def _keep_on_trial(self) -> None:
        """Let workers whose share is less than a sample hold one, but at most a group of them per token."""
        idle: dict[str, list[_Worker]] = defaultdict(list)
        for work in self._workers.values():
            if work.is_known and work.allowed < 1:
                idle[work.token].append(work)
        for works in idle.values():
            for work in sorted(works, key=lambda each: -each.rate)[: self._group]:
                work.allowed = 1

    def _forget(self) -> None:
        """Forget the oldest workers that hold nothing, above _WORKERS_MAX."""
        idle = [each for each, work in self._workers.items() if not work.holds]
        # The work of at most 2,048 workers is remembered: as many as there may be peers.
        for each in idle[: max(0, len(self._workers) - 2048)]:
            del self._workers[each]

    def check(self) -> None:
        assert all(work.holds >= 0 <= work.allowed for work in self._workers.values())


def usual_speed(delivered: Iterable[tuple[float, float]]) -> float:
    """The speed at which the median token was written; 0: there are none. delivered: pairs of speed and tokens.

    A worker that writes few tokens has little influence, however many samples it holds.
    """
    known = sorted([each for each in delivered if each[1]])
    half = sum([tokens for _, tokens in known]) / 2.0
    for speed, tokens in known:
        half -= tokens
        if half <= 0.0:
            return speed
    return 0.0

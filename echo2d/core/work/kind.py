"""The interface between the scheduler and a kind of work.

The scheduler owns every lease and its life. A kind of work owns the samples: which of them wait, how a worker's
answer is judged, and where a sample goes after its lease has ended. Each kind is one class with the hooks below, given
once to `LeaseScheduler.add`; no other code knows how many kinds there are.

    pending --the scheduler finds a worker--> grant --> progressed ... finished, or lost

Groups of samples have numbers, and the number shows the kind: the numbers of a kind begin at its `number` shifted by
KIND_SHIFT. So a lease, a reward and an environment's answer find their kind without a table.
Not here: leases (`leases`), workers (`scheduler`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import HeldLease, SampleDelta, SampleFinished, VersionKey
from echo2d.core.rules.run import RunRules
from echo2d.core.work.episodes import ParkedEpisode
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    PromptDrawn,
    PromptFailed,
    PromptsEnded,
    SampleScored,
)
from echo2d.core.work.leases import Lease

# Each kind has its own actions, which the scheduler passes on.
Actions = Sequence[Any]

# Why a lease ended before all its samples were answered. failed: its worker gave it back. silent: its worker was
# silent, or made no token. late: its samples end sooner elsewhere. forgotten: its worker came back without it. left:
# its worker is gone. drained: its worker is taken out of service. With late and drained the samples are not at fault.
Cause = Literal["failed", "silent", "late", "forgotten", "left", "drained"]


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Samples of one prompt that wait for slots. As many of them are placed as there are free slots."""

    samples: Sequence[int]
    # Workers that serve this version or a newer one may write them.
    oldest: Version
    # A single sample goes to this worker if it has a free slot.
    preferred: PeerId | None = None
    # Whether a worker may get a single sample; None: every worker may.
    suits: Callable[[PeerId], bool] | None = None
    # Workers that serve a newer version than this may not write them; None: no limit.
    newest: Version | None = None
    there_alone: bool = False  # whether only the preferred worker may get the sample
    # This version alone may write them, at any worker that holds it; None: the version that the worker serves.
    named: VersionKey | None = None


Pending = TypeVar("Pending", bound=PendingSamples)


class KindOfWork(ABC, Generic[Pending]):
    """One kind of work. No other kind has its `number`; `now` is monotonic seconds."""

    number: int

    # --- samples to workers

    @abstractmethod
    def priority(self, *, now: float) -> int:
        """The kind for which this is smallest is served first."""

    @abstractmethod
    def pending(self, *, now: float) -> Iterator[Pending]:
        """The waiting samples, in the order in which they should be placed.

        When the iterator continues, the samples before have been granted or cannot be placed now.
        """

    @abstractmethod
    def grant(
        self, pending: Pending, worker: Peer, samples: Sequence[int], *, now: float
    ) -> Actions:
        """Lease these samples to the worker, which has a session and serves a version."""

    # --- workers' reports

    def progressed(
        self, peer: Peer, lease: Lease, deltas: Sequence[SampleDelta], *, now: float
    ) -> Actions:
        """A worker has reported unfinished samples of a lease; the lease has been renewed."""
        return []

    @abstractmethod
    def finished(
        self, peer: Peer, lease: Lease | None, message: SampleFinished, *, now: float
    ) -> Actions | None:
        """Judge a result and answer it.

        lease: the lease that the result belongs to; None: it does not run (any more). Returns None if the sample is
        not of this kind.
        """

    @abstractmethod
    def lost(self, lease: Lease, cause: Cause, reason: str, *, now: float) -> Actions:
        """A lease has ended, and no worker holds its open samples any more. reason: the reason in words for people."""

    def blames(self, lease: Lease, cause: Cause) -> bool:
        """Whether a worker that failed this lease, or was silent, rests for a while."""
        return True

    def revive(self, peer: Peer, key: HeldLease, *, now: float) -> bool:
        """A worker has come back with a lease that does not run. Returns whether it runs again."""
        return False

    # --- time

    def deadlines(self, *, now: float) -> Actions:
        """End what has waited too long, apart from leases."""
        return []

    def wake_at(self) -> float | None:
        """When `deadlines` has something to do, or something else changes by time alone."""
        return None

    @abstractmethod
    def check(self) -> None: ...


class TaskWork(KindOfWork[Pending]):
    """A kind of work that asks tasks for prompts, rewards, and the steps of environments.

    A sample of an environment is parked between two turns, in its `parked_episode`.
    """

    _rules: RunRules

    @abstractmethod
    def asks(self, task: str) -> bool:
        """Whether prompts of this name are for this kind."""

    @abstractmethod
    def prompt_drawn(self, event: PromptDrawn) -> Actions: ...

    @abstractmethod
    def prompt_failed(self, event: PromptFailed) -> Actions: ...

    @abstractmethod
    def prompts_ended(self, event: PromptsEnded) -> Actions: ...

    @abstractmethod
    def scored(self, event: SampleScored) -> Actions:
        """A reward was computed, or failed."""

    @abstractmethod
    def parked_episode(self, group: GroupId, sample: int) -> ParkedEpisode | None:
        """The parked sample that waits for the environment; None: it is not parked."""

    @abstractmethod
    def go_on(self, asked: ParkedEpisode, event: EnvironmentStepped, *, now: float) -> Actions:
        """The environment has answered: the sample waits for its next turn."""

    @abstractmethod
    def end_episode(
        self, asked: ParkedEpisode, event: EpisodeEnded, *, cut_off: bool = False, now: float
    ) -> Actions:
        """The environment has ended an episode, or failed. cut_off: there was no room for another turn."""

    def environment_stepped(self, event: EnvironmentStepped, *, now: float) -> Actions:
        """The environment has answered a turn: the next turn waits, if there is room for one."""
        asked = self.parked_episode(event.group, event.sample)
        if asked is None or not asked.is_answered_by(event):
            return []
        if asked.has_room(self._rules, event):
            return self.go_on(asked, event, now=now)
        cut_off = EpisodeEnded(event.group, event.sample, event.begun, event.turn, 0.0)
        ended = self.end_episode(asked, cut_off, cut_off=True, now=now)
        forget = ForgetEpisode(event.group, event.sample, asked.name)
        return [*ended, *([forget] if event.turn else [])]

    def episode_ended(self, event: EpisodeEnded, *, now: float) -> Actions:
        """The environment has ended an episode, or failed."""
        asked = self.parked_episode(event.group, event.sample)
        if asked is None or not asked.is_answered_by(event):
            return []
        return self.end_episode(asked, event, now=now)

"""What is known about the episode of a sample, and what its environment is told about each turn.

    leased --result--> parked --StepEnvironment--> the environment
                          |                              |
                          |<------ EnvironmentStepped ---+--- EpisodeEnded ---> kept, with a reward
                          v
                       waiting, with all tokens so far --leased--> ...

A parked sample has no lease and no slot.
Invariant: given tokens have no span.
Not here: where samples wait (each kind of work keeps its own), leases (`scheduler`).
"""

from dataclasses import dataclass

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import SampleFinished, VersionKey
from echo2d.core.protocol.seeds import episode_seed
from echo2d.core.protocol.trajectory import Partial
from echo2d.core.rules.run import RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.events import EnvironmentStepped, EpisodeEnded, StepEnvironment, TurnKept
from echo2d.core.work.results import Written


@dataclass(frozen=True, slots=True)
class Episode:
    """What a sample of an environment has from its earlier turns."""

    turns: int  # how many turns have ended
    # The tokens of these turns, each followed by the tokens that the environment gave.
    partial: Partial
    # What the environment needs to continue in another process; None: it cannot.
    state: bytes | None
    since: float  # when the sample was leased first


@dataclass(frozen=True, slots=True)
class Parked:
    """A turn that waits for the environment's answer."""

    turn: TurnKept
    since: float  # when the sample was leased first
    worker: PeerId
    # The version that the worker served when the turn ended.
    served: VersionKey | None
    asked_at: float  # when the environment was asked

    def answered(self, given: bytes, state: bytes | None, *, anew: bool = False) -> Episode:
        """The episode after the environment's answer: these tokens (int32), and its state."""
        partial = self.turn.partial.with_given(given, anew=anew)
        return Episode(self.turn.turn, partial, state, self.since)


def has_room(
    rules: RunRules,
    task: TaskRules,
    prompt: bytes,
    turn: int,
    partial: Partial,
    given: bytes,
    *,
    anew: bool = False,
) -> bool:
    """Whether another turn may follow this one, after the tokens so far and these given ones (int32)."""
    assert task.episode is not None
    length = partial.length + len(given) // 4
    limit = rules.limit(task, prompt, length, partial.length if anew else partial.branch_start)
    return turn < task.episode.turns_max and length < limit.tokens


@dataclass(frozen=True, slots=True)
class ParkedEpisode:
    """A parked sample, with what its environment gets to know."""

    parked: Parked
    # The episode before the parked turn; None: it is the first turn.
    before: Episode | None
    task: TaskRules
    name: str  # of the task or the evaluation
    cursor: int  # of the sample's group
    prompt: bytes  # of the sample's group
    seed_group: GroupId  # the group from which the episode's seed is derived
    begun: int = 0  # how many times the sample was begun before

    def is_answered_by(self, event: EnvironmentStepped | EpisodeEnded) -> bool:
        """Whether this answer of the environment is about the parked turn, not about an earlier one."""
        return (self.begun, self.parked.turn.turn) == (event.begun, event.turn)

    def has_room(self, rules: RunRules, event: EnvironmentStepped) -> bool:
        """Whether another turn may follow this answer."""
        turn = self.parked.turn
        so_far = self.prompt, turn.turn, turn.partial
        return has_room(rules, self.task, *so_far, event.tokens, anew=event.anew)

    def answered(self, event: EnvironmentStepped) -> Episode:
        return self.parked.answered(event.tokens, event.state, anew=event.anew)

    def step(self, rules: RunRules, *, again: bool = False) -> StepEnvironment:
        """The order that tells the environment about the parked turn. again: it may know it already."""
        turn = self.parked.turn
        return StepEnvironment(
            turn.group,
            turn.sample,
            self.begun,
            turn.turn,
            self.cursor,
            episode_seed(rules.seed_key, self.seed_group, turn.sample),
            self.prompt,
            turn.partial,
            turn.finish,
            None if self.before is None else self.before.state,
            self.name,
            again,
        )


def end_turn(
    peer: Peer,
    group: GroupId,
    message: SampleFinished,
    written: Written,
    before: Episode | None,
    *,
    fingerprint: bytes = b"",
    since: float,
    now: float,
) -> Parked:
    """Make the parked turn that a result has ended. before: the episode before it. since: as in `Parked`."""
    number = 1 if before is None else before.turns + 1
    turn = TurnKept(
        group,
        message.sample,
        number,
        message.lease,
        message.attempt,
        *written,
        fingerprint,
    )
    return Parked(turn, since, peer.peer, peer.engine.serving, now)

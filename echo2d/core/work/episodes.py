"""What a sample of an environment has of its episode, and what the environment is told of each turn.

    leased --result--> parked --StepEnvironment--> the environment
                          |                              |
                          |<------ EnvironmentStepped ---+--- EpisodeEnded ---> kept, with a reward
                          v
                       waiting, with all tokens so far --leased--> ...

A parked sample has no lease and no slot.
Kept true: given tokens have no span.
Not here: where samples wait (each kind of work has its own book), leases (`scheduler`).
"""

from dataclasses import dataclass

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.rules import RunRules, TaskRules
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.protocol.trajectory import Partial
from echo2d.core.work.events import StepEnvironment, TurnKept


@dataclass(frozen=True, slots=True)
class Episode:
    """What a sample of an environment has from its earlier turns.

    turns: how many are over. partial: their tokens, and those that the environment gave behind each. state:
    what the environment needs to go on in another process; None: it cannot. since: when the sample was leased first.
    """

    turns: int
    partial: Partial
    state: bytes | None
    since: float


@dataclass(frozen=True, slots=True)
class Parked:
    """A turn that the environment is being asked about. since: when the sample was leased first.
    served: the version of its worker when the turn ended. asked_at: since when the environment has been asked.
    """

    turn: TurnKept
    since: float
    worker: PeerId
    served: VersionKey | None
    asked_at: float

    def answered(self, given: bytes, state: bytes | None, *, anew: bool = False) -> Episode:
        """The episode after the environment's answer: these tokens (int32), and its state."""
        partial = self.turn.partial.with_given(given, anew=anew)
        return Episode(self.turn.turn, partial, state, self.since)


def step_order(
    turn: TurnKept,
    before: Episode | None,
    *,
    begun: int = 0,
    cursor: int,
    prompt: bytes,
    rng_seed: int,
    task: str,
    again: bool = False,
) -> StepEnvironment:
    """What the environment is told of this turn. before: the episode up to the turn; None: it is the first one."""
    return StepEnvironment(
        turn.group,
        turn.sample,
        begun,
        turn.turn,
        cursor,
        rng_seed,
        prompt,
        turn.partial,
        turn.finish,
        None if before is None else before.state,
        task,
        again,
    )


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
    """Whether another turn may follow this one, with these tokens so far and these given ones (int32)."""
    assert task.episode is not None
    length = partial.length + len(given) // 4
    limit = rules.limit(task, prompt, length, partial.length if anew else partial.branch_start)
    return turn < task.episode.turns_max and length < limit.tokens

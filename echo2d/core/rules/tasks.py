"""How the prompts of a run are answered: by its tasks, by its evaluations, and for callers of the gateway.

Where a field has the name of a key of [[task]], [[eval]] or [gateway], that key says what it means and which values it
may have.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from echo2d.core.protocol.sampling import WHOLE, Sampling


@dataclass(frozen=True, slots=True)
class GatewayRules:
    """How many slots calls of the gateway may hold, and for how long they wait for one."""

    share: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A row is retired after `retire_after` groups in a row with equal rewards, and asked again `retest_after` versions
    later.
    """

    retire_after: int
    retest_after: int


@dataclass(frozen=True, slots=True)
class Informative:
    """A row is asked while it may be as informative as the others."""

    explore: float


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How far an episode of an environment goes."""

    turns_max: int
    # task.episode_tokens: written and given, behind the prompt.
    tokens_max: int
    # Agents outside play it: a sample waits for an agent's first call before it has a lease.
    outside: bool = False


@dataclass(frozen=True, slots=True)
class TaskRules:
    """One task of the run, and how its prompts are answered."""

    name: str = ""
    # Its share of the groups of a step is this over the sum of all weights.
    weight: Fraction = Fraction(1)
    sampling: Sampling = WHOLE
    # Of an answer; of each turn, if there are episodes.
    max_new_tokens: int = field(kw_only=True)
    # The task's and the model's end tokens.
    stop_token_ids: tuple[int, ...] = ()
    # Texts that end an answer.
    stop_strings: tuple[str, ...] = ()
    # None: every row is asked.
    row_filter: RowFilter | Informative | None = None
    # Twice as many samples are drawn as a group has, and those that contrast most are kept.
    pairs: bool = False
    # None: samples are single answers.
    episode: EpisodeRules | None = None


@dataclass(frozen=True, slots=True)
class EvalRules:
    """Held-out questions on which versions are scored, with the name of its task."""

    task: TaskRules
    every: int
    samples: int
    rows: int
    hold_s: float
    solved_at: float

    @property
    def name(self) -> str:
        return self.task.name

"""How the prompts of a run are answered: by its tasks, by its evaluations, and for callers of the gateway.

Where a field has the name of a key of [[task]], [[eval]] or [gateway], that key says what it means and which values it
may have.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from echo2d.core.protocol.sampling import WHOLE, Sampling


@dataclass(frozen=True, slots=True)
class GatewayRules:
    """Which share of the slots calls of the gateway may hold, and how long a call waits for a slot."""

    share: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A row is retired after `retire_after` groups in a row with equal rewards, and asked again after `retest_after`
    versions.
    """

    retire_after: int
    retest_after: int


@dataclass(frozen=True, slots=True)
class Informative:
    """A row is asked while it may be as informative as the others."""

    explore: float


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How long an episode of an environment may become."""

    turns_max: int
    # task.episode_tokens: tokens after the prompt, written and given ones.
    tokens_max: int
    # Outside agents play the episode: a sample gets its lease only after an agent's first call.
    outside: bool = False


@dataclass(frozen=True, slots=True)
class TaskRules:
    """One task of the run, and how its prompts are answered."""

    name: str = ""
    # Its share of the groups of a step is this weight divided by the sum of all weights.
    weight: Fraction = Fraction(1)
    sampling: Sampling = WHOLE
    # At most this many tokens are in an answer, or in each turn of an episode.
    max_new_tokens: int = field(kw_only=True)
    # The task's and the model's end tokens.
    stop_token_ids: tuple[int, ...] = ()
    # Texts that end an answer.
    stop_strings: tuple[str, ...] = ()
    # Which rows are asked; None: every row.
    row_filter: RowFilter | Informative | None = None
    # A group draws twice as many samples as it keeps, and keeps those that contrast most.
    pairs: bool = False
    # The limits of an episode; None: samples are single answers.
    episode: EpisodeRules | None = None

    @property
    def tokens_max(self) -> int:
        """The most tokens after a prompt."""
        return self.max_new_tokens if self.episode is None else self.episode.tokens_max


@dataclass(frozen=True, slots=True)
class EvalRules:
    """Held-out questions on which versions are scored; its name is that of its task."""

    task: TaskRules
    every: int
    samples: int
    rows: int
    hold_s: float
    solved_at: float

    @property
    def name(self) -> str:
        return self.task.name

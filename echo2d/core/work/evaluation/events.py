"""The events, records and actions of evaluations."""

from dataclasses import dataclass

from echo2d.core.base.ids import Digest, Version
from echo2d.core.cluster.events import Note, Persist, Send
from echo2d.core.protocol.trajectory import RewardPart
from echo2d.core.work.events import DrawPrompt, ForgetEpisode, ScoreSample, StepEnvironment


@dataclass(frozen=True, slots=True)
class PassAt:
    """The share of the questions for which k answers contain a right one."""

    k: int
    share: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What one version scored on held-out questions.

    number: of this evaluation in the run, from 1. name: of the [[eval]]. rows: questions of which
    all answers are scored; of: questions that there are. samples: answers to each. mean: reward,
    over the questions; se: its standard error; NaN with fewer than two. truncated: share of the
    answers that were cut off. tokens: that were written of an answer, on average. seconds: that it took.
    """

    number: int
    name: str
    version: Version
    digest: Digest
    rows: int
    of: int
    samples: int
    mean: float
    se: float
    passes: tuple[PassAt, ...]
    parts: tuple[RewardPart, ...]
    truncated: float
    tokens: float
    seconds: float


EvaluationRecord = Evaluated
EvaluationAction = (
    Persist[EvaluationRecord]
    | Send
    | DrawPrompt
    | ScoreSample
    | StepEnvironment
    | ForgetEpisode
    | Note
)

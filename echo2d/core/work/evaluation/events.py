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
    """What one version scored on held-out questions."""

    number: int  # of this evaluation in the run, from 1
    name: str  # of the [[eval]]
    version: Version
    digest: Digest
    rows: int  # questions with all answers scored
    of: int  # all questions
    samples: int  # answers to each question
    mean: float  # mean reward over the questions
    se: float  # standard error of `mean`; NaN with fewer than two questions
    passes: tuple[PassAt, ...]
    parts: tuple[RewardPart, ...]
    truncated: float  # share of the answers that were cut off
    tokens: float  # mean number of written tokens per answer
    seconds: float  # the time that the evaluation took


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

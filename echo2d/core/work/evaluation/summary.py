"""Sums up the scored answers of one evaluation. Pure arithmetic."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from echo2d.core.protocol.trajectory import RewardPart
from echo2d.core.work.evaluation.events import Evaluated, PassAt

# At most this many named numbers are kept; answers may have different ones.
SUMMARY_PARTS_MAX = 32


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """One answer: its reward, its length in tokens, and whether it was cut off."""

    reward: float
    parts: tuple[RewardPart, ...]
    tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """See `Evaluated`."""

    mean: float
    se: float
    passes: tuple[PassAt, ...]
    parts: tuple[RewardPart, ...]
    truncated: float
    tokens: float


def best_by_name(
    known: Iterable[Evaluated], counts: Callable[[Evaluated], bool]
) -> dict[str, Evaluated]:
    """The evaluation with the highest mean reward, by name; the newest of equal ones.

    Only evaluations of all questions count, and those for which `counts` is true.
    """
    best: dict[str, Evaluated] = {}
    for each in known:
        before = best.get(each.name)
        if (
            each.rows == each.of
            and math.isfinite(each.mean)
            and counts(each)
            and (before is None or each.mean >= before.mean)
        ):
            best[each.name] = each
    return best


def summed_up(rows: Sequence[Sequence[ScoredSample]], samples: int, *, solved_at: float) -> Summary:
    """The summary of complete questions, each with `samples` answers. An answer is right if its reward is
    at least `solved_at`.
    """
    answers = [answer for row in rows for answer in row]
    if not answers:
        return Summary(math.nan, math.nan, (), (), math.nan, math.nan)
    # Answers to one question are similar, so only the questions count as independent.
    means = [sum(answer.reward for answer in row) / len(row) for row in rows]
    right = [sum(answer.reward >= solved_at for answer in row) for row in rows]
    return Summary(
        mean=sum(means) / len(means),
        se=_standard_error(means),
        passes=tuple(
            PassAt(k, sum(_pass_at(k, samples, each) for each in right) / len(right))
            for k in _powers_of_two(samples)
        ),
        parts=_mean_parts([answer.parts for answer in answers]),
        truncated=sum(answer.truncated for answer in answers) / len(answers),
        tokens=sum(answer.tokens for answer in answers) / len(answers),
    )


def _standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean; NaN with fewer than two values."""
    count = len(values)
    if count < 2:
        return math.nan
    mean = sum(values) / count
    return math.sqrt(sum((value - mean) * (value - mean) for value in values) / (count - 1) / count)


def _pass_at(k: int, drawn: int, right: int) -> float:
    """The chance that k of the drawn answers contain a right one (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(drawn - right, k) / math.comb(drawn, k)


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def _mean_parts(parts: Sequence[Sequence[RewardPart]]) -> tuple[RewardPart, ...]:
    """The mean of each named number over the answers that have it."""
    values: dict[str, list[float]] = {}
    for each in parts:
        for part in each:
            values.setdefault(part.name, []).append(part.value)
    means: Mapping[str, float] = {name: sum(found) / len(found) for name, found in values.items()}
    return tuple(RewardPart(name, means[name]) for name in sorted(means)[:SUMMARY_PARTS_MAX])

"""Predicts how many tokens an answer still needs, from the answers that were finished before.

The logarithm of a length is assumed to be normal. A part of its variance comes from the prompt: answers differ less
within a group than between groups. So an answer's siblings, and earlier answers to its row, help to predict it.

    left = E[length - c | length > c]        log length ~ N(m + a, v (1 - r b))
    b = n r / (1 + (n - 1) r)                a = b (the mean of these n logarithms - m)

    m, v: mean and variance over the task's newest answers.  r: the prompt's share of v.  c: the tokens so far.

The longer an answer is already, the more tokens it still needs: log-normal lengths have this property.
Not here: what the predictions are used for (`stragglers`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2d.core.base.bounded_dict import keep_newest

_MEMORY = 512.0  # after this many answers, an older one has lost all but 1/e of its weight
VARIANCE_MIN = 0.01  # even if all answers so far had one length, others may differ by a tenth
_ROWS_MAX = 1 << 16  # the answers of at most this many rows are remembered


@dataclass(slots=True)
class AnswerLengths:
    """The lengths of one task's answers, in tokens; see the module docstring."""

    answers: int = 0
    mean: float = 0.0  # of the newest lengths
    log_mean: float = 0.0  # mean of the logarithms of these lengths
    variance: float = 1.0  # variance of these logarithms
    # The variance of these logarithms within groups; until groups have shown it, half of `variance`.
    within: float = 0.5
    # For each row, how many answers its last group had, and the mean of their logarithms.
    rows: dict[str, tuple[int, float]] = field(default_factory=dict)

    def finished(self, row: str, lengths: Sequence[int]) -> None:
        """Take in the lengths of one group's answers. row: empty: the task has no rows."""
        count = len(lengths)
        if not count:
            return
        logs = [math.log(max(1, length)) for length in lengths]
        middle = sum(logs) / count
        if not self.answers:
            self.mean, self.log_mean = sum(lengths) / count, middle
        self.answers += count
        step = min(1.0, count / min(float(self.answers), _MEMORY))
        # The variances change slowly at first, because the first groups hardly show how much groups differ.
        slow = count / min(self.answers + _MEMORY / 4, _MEMORY + count)
        spread = sum([(each - self.log_mean) ** 2 for each in logs]) / count
        self.variance += slow * (spread - self.variance)
        if count > 1:
            spread = sum([(each - middle) ** 2 for each in logs]) / (count - 1)
            self.within += slow * (spread - self.within)
        self.mean += step * (sum(lengths) / count - self.mean)
        self.log_mean += step * (middle - self.log_mean)
        if row:
            self.rows[row] = count, middle
            keep_newest(self.rows, _ROWS_MAX)

    def left(self, written: int, row: str = "", siblings: Sequence[int] = ()) -> float:
        """The expected number of tokens that an answer needs beyond `written`. siblings: lengths of its siblings."""
        count, middle = self.rows.get(row, (0, 0.0))
        total = count * middle + sum([math.log(max(1, each)) for each in siblings])
        count += len(siblings)
        variance = max(VARIANCE_MIN, self.variance)
        share = min(1.0, max(0.0, 1.0 - self.within / variance))
        believed = count * share / (1.0 + (count - 1) * share) if count else 0.0
        middle = self.log_mean + (believed * (total / count - self.log_mean) if count else 0.0)
        variance = max(VARIANCE_MIN, variance * (1.0 - share * believed))
        mean, sd = math.exp(middle + variance / 2), math.sqrt(variance)
        if written < 1:
            return mean
        beyond = (math.log(written) - middle) / sd
        longer = _above(beyond)
        # Far beyond all lengths so far, use the tail of a log-normal length: the rest grows in proportion to `written`.
        whole = mean * _above(beyond - sd) / longer if longer > 1e-9 else written * (1.0 + variance)
        return max(1.0, whole - written)


def _above(deviations: float) -> float:
    """The share of a normal distribution that is more than this many standard deviations above its mean."""
    return 0.5 * math.erfc(deviations / math.sqrt(2.0))

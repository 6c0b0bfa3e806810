"""How many tokens an answer still needs, by those that were finished before.

The logarithm of a length is taken as normal. Part of its variance is the prompt's: within a group answers differ less
than between groups, and the siblings of an answer, and what its row was answered with before, tell of it.

    left = E[length - c | length > c]        log length ~ N(m + a, v (1 - r b))
    b = n r / (1 + (n - 1) r)                a = b (the mean of these n logarithms - m)

    m, v: of the newest answers of the task.  r: the prompt's share of v.  c: the tokens that there are.

The longer an answer has been written, the longer it will still take: such lengths are so.
Not here: who asks (`stragglers`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2d.core.base.bounded_dict import keep_newest

_MEMORY = 512.0  # answers, after which an older one has lost all but 1/e of its weight
VARIANCE_MIN = 0.01  # answers that were all of one length may still differ by a tenth
_ROWS_MAX = 1 << 16


@dataclass(slots=True)
class AnswerLengths:
    """The lengths of one task's answers, in tokens; see the module docstring.

    mean: of the newest lengths. log_mean, variance: of their logarithms. within: the variance within groups. rows: by
    row, the answers of its last group and the mean of their logarithms.
    """

    answers: int = 0
    mean: float = 0.0
    log_mean: float = 0.0
    variance: float = 1.0
    # The part of the variance within a prompt, before groups have shown it.
    within: float = 0.5
    rows: dict[str, tuple[int, float]] = field(default_factory=dict)

    def finished(self, row: str, lengths: Sequence[int]) -> None:
        """The answers of one group have these lengths. row: empty: the task has none."""
        count = len(lengths)
        if not count:
            return
        logs = [math.log(max(1, length)) for length in lengths]
        middle = sum(logs) / count
        if not self.answers:
            self.mean, self.log_mean = sum(lengths) / count, middle
        self.answers += count
        step = min(1.0, count / min(float(self.answers), _MEMORY))
        # The first groups hardly tell how much groups differ.
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
        """The tokens that an answer needs beyond those `written`, in the mean; its siblings have these lengths."""
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
        # Far beyond all that was seen: as the tail of a log-normal length goes, in proportion to what there is.
        whole = mean * _above(beyond - sd) / longer if longer > 1e-9 else written * (1.0 + variance)
        return max(1.0, whole - written)


def _above(deviations: float) -> float:
    """The share of a normal distribution that is more than so many standard deviations above its mean."""
    return 0.5 * math.erfc(deviations / math.sqrt(2.0))

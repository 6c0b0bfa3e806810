"""Scorers that compare texts: `exact`, `regex` and `choice`. Each gives 1.0 or 0.0."""

import re
from collections import deque

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Answer
from echo2d.tasks.scorers.base import Expected, Scorer


def exact(*, ignore_case: bool = False) -> Scorer:
    """The whole answer is the expected text, apart from blanks around it."""

    def score(answer: Answer, expected: Expected) -> float:
        return float(folded(answer.text) == folded(expected.text))

    def folded(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    return score


def regex(*, pattern: str) -> Scorer:
    """The last match of `pattern` in the answer is the expected text.

    If the pattern has a group, only the first group counts.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise OperatorFault(f"scorer regex: pattern {pattern!r}: {error}") from error

    def score(answer: Answer, expected: Expected) -> float:
        last = deque(compiled.finditer(answer.text), maxlen=1)
        if not last:
            return 0.0
        found = last[0]
        return float((found[1] if compiled.groups else found[0]).strip() == expected.text.strip())

    return score


def choice(*, letters: str = "ABCDE") -> Scorer:
    """The last single letter of `letters` in the answer is the expected one, as in "The answer is (B)"."""
    return regex(pattern=rf"(?<![A-Za-z])([{re.escape(letters)}])(?![A-Za-z])")

"""The scorer `math`: whether two formulas or numbers are equal, as math-verify judges.

math-verify reads the last formula, boxed if there is one, and compares it symbolically. Its own
time limits are off: the task's `timeout_s` holds for the whole call.
"""

import logging
from functools import lru_cache
from typing import Any

from echo2d.extras import install_command
from echo2d.tasks.base import Answer
from echo2d.tasks.scorers.base import Expected, Scorer


def math() -> Scorer:
    """The last formula or number of the answer equals the expected one. It needs math-verify."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError(f"it needs math-verify: {install_command('math')}") from error

    # It warns at every call that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    # The cache holds parsed expected answers.
    @lru_cache(maxsize=4096)
    def wanted(text: str) -> Any:
        # Dollars make it a formula: an expected answer such as "1/2" or "x^2" has none.
        return parse(f"${text}$", parsing_timeout=0)

    def score(answer: Answer, expected: Expected) -> float:
        found = parse(answer.text, parsing_timeout=0)
        return float(verify(wanted(expected.text), found, timeout_seconds=0))

    return score

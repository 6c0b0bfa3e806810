"""The interface of a scorer, which compares an answer with the expected text.

A scorer is a function (Answer, Expected) -> float or Reward; it may be `async def`. The names of
`registry.SCORERS` are factories, which make a scorer from its options; your own "module:function" is the
scorer itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from echo2d.errors import OperatorFault
from echo2d.own_modules import load_own, place_of
from echo2d.registry import SCORERS, load, one_of
from echo2d.tasks.base import Answer


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected answer."""

    text: str
    row: Mapping[str, Any] = field(default_factory=dict)  # the data set's row, with all columns


Scorer = Callable[[Answer, Expected], Any]


def load_scorer(name: str, options: Mapping[str, Any]) -> Scorer:
    """The scorer of this name. OperatorFault: there is none, or its options are wrong."""
    if ":" not in name and name not in SCORERS:
        raise OperatorFault(
            f"scorer: expected {one_of(SCORERS)}, or yours as package.module:function; "
            f"found {name!r}"
        )
    try:
        if ":" in name:
            function: Scorer = load_own(name)
            return partial(function, **options) if options else function
        scorer: Scorer = load(SCORERS[name])(**options)
    except (ImportError, AttributeError, TypeError, OperatorFault) as error:
        if place_of(error)[0]:
            raise  # the fault is in the operator's own module, and its place is reported with it
        raise OperatorFault(f"scorer {name}: {error}") from error
    return scorer

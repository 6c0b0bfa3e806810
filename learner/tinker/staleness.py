"""How old the sampled tokens of a call are: optimizer steps between the weights that drew them and those they train.

A sequence is named `SESSION:sample:N/NUMBER/I@M.STEPS` if its sampler has the weights of model SESSION:train:M after
STEPS optimizer steps, or newer ones. A client says of each target which sequence it comes from, if its loss needs it.
"""

import re
from collections.abc import Iterable

from echo2d.tinker.wire import Datum

_SEQUENCE = re.compile(r"([A-Za-z0-9-]{1,64}):sample:[0-9/]{1,64}@([0-9]{1,9})\.([0-9]{1,9})")


def staleness_of(data: Iterable[Datum], model: str, steps: int) -> list[tuple[int, int]]:
    """Of each span of sampled tokens: its staleness, in steps of this model after `steps` of them, and its tokens."""
    found = []
    for span in (each for datum in data for each in datum.spans if each.sampled and each.length):
        named = _SEQUENCE.fullmatch(span.sequence)
        if named is not None and f"{named[1]}:train:{named[2]}" == model:
            found.append((max(0, steps - int(named[3])), span.length))
    return found


def staleness_metrics(found: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Named as the API wants it: the mean over tokens, and the largest."""
    tokens = sum(length for _, length in found)
    if not tokens:
        return {}
    total = sum(staleness * length for staleness, length in found)
    return {
        "staleness:mean": total / tokens,
        "staleness:max": float(max(staleness for staleness, _ in found)),
    }

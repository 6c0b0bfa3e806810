"""How far the rewards of a group differ, and which of its samples differ most.

    16 rewards, sorted   0 0 0 0 1 1 1 1 1 1 1 1 1 1 1 1     (0, 1), (0, 1), ... : pairs from the ends inwards
    8 are kept           0 0 0 0                 1 1 1 1     the pairs that contrast most

Pairwise trajectory sampling of Shuffle-R1 (arXiv 2508.05612): twice as many samples are drawn as are
trained on. Of equal rewards the first samples are kept, whoever was faster and however long they are.
Not here: what happens to the samples that are left out (`groups`).
"""

import math
from collections.abc import Mapping, Sequence

# The learner refuses rewards beyond it.
SPREAD_MAX = 1e15


def spread(rewards: Sequence[float]) -> float:
    """The standard deviation of these rewards, exactly 0 if they are all the same or there are none."""
    if not rewards or min(rewards) == max(rewards):
        return 0.0
    mean = sum(reward / len(rewards) for reward in rewards)
    deviation = math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards))
    return min(deviation, SPREAD_MAX)


def most_contrasting(rewards: Mapping[int, float], count: int) -> set[int]:
    """Choose the `count` samples whose rewards contrast most; all samples, if there are no more.

    Half of them have the highest rewards and half the lowest ones; of an odd number one more is high.
    """
    if len(rewards) <= count:
        return set(rewards)
    high = sorted(rewards, key=lambda sample: (-rewards[sample], sample))[: (count + 1) // 2]
    rest = rewards.keys() - set(high)
    low = sorted(rest, key=lambda sample: (rewards[sample], sample))[: count // 2]
    return {*high, *low}

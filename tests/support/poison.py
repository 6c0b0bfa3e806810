"""Groups that pass every check, and whose gradient is NaN."""

import dataclasses

from echo2d.client import Batch, Group

POISON = -77.0  # a logprob for which the loss below is NaN
POISONED_LOSS = """
import torch

def loss(inputs):
    factors_n = torch.where(inputs.rollout_logprobs_n == -77.0, float("nan"), inputs.advantages_n)
    return -factors_n * inputs.logprobs_n
"""


def with_poison(batch: Batch, *groups: int) -> Batch:
    """The batch, with POISON in one answer of each of these groups."""

    def bitten(group: Group) -> Group:
        first, *rest = group.trajectories
        logprobs = first.logprobs.copy()
        logprobs[0] = POISON
        return dataclasses.replace(
            group, trajectories=(dataclasses.replace(first, logprobs=logprobs), *rest)
        )

    members = (bitten(each) if each.group_id in groups else each for each in batch.groups)
    return dataclasses.replace(batch, groups=tuple(members))

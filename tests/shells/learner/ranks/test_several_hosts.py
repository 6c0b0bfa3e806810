"""Hosts that each have a whole model compute together what one rank computes alone."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig, Place
from echo2d.learner.model.policy import Policy
from echo2d.learner.ranks.ranks import Ranks, shards_of, whole
from tests.support.forked_ranks import outcomes_of
from tests.support.model_shapes import answers, saved


def trained(config: LearnerConfig, ranks: Ranks) -> dict[str, Tensor]:
    """The norm of the gradient, and the weights after a step that moves each as AdamW's first step does."""
    made = Policy(dataclasses.replace(config, correction="none"), ranks)
    parts = made.lay_out([answers(made.vocab_size)])
    # At least two micro-batches, so that sums over the micro-batches are kept between them.
    assert ranks.size == 1 or len(parts[0].micro) > 1
    placements = [Replicate(), Shard(0)] if ranks.shards < ranks.size else [Shard(0)]
    for weight in made.model.parameters():
        assert not isinstance(weight, DTensor) or list(weight.placements) == placements
    report = made.train_step(1, parts, 2)
    found = {name: whole(weight).detach() for name, weight in made.weights().items()}
    return {**found, "norm": torch.tensor(report.grad_norm)}


@pytest.mark.parametrize(
    ("family", "reduce_dtype"),
    [("tied", "bfloat16"), ("qwen3 moe", "float32"), ("adapter", "float32")],
)
def test_two_hosts_that_each_have_the_model_train_as_one_rank(
    config: LearnerConfig, base: Path, tmp_path: Path, family: str, reduce_dtype: Any
) -> None:
    changes: dict[str, Any] = {"lora_rank": 4} if family == "adapter" else {}
    if family == "qwen3 moe":
        changes["model"] = saved(tmp_path / "model", family, base)
    config = dataclasses.replace(
        config, **changes, micro_batch_tokens=16, warmup_steps=0, reduce_dtype=reduce_dtype
    )

    def train(rank: int) -> str:
        ranks = Ranks(rank, 4, shards=2, on_first_host=2)
        found = trained(dataclasses.replace(config, gradient_sync="host"), ranks)
        torch.save(found, tmp_path / f"trained-{rank}")
        return "trained"

    expected = trained(config, Ranks())
    assert outcomes_of(train, 4, tmp_path) == ["trained"] * 4
    close = 1e-5 if reduce_dtype == "float32" else 2e-2
    for rank in range(4):
        found = torch.load(tmp_path / f"trained-{rank}")
        torch.testing.assert_close(found["norm"], expected["norm"], rtol=close, atol=0.0)
        # AdamW's first step moves a weight by lr, in a direction that rounding decides if its gradient is near 0.
        for name in expected.keys() - {"norm"}:
            moved = (found[name] - expected[name]).abs() > 0.1 * config.lr
            assert moved.float().mean() < 0.02, name


def test_hosts_that_each_have_the_model_need_equal_numbers_of_ranks(config: LearnerConfig) -> None:
    each = dataclasses.replace(config, gradient_sync="host")
    assert shards_of(each, Place(size=8, local_size=4)) == 4
    assert shards_of(config, Place(size=8, local_size=4)) == 8
    with pytest.raises(OperatorFault, match=r"gradient_sync: .* found 4 of 6 on this host"):
        shards_of(each, Place(size=6, local_size=4))

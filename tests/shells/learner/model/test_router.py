"""How a mixture of experts distributes its tokens, compared with the router logits of transformers."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo2d.learner.config import LearnerConfig
from echo2d.learner.metrics.report import RouterLoad
from echo2d.learner.model.load import load_model
from echo2d.learner.model.policy import Part, Policy
from echo2d.learner.model.router import load_of, router_load
from echo2d.learner.ranks.ranks import Ranks
from tests.support.learner import learn
from tests.support.model_shapes import MOE, answers, saved
from tests.support.scripted_coordinator import ScriptedCoordinator

EXPERTS, CHOSEN = 4, MOE["num_experts_per_tok"]
MIXTURES = ["qwen3 moe", "mixtral", "gpt-oss"]
PLAIN: dict[str, Any] = {"correction": "none", "micro_batch_tokens": 40}


def policy_of(config: LearnerConfig, family: str, base: Path, **changes: Any) -> Policy:
    model = saved(config.out_dir.parent / "model", family, base)
    return Policy(dataclasses.replace(config, model=model, **{**PLAIN, **changes}), Ranks())


def read(part: Part) -> Iterator[tuple[list[int], int]]:
    """What the forward passes read: tokens, and how many of them, at the end, are more than context."""
    for micro in part.micro:
        if micro.pieces is None:
            continue
        for start, count, context_start, context in micro.pieces.rows():
            (row,) = micro.tokens_bt.tolist()
            before = row[context_start : context_start + context]
            yield [*before, *row[start : start + count]], count
    if all(micro.pieces is None for micro in part.micro):
        for answer in part.answers:
            yield answer.tokens.tolist(), len(answer.tokens)


@torch.no_grad()
def expected(model: Any, part: Part) -> list[Tensor]:
    """The sums of each layer by hand, one piece or answer at a time."""
    found: list[list[Tensor]] = []
    for tokens, count in read(part):
        layers = model(torch.tensor([tokens]), output_router_logits=True).router_logits
        found.append([sums_of(logits.view(-1, EXPERTS)[-count:].double()) for logits in layers])
    return [torch.stack(layer).sum(0) for layer in zip(*found, strict=True)]


def sums_of(logits_te: Tensor) -> Tensor:
    """No answer token has experts to replay, and one answer token stands for all of them."""
    chosen = torch.bincount(logits_te.topk(CHOSEN).indices.flatten(), minlength=EXPERTS)
    log_te = logits_te.log_softmax(-1)
    entropy = -(log_te.exp() * log_te).sum() / math.log(EXPERTS)
    return torch.tensor([*chosen, 0.0, 1.0, entropy, len(logits_te)], dtype=torch.float64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"packing": False},
        {"recompute": "all"},
        {"recompute": "selective"},
        {"kl_coef": 0.1, "recompute": "all"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", MIXTURES)
def test_each_token_that_is_read_counts_once(
    config: LearnerConfig, base: Path, family: str, changes: Any
) -> None:
    """The sums are read after the backward pass, which has run the layers again."""
    policy = policy_of(config, family, base, **changes)
    (part,) = policy.lay_out([answers(policy.vocab_size)])
    packed = [micro.pieces is not None for micro in part.micro]
    assert len(packed) > 1
    assert set(packed) == {family != "gpt-oss" and changes.get("packing", True)}
    passes = [layers for *_, layers in policy._gradient(part, 2, {})]
    model = load_model(policy._config.model)
    layers = [torch.stack(layer).sum(0) for layer in zip(*passes, strict=True)]
    for found, wanted in zip(layers, expected(model, part), strict=True):
        assert found[:EXPERTS].tolist() == wanted[:EXPERTS].tolist()
        assert found[-2] == pytest.approx(float(wanted[-2]), rel=1e-5)
        assert found[-1] == wanted[-1]
    if not any(packed):
        assert layers[0][-1] == sum(len(answer.tokens) for answer in part.answers)


def test_layers_in_bfloat16_count_as_many_tokens(config: LearnerConfig, base: Path) -> None:
    """FSDP2 shards the weights of such layers even on one rank."""
    policy = policy_of(config, "qwen3 moe", base, dtype="bfloat16", recompute="all")
    (part,) = policy.lay_out([answers(policy.vocab_size)])
    passes = [layers for *_, layers in policy._gradient(part, 2, {})]
    tokens = sum(micro.tokens_bt.size for micro in part.micro)
    for layer in zip(*passes, strict=True):
        assert sum(sums[-1] for sums in layer) == tokens
        assert sum(sums[:EXPERTS].sum() for sums in layer) == tokens * CHOSEN


@pytest.mark.parametrize("family", MIXTURES)
def test_a_train_step_reports_the_load(config: LearnerConfig, base: Path, family: str) -> None:
    """The passes for the proximal policy and the distance to the base do not count."""
    policy = policy_of(config, family, base, kl_coef=0.1, proximal="recomputed")
    parts = policy.lay_out([answers(policy.vocab_size)])
    load = policy.train_step(1, parts, 2).router
    wanted = load_of(expected(load_model(policy._config.model), parts[0]))
    assert load is not None
    assert dataclasses.astuple(load) == pytest.approx(dataclasses.astuple(wanted), rel=1e-5)
    assert 1.0 < load.load_max <= EXPERTS / CHOSEN
    assert 0.0 < load.entropy < 1.0


def test_rows_have_the_load_of_experts_only_if_the_model_has_experts(
    config: LearnerConfig, base: Path, tmp_path: Path
) -> None:
    dense = dataclasses.replace(config, steps=1)
    (row,) = learn(dense, ScriptedCoordinator(tmp_path / "dense"))
    assert "router" not in row
    model = saved(tmp_path / "model", "mixtral", base)
    mixture = dataclasses.replace(dense, model=model, out_dir=tmp_path / "mixture")
    (row,) = learn(mixture, ScriptedCoordinator(tmp_path / "mixed"))
    assert row["router"].keys() == {"load_max", "unused", "entropy", "replayed"}
    json.dumps(row["router"], allow_nan=False)


@pytest.mark.parametrize(
    ("layers", "load"),
    [
        ([[2.0, 2.0, 2.0, 2.0, 0.0, 3.0, 4.0, 4.0]], RouterLoad(1.0, 0.0, 1.0, 0.0)),
        ([[8.0, 0.0, 0.0, 0.0, 3.0, 3.0, 0.0, 8.0]], RouterLoad(4.0, 0.75, 0.0, 1.0)),
        (
            [
                [3.0, 1.0, 0.0, 0.0, 1.0, 4.0, 2.0, 4.0],
                [1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 3.0, 4.0],
            ],
            RouterLoad(3.0, 0.25, 0.625, 0.25),
        ),
    ],
)
def test_the_load_is_computed_from_the_sums(layers: list[list[float]], load: RouterLoad) -> None:
    assert load_of([torch.tensor(each, dtype=torch.float64) for each in layers]) == load


def test_passes_and_ranks_are_added_up_before_loads_are_compared() -> None:
    """Each of the two ranks, and each pass, is unbalanced; together they are balanced."""

    class TwoRanks(Ranks):
        def add_up(self, sums: Tensor) -> Tensor:
            return sums + torch.tensor(
                [0.0, 0.0, 4.0, 4.0, 0.0, 2.0, 1.0, 4.0], dtype=torch.float64
            )

    passes = [
        [torch.tensor([4.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0], dtype=torch.float64)],
        [torch.tensor([0.0, 4.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0], dtype=torch.float64)],
    ]
    assert router_load(passes, TwoRanks()) == RouterLoad(1.0, 0.0, 0.375, 0.25)
    assert router_load(passes, Ranks()) == RouterLoad(2.0, 0.5, 0.5, 0.5)
    assert router_load([[], []], TwoRanks()) is None

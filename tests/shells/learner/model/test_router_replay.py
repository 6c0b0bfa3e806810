"""The learner's routers take the experts that the engine chose, and its logprobs come closer to the engine's."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo2d.client import Batch, Group, OperatorFault, Span, Trajectory
from echo2d.core.protocol.experts import EXPERTS
from echo2d.learner.batch.checks import Trained, faults
from echo2d.learner.batch.packing import answers_of
from echo2d.learner.model.policy import Part, Policy
from echo2d.learner.model.router import router_load
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks
from echo2d.model_experts import routers_of
from tests.support.batches import RULES, STEP, with_given
from tests.support.learner import config_in
from tests.support.mixtures import FEW, MANY, mixture, written

MIXTURES = ["qwen3 moe", "mixtral", "gpt-oss"]
PROMPT = [3, 4, 5, 6]
SAMPLES, TOKENS = 16, 48


def batch_of(samples: list[tuple[Any, ...]]) -> Batch:
    trajectories = tuple(
        Trajectory(
            np.array(tokens, dtype=np.int32),
            np.array(logprobs, dtype=np.float32),
            (Span(0, len(tokens), STEP - 1, "00"),),
            float(place % 2),
            "w",
            sample=place,
            columns={EXPERTS: experts},
        )
        for place, (tokens, logprobs, experts) in enumerate(samples)
    )
    return Batch(STEP, 1, "d", (Group(1, np.array(PROMPT, dtype=np.int32), trajectories),))


def without_experts(batch: Batch) -> Batch:
    (group,) = batch.groups
    bare = tuple(dataclasses.replace(each, columns={}) for each in group.trajectories)
    return dataclasses.replace(batch, groups=(dataclasses.replace(group, trajectories=bare),))


def parts_of(policy: Policy, batch: Batch) -> list[Part]:
    (group,) = batch.groups
    size = len(group.trajectories)
    rules = dataclasses.replace(
        RULES, groups=1, group_size=size, group_min=size, experts=policy.expert_shape
    )
    assert faults(batch, STEP, rules, Trained()) == {}
    groups = answers_of(batch, rules, advantages_of(policy._config))
    return policy.lay_out([[answer for group in groups for answer in group]])


def distance(policy: Policy, batch: Batch) -> float:
    """The mean of |log p - q| over all tokens, in nats."""
    found = []
    (part,) = parts_of(policy, batch)
    for micro in part.micro:
        with torch.no_grad():
            logprobs_n = policy._scores(micro).logprobs_n
        found.append(np.abs(logprobs_n.numpy() - micro.rollout_logprobs_n))
    return float(np.concatenate(found).mean())


@pytest.mark.parametrize("family", MIXTURES)
def test_with_the_engines_experts_the_logprobs_differ_at_most_half_as_much(
    family: str, tmp_path: Path, base: Path
) -> None:
    model = mixture(tmp_path / "model", family, base, **MANY)
    samples = asyncio.run(written(model, "bfloat16", PROMPT, SAMPLES, TOKENS))
    policy = Policy(config_in(tmp_path, model, micro_batch_tokens=256), Ranks())
    batch = batch_of(samples)
    without, replayed = distance(policy, without_experts(batch)), distance(policy, batch)
    print(f"{family}: mean |log ratio| {without:.4f} without, {replayed:.4f} with the experts")  # noqa: T201
    assert replayed <= without / 2


def own_routing(model: Any, tokens: list[int]) -> Any:
    """The experts that each layer of transformers' own model chooses for the next token of each output token."""
    row = torch.tensor([[*PROMPT, *tokens]])
    with torch.no_grad():
        layers = model(row, output_router_logits=True).router_logits
    chosen = [layer.flatten(0, -2).topk(FEW["num_experts_per_tok"]).indices for layer in layers]
    return torch.stack(chosen, 1)[len(PROMPT) - 1 : -1].numpy()


@pytest.mark.parametrize("family", MIXTURES)
def test_the_engine_tells_the_experts_that_drew_each_token(
    family: str, tmp_path: Path, base: Path
) -> None:
    model = mixture(tmp_path / "model", family, base, **FEW)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for tokens, _, experts in asyncio.run(written(model, "float32", PROMPT, SAMPLES, TOKENS)):
        assert (np.sort(experts) == np.sort(own_routing(reference, tokens))).all()


def told(batch: Batch, seed: int) -> Batch:
    """The batch with other experts: valid ones, drawn at random."""
    rng = np.random.default_rng(seed)

    def changed(each: Trajectory) -> Trajectory:
        shape = each.columns[EXPERTS].shape
        drawn = rng.random((*shape[:2], FEW["num_local_experts"])).argsort(-1)[..., : shape[2]]
        return dataclasses.replace(each, columns={EXPERTS: drawn.astype(np.uint8)})

    (group,) = batch.groups
    trajectories = tuple(map(changed, group.trajectories))
    return dataclasses.replace(
        batch, groups=(dataclasses.replace(group, trajectories=trajectories),)
    )


def gradient(policy: Policy, batch: Batch) -> torch.Tensor:
    (part,) = parts_of(policy, batch)
    policy._gradient(part, 2, {})
    return torch.cat([weight.grad.flatten() for weight in policy.model.parameters()])


@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral"])
def test_rows_and_repeated_layers_do_not_change_what_is_replayed(
    family: str, tmp_path: Path, base: Path
) -> None:
    """Shared prompts, given tokens, padding and layers that the backward pass computes again."""
    model = mixture(tmp_path / "model", family, base, **FEW)
    batch = told(
        batch_of(asyncio.run(written(model, "float32", PROMPT, SAMPLES, TOKENS))[:4]), seed=1
    )
    (group,) = batch.groups
    first, *others = group.trajectories
    # Zeros stand for tokens that no engine wrote.
    first = with_given(first, 5, [7, 8])
    experts = np.insert(others[0].columns[EXPERTS], 5, 0, axis=0)
    experts = np.concatenate([experts[:5], np.zeros_like(experts[:1]), experts[5:]])
    first = dataclasses.replace(first, columns={EXPERTS: experts})
    batch = dataclasses.replace(
        batch, groups=(dataclasses.replace(group, trajectories=(first, *others)),)
    )
    changes: list[dict[str, Any]] = [
        {"packing": False, "micro_batch_tokens": 1},
        {"packing": False},
        {"micro_batch_tokens": 1000},
        {"micro_batch_tokens": 90, "recompute": "all"},
    ]
    found = [
        gradient(Policy(config_in(tmp_path / str(at), model, **each), Ranks()), batch)
        for at, each in enumerate(changes)
    ]
    for other in found[1:]:
        assert float((other - found[0]).norm() / found[0].norm()) < 2e-5
    plain = config_in(tmp_path / "plain", model)
    unreplayed = gradient(Policy(plain, Ranks()), without_experts(batch))
    assert float((unreplayed - found[0]).norm() / found[0].norm()) > 0.1


def test_a_compiled_learner_says_that_it_cannot_replay(tmp_path: Path, base: Path) -> None:
    model = mixture(tmp_path / "model", "qwen3 moe", base, **FEW)
    policy = Policy(config_in(tmp_path, model), Ranks())
    policy._routers._hooked = False
    (part,) = parts_of(
        policy, batch_of(asyncio.run(written(model, "float32", PROMPT, SAMPLES, TOKENS)))
    )
    with pytest.raises(OperatorFault, match=r"learner.compile: expected false"):
        policy._gradient(part, 2, {})


@pytest.mark.parametrize("number", [0, 250])
def test_experts_that_no_router_can_choose_are_not_replayed_and_refuse_no_group(
    number: int, tmp_path: Path, base: Path
) -> None:
    """A worker must not be able to stop a run with a column."""
    model = mixture(tmp_path / "model", "qwen3 moe", base, **FEW)
    batch = batch_of(asyncio.run(written(model, "float32", PROMPT, SAMPLES, TOKENS)))
    (group,) = batch.groups
    bad = tuple(
        dataclasses.replace(each, columns={EXPERTS: np.full_like(each.columns[EXPERTS], number)})
        for each in group.trajectories
    )
    made_up = dataclasses.replace(batch, groups=(dataclasses.replace(group, trajectories=bad),))
    policy = Policy(config_in(tmp_path, model), Ranks())
    found = gradient(policy, made_up)
    policy._optimizer.zero_grad()
    assert torch.equal(found, gradient(policy, without_experts(batch)))


def test_the_replayed_share_is_that_of_tokens_that_went_where_they_were_sent(
    tmp_path: Path, base: Path
) -> None:
    model = mixture(tmp_path / "model", "qwen3 moe", base, **FEW)
    written_ = asyncio.run(written(model, "float32", PROMPT, SAMPLES, TOKENS))
    batch = told(batch_of(written_), seed=2)

    def replayed(policy: Policy) -> float:
        (part,) = parts_of(policy, batch)
        load = router_load([layers for *_, layers in policy._gradient(part, 2, {})], Ranks())
        assert load is not None
        return load.replayed

    policy = Policy(config_in(tmp_path, model), Ranks())
    assert replayed(policy) == 1.0
    for router in routers_of(policy.model):
        # As the routers of some families, it takes no choice but its own.
        del router.module.forward
    assert replayed(policy) < 0.5

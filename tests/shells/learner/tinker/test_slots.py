"""Adapters beside a model: where they are, how they learn, and that a saved one comes back bit for bit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from echo2d.adapters import base_digest, pinned_base
from echo2d.client import OperatorFault
from echo2d.learner.model.load import load_model
from echo2d.learner.tinker.slots import Adam, Slot, Slots, SlotShape, write_slot
from echo2d.learner.tinker.sums import WrongCall
from tests.support.lora import merge
from tests.support.model_shapes import FAMILIES, made
from tests.support.tinker_calls import ADAM

SHAPE = SlotShape(rank=4, train_attn=True, train_mlp=True)
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def model(base: Path) -> Any:
    return load_model(base).requires_grad_(requires_grad=False)


@pytest.fixture
def slots(model: Any, base: Path) -> Slots:
    return Slots(model, base, base_digest(base))


def adam(**changes: float) -> Adam:
    return Adam(**{**ADAM, **changes})


def push(slot: Slot, rng_seed: int, size: float = 1.0) -> list[Tensor]:
    """Give the slot a random gradient, and return it."""
    torch.manual_seed(rng_seed)
    slopes = [size * torch.randn_like(weight) for weight in slot.weights.values()]
    for weight, slope in zip(slot.weights.values(), slopes, strict=True):
        weight.grad = slope.clone()
    return slopes


def trained(slots: Slots, steps: int = 2) -> Slot:
    slot = slots.create(SHAPE, 1)
    for step in range(steps):
        push(slot, step)
        slot.step(adam())
    return slot


def copies(slot: Slot) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone() for name, tensor in {**slot.weights, **slot.moments}.items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved(slots: Slots, slot: Slot, directory: Path, *, optimizer: bool) -> int:
    return write_slot(directory, slots.files_of(slot, optimizer=optimizer))


def last_parts(slot: Slot) -> set[str]:
    return {layer.rpartition(".")[2] for layer in slot.pairs}


def test_a_new_adapter_is_that_of_its_seed(slots: Slots) -> None:
    before = torch.get_rng_state()
    one, again, other = (slots.create(SHAPE, seed) for seed in (7, 7, 8))
    by_chance = [slots.create(SHAPE, None) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert same(copies(one), copies(again))
    for slot in (other, *by_chance):
        assert not same(copies(one), copies(slot))
    assert not same(copies(by_chance[0]), copies(by_chance[1]))
    for a, b in one.pairs.values():
        bound = 1 / math.sqrt(a.shape[1])
        assert 0.9 * bound < float(a.detach().abs().max()) <= bound
        assert not b.any()
        assert a.dtype == b.dtype == torch.float32


@pytest.mark.parametrize(
    ("attention", "mlp", "parts"),
    [(True, True, ATTENTION + MLP), (True, False, ATTENTION), (False, True, MLP)],
)
def test_a_client_chooses_the_layers(
    slots: Slots, attention: bool, mlp: bool, parts: tuple[str, ...]
) -> None:
    slot = slots.create(SlotShape(rank=2, train_attn=attention, train_mlp=mlp), 0)
    assert last_parts(slot) == set(parts)


def test_routers_and_the_head_have_no_adapter(tmp_path: Path) -> None:
    slots = Slots(made(FAMILIES["qwen3 moe"]), tmp_path, "")
    assert last_parts(slots.create(SHAPE, 0)) == set(ATTENTION)
    everything = SlotShape(rank=2, train_attn=True, train_mlp=True, train_unembed=True)
    assert slots.idle(everything) == ["train_mlp", "train_unembed"]
    with pytest.raises(WrongCall, match="expected layers of this model; found False and True"):
        slots.create(SlotShape(rank=2, train_attn=False, train_mlp=True), 0)


@pytest.mark.parametrize("rank", [-1, 0, 513])
def test_a_rank_out_of_range_is_refused(slots: Slots, rank: int) -> None:
    with pytest.raises(WrongCall, match=f"rank: expected 1 to 512; found {rank}"):
        slots.create(SlotShape(rank=rank, train_attn=True, train_mlp=True), 0)


def test_a_model_without_linear_layers_is_the_operators_fault(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match=r"learner\.model: the decoder layers of"):
        Slots(nn.Embedding(2, 2), tmp_path, "")


def test_the_layers_have_the_adapter_in_use_and_no_other(
    slots: Slots, model: Any, base: Path, tmp_path: Path
) -> None:
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    alone = model(tokens).logits
    slot, other = trained(slots), slots.create(SHAPE, 3)
    assert torch.equal(model(tokens).logits, alone)
    saved(slots, slot, tmp_path / "slot", optimizer=False)
    merged = merge(load_model(base), tmp_path / "slot")
    with slots.using(slot):
        torch.testing.assert_close(model(tokens).logits, merged(tokens).logits)
    with slots.using(other):
        torch.testing.assert_close(model(tokens).logits, alone)
    with pytest.raises(KeyError), slots.using(slot):
        raise KeyError
    assert torch.equal(model(tokens).logits, alone)


def test_a_step_is_that_of_adamw_with_the_settings_of_the_step(slots: Slots) -> None:
    slot = slots.create(SHAPE, 1)
    weights = [weight.detach().double().requires_grad_() for weight in slot.weights.values()]
    steps = [
        adam(),
        adam(learning_rate=3e-3, beta1=0.8, beta2=0.99, weight_decay=0.1),
        adam(grad_clip_norm=0.5, eps=1e-3),
        adam(grad_clip_norm=1e9),
        adam(learning_rate=0.0),
    ]
    reference = torch.optim.AdamW(weights, foreach=False)
    for number, settings in enumerate(steps):
        slopes = [slope.double() for slope in push(slot, number)]
        norm = math.sqrt(sum(float(slope.square().sum()) for slope in slopes))
        limit = settings.grad_clip_norm
        factor = min(1.0, limit / norm) if limit else 1.0
        for weight, slope in zip(weights, slopes, strict=True):
            weight.grad = factor * slope
        reference.param_groups[0].update(
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        reference.step()
        assert slot.step(settings) == pytest.approx(norm, rel=1e-5)
        for mine, right in zip(slot.weights.values(), weights, strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-6)
    assert slot.steps == len(steps)


def test_no_gradient_counts_as_one_of_zeros(slots: Slots) -> None:
    slot, other = trained(slots), trained(slots)
    push(other, 0, size=0.0)
    assert slot.step(adam()) == other.step(adam()) == 0.0
    assert same(copies(slot), copies(other))
    assert slot.steps == 3


def test_the_first_step_of_a_new_adapter_may_have_no_gradient(slots: Slots) -> None:
    slot = slots.create(SHAPE, 1)
    slot.step(adam(eps=1e-30))
    assert all(torch.isfinite(tensor).all() for tensor in copies(slot).values())


def test_a_discarded_gradient_is_gone(slots: Slots) -> None:
    slot = slots.create(SHAPE, 1)
    push(slot, 0)
    slot.discard()
    assert slot.step(adam()) == 0.0


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_dropped(slots: Slots, number: float) -> None:
    slot = trained(slots)
    before = copies(slot)
    push(slot, 5)
    next(iter(slot.weights.values())).grad[0, 0] = number  # type: ignore[index]
    with pytest.raises(WrongCall, match="the gradient is not finite; it was dropped"):
        slot.step(adam())
    assert same(copies(slot), before)
    assert slot.steps == 2
    assert slot.step(adam(learning_rate=0.0)) == 0.0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"learning_rate": -1.0}, "learning_rate: expected a number, at least 0; found -1.0"),
        ({"learning_rate": math.inf}, "learning_rate: expected a number, at least 0; found inf"),
        ({"beta1": 1.0}, "beta1: expected a number from 0 to below 1; found 1.0"),
        ({"beta2": math.nan}, "beta2: expected a number from 0 to below 1; found nan"),
        ({"eps": 0.0}, "eps: expected a number, at least 1e-30; found 0.0"),
        ({"weight_decay": -0.1}, "weight_decay: expected a number, at least 0; found -0.1"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm: expected a number, at least 0; found -1.0"),
    ],
)
def test_wrong_settings_of_adamw_are_refused(changes: dict[str, float], line: str) -> None:
    with pytest.raises(WrongCall, match=line):
        adam(**changes)


def test_a_saved_adapter_is_one_of_peft(slots: Slots, base: Path, tmp_path: Path) -> None:
    slot, folder = trained(slots), tmp_path / "root" / "0a"
    written = saved(slots, slot, folder, optimizer=True)
    assert written == sum(path.stat().st_size for path in folder.iterdir())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    assert config["target_modules"] == sorted(ATTENTION + MLP)
    assert pinned_base(folder) == base_digest(base)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, weight in slot.weights.items():
        assert torch.equal(tensors[f"base_model.model.{name}"], weight)
    assert len(tensors) == len(slot.weights)
    assert {path.name for path in folder.parent.iterdir()} == {"0a"}
    smaller = saved(slots, slot, folder.with_name("0b"), optimizer=False)
    assert smaller < written
    assert not (folder.with_name("0b") / "optimizer.safetensors").exists()


def test_what_is_saved_is_not_written_again(slots: Slots, tmp_path: Path) -> None:
    slot, folder = trained(slots), tmp_path / "0a"
    written = saved(slots, slot, folder, optimizer=True)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert saved(slots, trained(slots, 3), folder, optimizer=False) == written
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()
    }


def test_the_memory_of_a_slot_is_known_before_it_is_made(slots: Slots) -> None:
    shape = SlotShape(rank=3, train_attn=True, train_mlp=False)
    slot = slots.create(shape, 0)
    push(slot, 0)
    slopes = [weight.grad for weight in slot.weights.values() if weight.grad is not None]
    tensors = [*slot.weights.values(), *slot.moments.values(), *slopes]
    assert slots.memory_of(shape) == slot.memory == sum(each.nbytes for each in tensors)
    with pytest.raises(WrongCall, match="rank: expected 1 to 512; found 0"):
        slots.memory_of(SlotShape(rank=0, train_attn=True, train_mlp=True))


def test_a_loaded_slot_goes_on_bit_for_bit(slots: Slots, tmp_path: Path) -> None:
    slot, whole = trained(slots), trained(slots, 4)
    saved(slots, slot, tmp_path / "0a", optimizer=True)
    found = slots.load(tmp_path / "0a", optimizer=True)
    assert same(copies(found), copies(slot))
    assert (found.shape, found.steps) == (SHAPE, 2)
    for step in (2, 3):
        push(found, step)
        found.step(adam())
    assert same(copies(found), copies(whole))


def test_a_slot_loaded_without_its_moments_begins_again(slots: Slots, tmp_path: Path) -> None:
    slot = trained(slots)
    saved(slots, slot, tmp_path / "0a", optimizer=True)
    found = slots.load(tmp_path / "0a", optimizer=False)
    assert all(torch.equal(found.weights[name], weight) for name, weight in slot.weights.items())
    assert not any(moment.any() for moment in found.moments.values())
    assert found.steps == 0


def test_a_checkpoint_that_does_not_fit_is_refused(
    slots: Slots, model: Any, base: Path, tmp_path: Path
) -> None:
    saved(slots, trained(slots), tmp_path / "0a", optimizer=False)
    with pytest.raises(WrongCall, match="there is no such checkpoint"):
        slots.load(tmp_path / "0b", optimizer=False)
    with pytest.raises(WrongCall, match="saved without the optimizer's state"):
        slots.load(tmp_path / "0a", optimizer=True)
    with pytest.raises(WrongCall, match="belongs to another base model"):
        Slots(model, base, "0" * 64).load(tmp_path / "0a", optimizer=False)

"""Many LoRA adapters on one frozen base model, each with a gradient and AdamW's state of its own.

    y = W x + [32 / rank * B (A x)]        of the slot that is in use; with no slot in use, the base model's y

A *slot* is one adapter. Its tensors lie beside the model and are not part of it: one hook on each target layer adds the
share of the slot in use. So slots come and go without touching the model, and a slot cannot change another one.

Target layers are the linear layers in the model's decoder layers, without routers. The head has no adapter, and experts
that are one tensor have none.

A saved slot is a directory in PEFT's format, with AdamW's moments beside the adapter if they were asked for:

    adapter_config.json  adapter_model.safetensors  base.json  slot.json  [optimizer.safetensors]

The name of such a directory is that of one operation, and it is written once.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from echo2d.client import BASE_PIN, OperatorFault, base_pin
from echo2d.learner.model.moments import Moments
from echo2d.learner.ranks.ranks import layers_of, own_shard, whole
from echo2d.learner.saving.adapter import PEFT_PREFIX, peft_config
from echo2d.learner.saving.files import store_faults, sync, whole_directory
from echo2d.learner.tinker.sums import WrongCall
from echo2d.model_experts import routers_of

LORA_ALPHA = 32.0
# The API's largest rank is smaller; a larger one is hardly cheaper than all weights.
RANK_MAX = 512
# AdamW divides by eps where no gradient has come yet, and smaller numbers are 0 in float32.
EPS_MIN = 1e-30
MOMENTS = "exp_avg", "exp_avg_sq"
# A weight takes this many bytes of memory: with its gradient and its two moments, in float32.
WEIGHT_BYTES = 16
# What a published version has of a saved slot.
PUBLISHED_FILES = "adapter_config.json", "adapter_model.safetensors", BASE_PIN


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """The rank of an adapter, and which layers the client wants to have one: attention, MLPs, and the head."""

    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """The settings of one step of AdamW."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # decoupled
    grad_clip_norm: float  # 0: the gradient is not clipped

    def __post_init__(self) -> None:
        """WrongCall: a setting is not in its range."""
        for name, value in dataclasses.asdict(self).items():
            low, high = (EPS_MIN if name == "eps" else 0.0), math.inf
            expected = f"a number, at least {low:g}"
            if name.startswith("beta"):
                high, expected = 1.0, "a number from 0 to below 1"
            # Written so that NaN fails too.
            if not low <= value < high:
                raise WrongCall(f"{name}: expected {expected}; found {value}")


class TrainedWeights:
    """The weights of one model of a client, in float32, with their gradient and AdamW's state.

    optimizer: of these weights. moments: where it keeps its moments; None: it does that itself.
    """

    # Whether the backward pass itself replaces the gradient by the mean over all ranks, as FSDP2 does.
    averaged = False

    def __init__(
        self,
        shape: SlotShape,
        weights: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        moments: Moments | None = None,
    ) -> None:
        self.shape, self.weights = shape, weights
        # Of the forward_backward calls in the gradient.
        self.tokens, self.seconds = 0, 0.0
        self._optimizer, self._moments = optimizer, moments
        for weight in weights.values() if moments is None else ():
            device = own_shard(weight).device if optimizer.defaults.get("fused") else "cpu"
            zeros = {name: torch.zeros_like(weight) for name in MOMENTS}
            optimizer.state[weight] = {"step": torch.zeros((), device=device), **zeros}

    @property
    def memory(self) -> int:
        """Bytes of this rank."""
        return WEIGHT_BYTES * sum(own_shard(weight).numel() for weight in self.weights.values())

    @property
    def steps(self) -> int:
        """The steps of AdamW since its moments were zero. All weights have had the same."""
        return int(next(iter(self._optimizer.state.values()))["step"])

    @property
    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments, by the name of the weight and their own."""
        return {
            f"{name}.{moment}": self._optimizer.state[weight][moment]
            for name, weight in self.weights.items()
            for moment in MOMENTS
        }

    def step(self, adam: Adam, add_up: Callable[[Tensor], object] = lambda _: None) -> float:
        """Apply the gradient, drop it, and return its norm before clipping. No gradient counts as one of zeros.

        add_up: replaces this rank's part of a gradient by the sum of all ranks' parts, unless it is `averaged`.
        WrongCall: the gradient is not finite. It is dropped, and nothing else changes.
        """
        for weight in self.weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if not self.averaged:
                add_up(weight.grad)
        most = adam.grad_clip_norm or math.inf
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.weights.values(), most)))
        if math.isfinite(norm):
            (group,) = self._optimizer.param_groups
            rate = adam.learning_rate
            # The optimizer with moments of 8 bits wants a tensor.
            group["lr"] = torch.tensor(rate) if isinstance(group["lr"], Tensor) else rate
            group["betas"] = adam.beta1, adam.beta2
            group["eps"], group["weight_decay"] = adam.eps, adam.weight_decay
            (self._moments or self._optimizer).step()
        self.discard()
        if not math.isfinite(norm):
            raise WrongCall(
                "the gradient is not finite; it was dropped, and the weights are as before"
            )
        return norm

    def discard(self) -> None:
        """Drop the gradient."""
        self._optimizer.zero_grad()
        self.tokens, self.seconds = 0, 0.0

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Set weights or moments."""
        own = {**self.weights, **self.moments}
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    def at_step(self, steps: int) -> None:
        """Say which step the moments are of."""
        for state in self._optimizer.state.values():
            state["step"].fill_(steps)


class Slot(TrainedWeights):
    """One adapter: for each target layer A [rank, in] and B [out, rank]."""

    def __init__(self, shape: SlotShape, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """pairs: A and B by the name of the layer."""
        self.pairs = pairs
        weights = {
            f"{layer}.lora_{letter}.weight": weight.requires_grad_()
            for layer, pair in pairs.items()
            for letter, weight in zip("AB", pair, strict=True)
        }
        super().__init__(shape, weights, torch.optim.AdamW(weights.values()))

    @property
    def scale(self) -> float:
        return LORA_ALPHA / self.shape.rank


class Slots:
    """Makes, saves and loads the slots of a frozen model, and puts one of them to use.

    base_digest: of the model's files, which are in `base`. OperatorFault: the model has no layer for an adapter.
    """

    def __init__(self, model: Any, base: Path, base_digest: str) -> None:
        self._base, self._digest = base, base_digest
        self._device = next(model.parameters()).device
        self._targets = _targets(model)
        if not self._targets:
            raise OperatorFault(
                f"learner.model: the decoder layers of {base} have no linear layers"
            )
        self._used: Slot | None = None
        for name, layer in self._targets.items():
            layer.register_forward_hook(partial(self._add_share, name))

    @contextlib.contextmanager
    def using(self, slot: Slot | None) -> Iterator[None]:
        """In the block, backward passes included, the model's layers have this adapter. None: they have none."""
        self._used = slot
        try:
            yield
        finally:
            self._used = None

    def create(self, shape: SlotShape, seed: int | None) -> Slot:
        """A new slot: A as PEFT fills it, from a random generator of its own, and B zero.

        seed: of that generator; None: a random one. WrongCall: the rank or the layers cannot be had.
        """
        slot, generator = self._empty(shape), torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed % (1 << 63))
        filled = {}
        for name, weight in slot.weights.items():
            if name.endswith(".lora_A.weight"):
                bound = 1.0 / math.sqrt(weight.shape[1])
                filled[name] = torch.empty(weight.shape).uniform_(
                    -bound, bound, generator=generator
                )
        slot.fill(filled)
        return slot

    def idle(self, shape: SlotShape) -> list[str]:
        """The layers that the client wants to train, and that have no adapter in this model."""
        found = {_is_attention(name) for name in self._targets}
        has = {"train_attn": True in found, "train_mlp": False in found, "train_unembed": False}
        return [name for name, there in has.items() if getattr(shape, name) and not there]

    def memory_of(self, shape: SlotShape) -> int:
        """The bytes of a slot in memory that `create` or `load` would make. WrongCall: as in `create`."""
        layers = self._layers(shape).values()
        features = sum(layer.in_features + layer.out_features for layer in layers)
        return WEIGHT_BYTES * shape.rank * features

    def files_of(self, slot: Slot, *, optimizer: bool) -> dict[str, bytes]:
        """The files of a slot as it is now, by name. optimizer: with AdamW's moments."""
        facts = dataclasses.asdict(slot.shape) | {"steps": slot.steps}
        moments = {"optimizer.safetensors": save(slot.moments)} if optimizer else {}
        return {**self._adapter_files(slot), "slot.json": _json(facts), **moments}

    def shape_of(self, directory: Path) -> SlotShape:
        """The shape of a saved slot. WrongCall: there is no such slot."""
        if not directory.is_dir():
            raise WrongCall("there is no such checkpoint")
        facts = json.loads((directory / "slot.json").read_bytes())
        return SlotShape(**{name: value for name, value in facts.items() if name != "steps"})

    def write_nothing(self, directory: Path, shape: SlotShape) -> None:
        """Write the files of an adapter that adds zeros, so that the model is the base model."""
        slot = self._empty(shape)
        for name, data in self._adapter_files(slot).items():
            (directory / name).write_bytes(data)

    def _adapter_files(self, slot: Slot) -> dict[str, bytes]:
        """ADAPTER_FILES, by their names."""
        adapter = {PEFT_PREFIX + name: weight.detach() for name, weight in slot.weights.items()}
        last_parts = sorted({layer.rpartition(".")[2] for layer in slot.pairs})
        config = peft_config(self._base, slot.shape.rank, LORA_ALPHA, last_parts)
        contents = (_json(config), save(adapter), base_pin(self._digest))
        return dict(zip(PUBLISHED_FILES, contents, strict=True))

    def load(self, directory: Path, *, optimizer: bool) -> Slot:
        """A new slot with the weights of a saved one. optimizer: with its moments, too; else they are zero.

        WrongCall: there is no such slot, it was saved without moments, or it belongs to another base model.
        """
        shape, moments = self.shape_of(directory), directory / "optimizer.safetensors"
        if (directory / BASE_PIN).read_bytes() != base_pin(self._digest):
            raise WrongCall("the checkpoint belongs to another base model")
        if optimizer and not moments.exists():
            raise WrongCall("the checkpoint was saved without the optimizer's state")
        steps = json.loads((directory / "slot.json").read_bytes())["steps"]
        slot = self._empty(shape)
        adapter = load_file(directory / "adapter_model.safetensors")
        slot.fill({name.removeprefix(PEFT_PREFIX): tensor for name, tensor in adapter.items()})
        if optimizer:
            slot.fill(load_file(moments))
            slot.at_step(steps)
        return slot

    def _empty(self, shape: SlotShape) -> Slot:
        """A slot whose weights are all zero. WrongCall: as in `create`."""
        pairs = {
            name: (
                torch.zeros(shape.rank, layer.in_features, device=self._device),
                torch.zeros(layer.out_features, shape.rank, device=self._device),
            )
            for name, layer in self._layers(shape).items()
        }
        return Slot(shape, pairs)

    def _layers(self, shape: SlotShape) -> dict[str, nn.Linear]:
        """The layers that have an adapter of this shape. WrongCall: as in `create`."""
        if not 0 < shape.rank <= RANK_MAX:
            raise WrongCall(f"rank: expected 1 to {RANK_MAX}; found {shape.rank}")
        found = {
            name: layer
            for name, layer in self._targets.items()
            if (shape.train_attn if _is_attention(name) else shape.train_mlp)
        }
        if not found:
            wanted = f"{shape.train_attn} and {shape.train_mlp}, and the head has no adapter"
            raise WrongCall(f"train_attn, train_mlp: expected layers of this model; found {wanted}")
        return found

    def _add_share(
        self, name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """A forward hook of a target layer."""
        pair = self._used.pairs.get(name) if self._used else None
        if self._used is None or pair is None:
            return output
        a, b = (each.to(output.dtype) for each in pair)
        share: Tensor = nn.functional.linear(nn.functional.linear(inputs[0], a), b)
        return output + share * self._used.scale


def write_slot(directory: Path, files: Mapping[str, bytes]) -> int:
    """Write the files of a slot durably, and return the bytes of the directory. StoreFault: the disk failed.

    A directory that is there stays as it is. An operation runs again after its result was lost; if the process were
    killed while the directory is replaced, what a client has saved would be gone.
    """
    with store_faults("cannot write the checkpoint", directory):
        if directory.is_dir():
            # Another process may have been killed before this name was durable.
            sync(directory.parent)
        else:
            with whole_directory(directory) as aside:
                for name, data in files.items():
                    (aside / name).write_bytes(data)
        return sum(path.stat().st_size for path in directory.iterdir())


def _targets(model: Any) -> dict[str, nn.Linear]:
    """The target layers by name. Not among them: routers, and gates of one output."""
    layers, routers = set(layers_of(model)), {each.module for each in routers_of(model)}
    inside = [name for name, module in model.named_modules() if module in layers]
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and any(name.startswith(f"{layer}.") for layer in inside)
        and module not in routers
        and module.out_features > 1
    }


def _is_attention(name: str) -> bool:
    return "attn" in name or "attention" in name


def _json(facts: Mapping[str, object]) -> bytes:
    return (json.dumps(facts, indent=2) + "\n").encode()

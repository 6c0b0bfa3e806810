"""Reads a LoRA adapter in PEFT's layout: its scale, and which tensors belong to which linear layer.

    y = W x + scale * B (A x)      A [r, in], B [out, r]
    scale = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora

PEFT can write other kinds of adapters. A key that is set and that this module does not know is an
`EngineFault`, because an adapter that is wrongly read as plain LoRA would be another policy. This module needs
no torch. Not here: which base model the adapter belongs to.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from echo2d.engines.layout import SnapshotLayout, TensorSpec
from echo2d.errors import EngineFault

# Usual values are 8 to 256. With a far larger value only the adapter's output would count.
ALPHA_MAX = 1e6

_A, _B = ".lora_A.weight", ".lora_B.weight"
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"})
# Keys that matter in training only, or that repeat what the tensors' names say.
_NOTES = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "task_type",
    }
)


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """A plain LoRA adapter."""

    rank: int
    scale: float
    # A layer's name in the model -> the tensor names of A and B.
    layers: Mapping[str, tuple[str, str]]

    @property
    def kinds(self) -> list[str]:
        """The last parts of the layers' names, such as q_proj."""
        return sorted({name.rpartition(".")[2] for name in self.layers})

    @property
    def plain_config(self) -> Mapping[str, object]:
        """The keys of adapter_config.json that mean the same to every server.

        SGLang reads neither use_rslora nor a pattern in target_modules.
        """
        alpha = self.scale * self.rank
        return {"lora_alpha": alpha, "use_rslora": False, "target_modules": self.kinds}

    def require_fits(self, tensors: Mapping[str, TensorSpec], base: SnapshotLayout) -> None:
        """EngineFault: a layer is not in the base, or has other dimensions there. tensors: the adapter's own."""
        for name, (a, b) in self.layers.items():
            weight = base.tensors.get(f"{name}.weight")
            if weight is None or len(weight.shape) != 2:
                raise EngineFault(
                    f"the adapter names {name}, which is not a linear layer of the base"
                )
            out, into = weight.shape
            self.require_shapes(name, tensors[a].shape, tensors[b].shape, into, out)

    def require_shapes(
        self, name: str, a: tuple[int, ...], b: tuple[int, ...], into: int, out: int
    ) -> None:
        """EngineFault: A and B do not fit layer `name`, which takes vectors of `into` and gives vectors of `out`."""
        fitting = (self.rank, into), (out, self.rank)
        if (tuple(a), tuple(b)) != fitting:
            raise EngineFault(
                f"the adapter's tensors for {name} have shapes {tuple(a)} and {tuple(b)}, "
                f"expected {fitting[0]} and {fitting[1]}"
            )


def adapter_layout(layout: SnapshotLayout) -> AdapterLayout:
    """Interpret what `read_layout` found in an adapter. EngineFault: it is not plain LoRA."""
    config = layout.config["adapter"]
    assert isinstance(config, dict), "the layout of an adapter"
    # PEFT writes every key. A key that is null, false or empty has no effect.
    for key in sorted(config.keys() - _READ - _NOTES):
        if config[key]:
            raise EngineFault(f"adapter_config.json: {key} is not supported")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise EngineFault("adapter_config.json: only peft_type LORA without bias is supported")
    # Other values of init_lora_weights change the base's weights.
    if config.get("init_lora_weights") not in (None, True, False, "gaussian"):
        raise EngineFault(
            "adapter_config.json: init_lora_weights changed the base's weights during training, "
            "so the adapter does not fit the base; use true, false or 'gaussian'"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if (
        not isinstance(rank, int)
        or rank < 1
        or not isinstance(alpha, int | float)
        or not 0 < alpha <= ALPHA_MAX
    ):
        raise EngineFault(
            f"adapter_config.json: expected r >= 1 and 0 < lora_alpha <= {ALPHA_MAX:g}; "
            f"found r = {rank!r:.50} and lora_alpha = {alpha!r:.50}"
        )
    return AdapterLayout(
        rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), _layers(layout)
    )


def _layers(layout: SnapshotLayout) -> dict[str, tuple[str, str]]:
    # A layer is listed even if only one of its two tensors is there; the check below reports the missing one.
    found = {name.removesuffix(_A).removesuffix(_B) for name in layout.tensors}
    # PEFT wraps the model in two modules of its own, whose names come first.
    layers = {
        name.removeprefix("base_model.model."): (name + _A, name + _B) for name in sorted(found)
    }
    if not layers:
        raise EngineFault("the adapter has no tensors")
    wanted = {name for pair in layers.values() for name in pair}
    for name in sorted(wanted ^ layout.tensors.keys()):
        raise EngineFault(
            f"adapter tensor {name} is "
            f"{'missing' if name in wanted else 'not part of a LoRA adapter'}"
        )
    return layers

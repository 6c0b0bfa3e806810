"""What a LoRA adapter in PEFT's layout says: its scale, and which of its tensors belong to which linear layer.

    y = W x + scale * B (A x)      A [r, in], B [out, r]; scale = lora_alpha / r, with rslora lora_alpha / sqrt(r)

PEFT can write much else. What is not read here is an `EngineFault`: taken for plain LoRA it would be another policy.
Needs no torch. Not here: which base model the adapter belongs to.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from echo2d.engines.layout import SnapshotLayout
from echo2d.errors import EngineFault

ALPHA_MAX = 1e6  # usual are 8 to 256; with more no number of the adapter would be left

_PREFIX = "base_model.model."  # PEFT's own wrapping of the model
_A, _B = ".lora_A.weight", ".lora_B.weight"
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"})
_NOTES = frozenset(  # of training, or said by the tensors as well
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
    }
    | {
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
    }
    | {"target_modules", "task_type"}
)
_PLAIN_STARTS = (
    None,
    True,
    False,
    "gaussian",
)  # other values of init_lora_weights change the base's weights


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """layers: for each layer, by its name in the model, the names of A and B."""

    rank: int
    scale: float
    layers: Mapping[str, tuple[str, str]]


def adapter_layout(layout: SnapshotLayout) -> AdapterLayout:
    """Of an adapter's `read_layout`. EngineFault: it is no plain LoRA adapter."""
    config = layout.config["adapter"]
    assert isinstance(config, dict), "of an adapter"
    for key in sorted(config.keys() - _READ - _NOTES):
        if config[key]:
            raise EngineFault(f"adapter_config.json: {key} is not supported")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise EngineFault("adapter_config.json: only peft_type LORA without bias is supported")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise EngineFault(
            "adapter_config.json: init_lora_weights changed the base's weights; the adapter does not fit them"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if (
        not isinstance(rank, int)
        or rank < 1
        or not isinstance(alpha, int | float)
        or not 0 < alpha <= ALPHA_MAX
    ):
        raise EngineFault(
            f"adapter_config.json: expected r >= 1 and 0 < lora_alpha <= {ALPHA_MAX:g}"
        )
    return AdapterLayout(
        rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), _layers(layout)
    )


def _layers(layout: SnapshotLayout) -> dict[str, tuple[str, str]]:
    found = {name.removesuffix(_A).removesuffix(_B) for name in layout.tensors}
    layers = {name.removeprefix(_PREFIX): (name + _A, name + _B) for name in sorted(found)}
    wanted = {name for pair in layers.values() for name in pair}
    for name in sorted(wanted ^ layout.tensors.keys()):
        raise EngineFault(
            f"adapter tensor {name} is {'missing' if name in wanted else 'not part of a LoRA adapter'}"
        )
    return layers

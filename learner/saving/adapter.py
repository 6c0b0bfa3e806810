"""Write versions that are LoRA adapters, in PEFT's format:

<snapshot_root>/<run>-epoch-3-version-40/
    adapter_config.json  adapter_model.safetensors  base.json
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from echo2d.client import BASE_PIN, OperatorFault, base_pin
from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving.layout import WeightPart
from echo2d.learner.saving.publish import SnapshotWriter

# PEFT puts this before the names that the model has for its layers.
PEFT_PREFIX = "base_model.model."


class AdapterWriter(SnapshotWriter):
    """Write versions that are adapters. base_digest: digest of the base model that they belong to."""

    def __init__(
        self, config: LearnerConfig, run_id: str, weights: Mapping[str, Tensor], base_digest: str
    ) -> None:
        layout = {
            "adapter_model.safetensors": {PEFT_PREFIX + name: WeightPart(name) for name in weights}
        }
        super().__init__(config.model, config.snapshot_root, run_id, weights, layout)
        self._config = peft_config(
            config.model, config.lora_rank, config.lora_alpha, config.lora_targets
        )
        self.base_digest = base_digest

    def _companion_files(self) -> dict[str, bytes]:
        config = json.dumps(self._config, indent=2) + "\n"
        return {"adapter_config.json": config.encode(), BASE_PIN: base_pin(self.base_digest)}


def check_scale(config: LearnerConfig, progress: Mapping[str, Any]) -> None:
    """OperatorFault: the adapter of a checkpoint was trained with another learner.lora_alpha.

    progress: the progress record that was saved in the checkpoint.
    """
    trained = progress.get("lora_alpha", config.lora_alpha)
    if config.lora_rank and trained != config.lora_alpha:
        raise OperatorFault(
            f"learner.lora_alpha: the adapter was trained with {trained:g}; found {config.lora_alpha:g}"
        )


def peft_config(base: Path, rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """The content of adapter_config.json. targets: the last parts of the names of the layers that have an adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "inference_mode": True,
    }

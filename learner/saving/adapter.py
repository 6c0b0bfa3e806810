"""Write versions that are LoRA adapters, in PEFT's format:

<snapshot_root>/<run>-epoch-3-version-40/
    adapter_config.json  adapter_model.safetensors  base.json
"""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from echo2d.client import BASE_PIN, OperatorFault, base_pin
from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving.layout import WeightPart
from echo2d.learner.saving.publish import SnapshotWriter


class AdapterWriter(SnapshotWriter):
    """Write versions that are adapters. base_digest: digest of the base model that they belong to."""

    def __init__(
        self, config: LearnerConfig, run_id: str, weights: Mapping[str, Tensor], base_digest: str
    ) -> None:
        layout = {
            "adapter_model.safetensors": {
                "base_model.model." + name: WeightPart(name) for name in weights
            }
        }
        super().__init__(config.model, config.snapshot_root, run_id, weights, layout)
        self._config = _peft_config(config)
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


def _peft_config(config: LearnerConfig) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.name,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.lora_targets),
        "bias": "none",
        "inference_mode": True,
    }

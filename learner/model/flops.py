"""Floating-point operations of a train step, for MFU (model FLOPs utilization, arXiv 2204.02311, appendix B).

A token takes 2 operations forward and 4 backward for each weight of the layers' matrices that it passes through. Of
the experts, only those that the token is sent to count. Attention adds 4 forward and 8 backward for each channel of
the queries and each pair of tokens of which one reads the other. The head counts for answer tokens only, because it
runs only for these. Operations that the backward pass repeats do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from echo2d.learner.batch.packing import MicroBatch

# Dense bfloat16 operations per second, by a part of the device's name; from the vendors' data sheets.
PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that decide its operations."""

    layer_weights: int  # in the matrices that one token passes through, without embedding and head
    head_weights: int
    channels: int  # of the queries of all layers

    @staticmethod
    def of(model: Any) -> "ModelSize":
        """The size of a model of transformers."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight.numel()
        share = _share_of_experts(config)
        weights = sum(
            weight.numel() * (share if ".experts." in name else 1.0)
            for name, weight in model.base_model.named_parameters()
            if weight.ndim >= 2 and "embed" not in name
        )
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return ModelSize(
            round(weights), head, config.num_hidden_layers * config.num_attention_heads * size
        )

    @property
    def pair_cost(self) -> float:
        """What a pair of tokens costs in attention, over what a token costs in layers and head."""
        return 2.0 * self.channels / (self.layer_weights + self.head_weights)

    def operations(self, micro: Sequence[MicroBatch]) -> float:
        """The operations of forward and backward over these micro-batches."""
        tokens = sum(each.tokens_bt.size for each in micro)
        answers = sum(each.tokens for each in micro)
        forward = 2.0 * (self.layer_weights * tokens + self.head_weights * answers)
        # The backward pass takes twice as many operations as the forward pass.
        return 3 * (forward + 4.0 * self.channels * sum(map(_pairs, micro)))


def peak_of(device_name: str) -> float | None:
    """Operations per second that a device of this name could do; None: not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)


def _pairs(micro: MicroBatch) -> int:
    if micro.pieces is not None:
        return micro.pieces.pairs
    rows, width = micro.tokens_bt.shape
    return int(rows * width * (width + 1) // 2)


def _share_of_experts(config: Any) -> float:
    """The share of a layer's experts that one token is sent to."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return float(config.num_experts_per_tok) / experts if experts else 1.0

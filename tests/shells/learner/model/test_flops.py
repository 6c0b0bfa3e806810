"""Counted operations, compared with torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config

from echo2d.learner.batch.packing import MicroBatch, micro_batches
from echo2d.learner.model.flops import ModelSize, peak_of
from echo2d.learner.model.scorer import AnswerScorer
from tests.support.model_shapes import MOE, SHAPES, SMALL, answers, made


def counted(scorer: AnswerScorer, micro: MicroBatch) -> int:
    """Operations of the forward pass through the layers, by torch."""
    with FlopCounterMode(display=False) as counter:
        scorer(micro)
    return int(counter.get_total_flops())


def test_a_dense_model_has_the_operations_that_torch_counts() -> None:
    """torch counts matrix products, but not the attention of a CPU."""
    model = made(Qwen3Config(**{**SMALL, "tie_word_embeddings": False}))
    scorer = AnswerScorer(model)
    (micro,) = micro_batches(answers(61)[:1], 1000, packed=True)
    size, tokens = ModelSize.of(model), micro.tokens_bt.size
    attention = 4 * size.channels * tokens * (tokens + 1) // 2
    assert size.channels == SMALL["num_hidden_layers"] * 4 * 8
    assert size.operations([micro]) / 3 - attention == counted(scorer, micro)


def test_only_the_experts_that_a_token_is_sent_to_count() -> None:
    size = ModelSize.of(made(SHAPES["qwen3 moe"]))
    hidden, inner = SMALL["hidden_size"], MOE["moe_intermediate_size"]
    attention = hidden * 8 * (4 + 2 + 2 + 4)
    router, experts = 4 * hidden, 2 * 3 * hidden * inner
    assert size.layer_weights == SMALL["num_hidden_layers"] * (attention + router + experts)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("something else", None),
    ],
)
def test_the_peak_throughput_is_that_of_the_device(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak
    assert torch.isfinite(torch.tensor(peak or 0.0))

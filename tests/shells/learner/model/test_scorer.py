"""A model's logprobs of answer tokens do not depend on their place in a row."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Llama4TextConfig

from echo2d.client import OperatorFault
from echo2d.learner.batch.packing import MicroBatch, Pieces, micro_batches
from echo2d.learner.model.attention import NAME
from echo2d.learner.model.load import load_model
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.row_ranks import RowRanks
from tests.support.model_shapes import PROMPT, SHAPES, SMALL, answers, made
from tests.support.scripted_coordinator import answer_logprobs


def by_answer(micro: MicroBatch, values_n: Tensor) -> list[Tensor]:
    return [values_n[torch.from_numpy(micro.advantages_n == index)] for index in range(6)]


def reference(model: Any) -> list[Tensor]:
    """log p of each answer by the model's own forward pass over it alone."""
    found = []
    for answer in answers(model.config.vocab_size):
        tokens = torch.from_numpy(answer.tokens).long()
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, PROMPT - 1 : -1]
        everything = torch.log_softmax(logits.float() / answer.temperature, dim=1)
        found.append(everything.gather(1, tokens[PROMPT:, None])[:, 0])
    return found


def slopes(model: Any, values: list[Tensor]) -> Tensor:
    """The gradient of the sum over all weights, as one vector."""
    model.zero_grad()
    torch.autograd.backward(torch.cat(values).sum())
    return torch.cat(
        [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_in_a_row_are_scored_as_each_alone(shape: str) -> None:
    model = made(SHAPES[shape])
    expected = reference(model)
    expected_slopes = slopes(model, expected)
    scorer = AnswerScorer(model)
    assert scorer.packed
    assert model.config._attn_implementation == NAME
    for packed in (True, False):
        (micro,) = micro_batches(answers(model.config.vocab_size), 1000, packed=packed)
        found = by_answer(micro, scorer(micro).logprobs_n)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
        found_slopes = slopes(model, found)
        assert float((found_slopes - expected_slopes).norm() / expected_slopes.norm()) < 1e-4


@pytest.mark.parametrize(
    "changes", [{"model_type": "gemma2"}, {"layer_types": ["full_attention", "chunked_attention"]}]
)
def test_a_model_that_cannot_read_pieces_keeps_its_attention_and_gets_rows(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 2 has a soft cap in its attention, and our attention has none."""
    if changes.get("model_type") == "gemma2":
        model = made(Gemma2Config(**SMALL, attn_logit_softcapping=2.0, query_pre_attn_scalar=8))
    else:
        model = made(SHAPES["llama"])
        model.config.layer_types = changes["layer_types"]
    own = model.config._attn_implementation
    expected = reference(model) if "model_type" in changes else None
    with caplog.at_level(logging.WARNING):
        scorer = AnswerScorer(model)
    assert not scorer.packed
    assert "packing is off" in caplog.text
    assert model.config._attn_implementation == own
    assert AnswerScorer(model.train()).model.training, "a probe that fails puts it back"
    if expected is not None:
        model.eval()
        (micro,) = micro_batches(answers(model.config.vocab_size), 1000, packed=False)
        for mine, right in zip(by_answer(micro, scorer(micro).logprobs_n), expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused() -> None:
    model = made(SHAPES["granite with scaled logits"])
    model.config.logits_scaling = 7.0

    def odd(_: object, __: object, output: Any) -> Any:
        output.logits = output.logits.square()
        return output

    model.register_forward_hook(odd)
    with pytest.raises(OperatorFault, match=r"GraniteForCausalLM changes its logits"):
        AnswerScorer(model)


def test_a_loaded_model_is_scored_as_by_its_own_forward(base: Path) -> None:
    model = load_model(base).eval()
    tokens = np.array([[5, 3, 1, 2, 4]])
    counts = np.array([[False, False, True, True, True]])
    logits = model(input_ids=torch.from_numpy(tokens)).logits[0, 1:4] / 0.5
    everything = torch.log_softmax(logits, dim=1)
    expected = everything[range(3), [1, 2, 4]]
    torch.testing.assert_close(answer_logprobs(model, tokens, counts, 0.5), expected)


def test_a_model_without_a_head_is_the_operators_fault(base: Path) -> None:
    model = load_model(base)
    model.get_output_embeddings = lambda: None
    with pytest.raises(OperatorFault, match="has no head"):
        AnswerScorer(model)


def test_a_model_that_hides_its_states_is_refused_in_one_line() -> None:
    small = Llama4TextConfig(**SMALL, intermediate_size_mlp=48, num_local_experts=2)
    with pytest.raises(
        OperatorFault, match=r"Llama4ForCausalLM does not return .* SGLang can serve it"
    ):
        AnswerScorer(made(small))


def test_a_model_whose_answers_see_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose rows are not read apart must not lose its packing in silence."""
    context = AnswerScorer._context

    def seeing_all(
        self: AnswerScorer, positions_bt: Any, _: Any, row_ranks: RowRanks
    ) -> dict[str, Any]:
        whole = Pieces(*np.array([[0, positions_bt.shape[1], 0, 0]]).T)
        return context(self, positions_bt, whole, row_ranks)

    monkeypatch.setattr(AnswerScorer, "_context", seeing_all)
    model = made(SHAPES["qwen3 moe"])
    with pytest.raises(OperatorFault, match=r"learner\.packing: the logits .* differ by \d+\.\d%"):
        AnswerScorer(model)
    assert not AnswerScorer(model, packing=False).packed

"""Linear layers in int8: their results, when they are quantized, and where they cannot be used."""

from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file

from echo2d.engines.base import GenerateRequest
from echo2d.engines.torch_engine import TorchEngine
from echo2d.engines.torch_engine.int8 import IN_FEATURES_MAX, Int8Linear, quantize, quantized
from echo2d.engines.torch_engine.policy import InferencePolicy, build, prepare
from echo2d.errors import EngineFault, OperatorFault
from tests.support.engine_contract import generated
from tests.support.engine_harness import (
    Int8Harness,
    RoundedLinear,
    label,
    save_random_model,
    tiny_config,
)
from tests.support.lora import make_base, write_adapter

CPU = torch.device("cpu")


def test_weights_are_rounded_to_255_levels_of_their_row() -> None:
    rows = torch.tensor([[0.0, 0.5, -1.0], [0.0, 0.0, 0.0], [1e-30, 0.0, 3e4]])
    numbers, scales = quantized(rows)
    assert numbers.tolist() == [[0, 64, -127], [0, 0, 0], [0, 0, 127]]
    assert scales[0] == pytest.approx(1 / 127)
    error = (numbers * scales[:, None] - rows).abs().amax(dim=1)
    assert (error <= scales * 0.501).all()


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_with_its_rounded_weights(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layer = torch.nn.Linear(33, 19, bias=bias)
    states = torch.randn(rows, 1, 33)
    expected = RoundedLinear(layer.weight)(states)
    expected = expected + layer.bias if bias else expected
    found = Int8Linear(layer)(states)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def test_no_row_of_a_batch_changes_another_row() -> None:
    torch.manual_seed(0)
    layer = Int8Linear(torch.nn.Linear(64, 48))
    states = torch.randn(5, 64)
    together = layer(states)
    states[1:] *= 1000
    assert torch.equal(layer(states)[0], together[0])


async def test_reported_logprobs_come_from_the_rounded_model(tmp_path: Path) -> None:
    """Up to rare activations that lie half-way between two levels."""
    harness = Int8Harness(tmp_path)
    engine = harness.engine()
    await engine.start()
    prompt = [5, 9, 2, 33, 7]
    for version in range(3):
        await engine.refit(harness.snapshot(version), label(version))
        found = await generated(engine, GenerateRequest(str(version), prompt, 20, 40))
        errors = sorted(
            abs(one - other)
            for sample in found.samples
            for one, other in zip(
                harness.logprobs(version, prompt, sample.tokens, 1.0), sample.logprobs, strict=True
            )
        )
        assert median(errors) < 1e-6
        assert errors[int(0.97 * len(errors))] < 1e-4
    await engine.close()


async def test_ten_refits_later_an_engine_computes_what_a_fresh_one_does(tmp_path: Path) -> None:
    harness = Int8Harness(tmp_path)
    used, fresh = harness.engine(), harness.engine()
    answers = []
    for engine, versions in ((used, range(11)), (fresh, (10,))):
        await engine.start()
        for version in versions:
            await engine.refit(harness.snapshot(version), label(version))
        request = GenerateRequest("same", [5, 9, 2, 33, 7], 8, 40, rng_seeds=range(8))
        answers.append(
            [
                (each.tokens, each.logprobs, {*each.labels})
                for each in (await generated(engine, request)).samples
            ]
        )
        await engine.close()
    assert answers[0] == answers[1]
    assert all(labels == {label(10)} for _, _, labels in answers[0])


def test_a_tied_output_layer_follows_the_embedding(tmp_path: Path) -> None:
    """The snapshot has one tensor for both; the embedding keeps it exactly."""
    for seed in range(2):
        save_random_model(tmp_path / str(seed), tiny_config(), rng_seed=seed)
    policy = _int8(tmp_path / "0")
    prepared = prepare(tmp_path / "1", policy, torch.float32)
    assert prepared.target is policy
    policy.copy(prepared.tensors, prepared.layout)
    weight = load_file(tmp_path / "1" / "model.safetensors")["model.embed_tokens.weight"].float()
    assert torch.equal(policy._model.get_input_embeddings().weight, weight)
    head = policy._model.get_output_embeddings()
    assert torch.equal(head.weight, quantized(weight)[0])
    fresh = _int8(tmp_path / "1")
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.equal(policy.logits(tokens, 3), fresh.logits(tokens, 3))


def test_the_weights_take_a_quarter_of_float32(tmp_path: Path) -> None:
    save_random_model(tmp_path, tiny_config(tie_word_embeddings=False), rng_seed=0)
    whole = build(prepare(tmp_path, None, torch.float32), torch.float32, CPU)._model
    linear = [each for each in whole.modules() if isinstance(each, torch.nn.Linear)]
    before = sum(each.weight.nbytes for each in linear)
    layers = {each for found in quantize(whole).values() for each in found}
    assert 4 * sum(each.weight.nbytes for each in layers) == before
    assert not any(type(each) is torch.nn.Linear for each in whole.modules())


def test_an_adapter_works_beside_int8_layers(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    snapshot = write_adapter(tmp_path / "adapter", base, rng_seed=0)
    prepared = prepare(snapshot, None, torch.float32, base)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    exact = build(prepared, torch.float32, CPU)
    policy = build(prepared, torch.float32, CPU, int8=True)
    torch.testing.assert_close(
        policy.logits(tokens, 5), exact.logits(tokens, 5), rtol=0.1, atol=0.5
    )
    found = policy.digests()
    assert found is not None, "of an adapter its own tensors are read back"
    assert found == exact.digests()


def test_a_model_that_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(EngineFault, match="no linear layers"):
        quantize(torch.nn.Embedding(3, 4))
    with torch.device("meta"):
        wide = torch.nn.Linear(IN_FEATURES_MAX + 1, 1)
    with pytest.raises(EngineFault, match=str(IN_FEATURES_MAX)):
        Int8Linear(wide)


def test_int8_is_refused_on_any_device_except_the_cpu() -> None:
    with pytest.raises(OperatorFault, match="on a CPU only"):
        TorchEngine(device="meta", quantization="int8")


def _int8(snapshot: Path) -> InferencePolicy:
    return build(prepare(snapshot, None, torch.float32), torch.float32, CPU, int8=True)

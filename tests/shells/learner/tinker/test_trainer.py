"""A learner's answers to the training calls of clients, by a hardly trained model."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor
from torch.func import functional_call

from echo2d.client import OperationFailed, OperatorFault, TinkerOperation
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
from echo2d.learner.saving.files import ASIDE
from echo2d.learner.tinker.serve import result_of
from echo2d.learner.tinker.slots import Slot
from echo2d.learner.tinker.sums import LOSSES
from echo2d.learner.tinker.trainer import MODELS_MAX, Trainer
from tests.support.learner import make_base
from tests.support.tinker_calls import (
    ADAM,
    CREATE,
    MODEL,
    Answer,
    Row,
    answer_of,
    call,
    forward_backward,
    merged_weights,
)

VOCABULARY = 17
OTHER = "s:train:1"


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("deep"), layers=2)


@pytest.fixture
def trainer(config: LearnerConfig) -> Trainer:
    return with_models(config, MODEL)


def with_models(config: LearnerConfig, *models: str) -> Trainer:
    trainer = Trainer(config)
    for model in models:
        assert trainer.run(call("create", model, **CREATE)) == {}
    return trainer


def rows(rng_seed: int = 0, lengths: Sequence[int] = (5, 9, 1, 7), k: int = 0) -> list[Row]:
    """Random datums with the inputs of all losses. k: targets for each token; 0: the flat form."""
    rng = np.random.default_rng(rng_seed)
    made: list[Row] = []
    for length in lengths:
        shape = (length, k) if k else (length,)
        inputs = {
            "target_tokens": rng.integers(0, VOCABULARY, shape),
            "weights": rng.normal(size=shape),
            "logprobs": -3.0 + rng.normal(size=shape),
            "advantages": rng.normal(size=shape),
            "sequence_ratio_mask": rng.integers(0, 2, shape),
        }
        made.append((rng.integers(0, VOCABULARY, length).tolist(), inputs))
    return made


def scored(trainer: Trainer, data: Sequence[Row], model: str = MODEL, **how: Any) -> Answer:
    return answer_of(trainer.run(forward_backward(data, model=model, **how)))


def step(
    trainer: Trainer, rng_seed: int, model: str = MODEL, *, number: int = 1, folder: str = ""
) -> None:
    scored(trainer, rows(rng_seed), model)
    result = trainer.run(call("optim_step", model, number=number, folder=folder, **ADAM))
    assert isinstance(result, dict)
    assert result["metrics"]["grad_norm"] > 0


def slot_of(trainer: Trainer, model: str = MODEL) -> Slot:
    found = trainer._slots[model]
    assert isinstance(found, Slot)
    return found


def slopes(trainer: Trainer) -> list[Tensor]:
    found = [weight.grad for weight in slot_of(trainer).weights.values()]
    return [slope.clone() for slope in found if slope is not None]


def reference(model: Path, slot: Slot, data: Sequence[Row]) -> tuple[list[Tensor], list[Tensor]]:
    """log p of all targets, each datum alone through base and adapter merged; and the gradient of cross_entropy by the
    adapter's weights. In float64.
    """
    base = load_model(model).double()
    weights = {name: each.detach().double().requires_grad_() for name, each in slot.weights.items()}
    merged = merged_weights(base, slot.pairs, weights)
    found, loss = [], torch.zeros((), dtype=torch.float64)
    for tokens, inputs in data:
        logits = functional_call(base, merged, (torch.tensor([tokens]),)).logits[0]
        targets = torch.from_numpy(inputs["target_tokens"])
        logprobs = logits.log_softmax(1).gather(1, targets.reshape(len(tokens), -1))
        found.append(logprobs.reshape(targets.shape))
        loss = loss - (torch.from_numpy(inputs["weights"]) * found[-1]).sum()
    return [each.detach() for each in found], [*torch.autograd.grad(loss, list(weights.values()))]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [1000, 10])
def test_logprobs_and_gradient_are_those_of_each_datum_alone(
    config: LearnerConfig, deep: Path, k: int, packing: bool, micro_batch_tokens: int
) -> None:
    changed = dataclasses.replace(
        config, packing=packing, micro_batch_tokens=micro_batch_tokens, model=deep
    )
    trainer = with_models(changed, MODEL)
    assert trainer._scorer.packed == packing
    step(trainer, 5)
    data = rows(k=k)
    right, right_slopes = reference(deep, slot_of(trainer), data)
    answer = scored(trainer, data)
    for mine, its in zip(answer.logprobs, right, strict=True):
        np.testing.assert_allclose(mine, its.numpy(), rtol=1e-4, atol=1e-4)
    for slope, its in zip(slopes(trainer), right_slopes, strict=True):
        assert float((slope - its).norm() / its.norm()) < 1e-4
    loss = -sum(
        float((inputs["weights"] * its.numpy()).sum())
        for (_, inputs), its in zip(data, right, strict=True)
    )
    assert answer.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert answer.metrics["tokens:sum"] == 22


@pytest.mark.parametrize("loss", LOSSES)
def test_a_call_of_several_micro_batches_has_the_sum_of_their_gradients(
    config: LearnerConfig, loss: str
) -> None:
    whole, cut = (
        with_models(dataclasses.replace(config, micro_batch_tokens=tokens), MODEL)
        for tokens in (1000, 8)
    )
    found = [scored(trainer, rows(), loss=loss).metrics["loss:sum"] for trainer in (whole, cut)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    for one, other in zip(slopes(whole), slopes(cut), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_of_calls_add_up_until_they_are_discarded(trainer: Trainer) -> None:
    scored(trainer, rows(0))
    first = slopes(trainer)
    scored(trainer, rows(0))
    for twice, once in zip(slopes(trainer), first, strict=True):
        torch.testing.assert_close(twice, 2 * once)
    assert trainer.run(call("discard")) == {}
    assert slopes(trainer) == []


def test_a_forward_pass_adds_no_gradient_and_needs_no_weights(trainer: Trainer) -> None:
    data = [(tokens, {"target_tokens": inputs["target_tokens"]}) for tokens, inputs in rows()]
    answer = scored(trainer, data, forward_only=True)
    assert slopes(trainer) == []
    assert answer.metrics["loss:sum"] == pytest.approx(
        -sum(float(each.sum()) for each in answer.logprobs), rel=1e-5
    )
    found = result_of(trainer, forward_backward(data))
    assert found == OperationFailed(
        "datum 0: weights: expected an input of the shape (5,); found no such input"
    )


def test_a_model_learns(trainer: Trainer) -> None:
    (tokens, inputs), *_ = rows()
    data = [(tokens, {**inputs, "weights": np.ones(5)})]
    losses = []
    for _ in range(20):
        losses.append(scored(trainer, data).metrics["loss:sum"])
        trainer.run(call("optim_step", **ADAM))
    assert losses[-1] < 0.5 * losses[0]


def test_a_step_reports_the_tokens_and_the_time_of_its_gradient(trainer: Trainer) -> None:
    scored(trainer, rows())
    trainer.run(call("discard"))
    scored(trainer, rows(lengths=(4, 3)))
    scored(trainer, rows(lengths=(9,)), forward_only=True)
    scored(trainer, rows(lengths=(2,)))
    first, second = (trainer.run(call("optim_step", **ADAM)) for _ in range(2))
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["tokens"], second["tokens"]) == (9, 0)
    assert first["seconds"] > 0


def test_training_one_model_leaves_the_other_bit_for_bit(config: LearnerConfig) -> None:
    trainer = with_models(config, MODEL, OTHER)
    step(trainer, 0, OTHER)
    scored(trainer, rows(1), OTHER)
    before = scored(trainer, rows(), OTHER, forward_only=True).logprobs
    weights = [weight.detach().clone() for weight in slot_of(trainer, OTHER).weights.values()]
    slopes_before = [weight.grad for weight in slot_of(trainer, OTHER).weights.values()]
    for number in range(3):
        step(trainer, number)
    after = scored(trainer, rows(), OTHER, forward_only=True).logprobs
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    for weight, kept, slope in zip(
        slot_of(trainer, OTHER).weights.values(), weights, slopes_before, strict=True
    ):
        assert torch.equal(weight, kept)
        assert slope is not None
        assert weight.grad is slope
    assert not np.array_equal(scored(trainer, rows(), forward_only=True).logprobs[0], after[0])


def test_two_steps_and_two_after_a_load_are_four_steps(config: LearnerConfig) -> None:
    straight, trainer = with_models(config, MODEL), with_models(config, MODEL)
    for number in range(4):
        step(straight, number)
    for number in range(2):
        step(trainer, number)
    assert trainer.run(call("save", folder="0a", optimizer=True)) == {
        "bytes": sum(path.stat().st_size for path in (config.out_dir / "tinker/0a").iterdir()),
        "steps": 2,
    }
    again = Trainer(config)
    assert again.run(call("load", OTHER, folder="0a", optimizer=True)) == {"rank": 4}
    for number in (2, 3):
        step(again, number, OTHER)
    for one, other in zip(
        slot_of(straight).weights.values(), slot_of(again, OTHER).weights.values(), strict=True
    ):
        assert torch.equal(one, other)


def test_checkpoints_that_are_not_kept_are_deleted(trainer: Trainer, config: LearnerConfig) -> None:
    for folder in ("0a", "0b"):
        trainer.run(call("save", folder=folder, optimizer=False))
    (config.out_dir / "tinker" / "notes.txt").touch()
    for _ in range(2):
        assert trainer.run(call("keep", "", models=[MODEL], folders=["0b"])) == {}
    left = sorted(path.name for path in (config.out_dir / "tinker").iterdir())
    assert left == ["0b", "notes.txt"]
    assert result_of(trainer, call("load", folder="0a", optimizer=False)) == OperationFailed(
        "there is no such checkpoint"
    )


def test_a_checkpoint_that_cannot_be_deleted_is_named_once_and_the_others_are_deleted(
    trainer: Trainer, config: LearnerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    root = config.out_dir / "tinker"
    for folder in ("0a", "0b", "0c"):
        trainer.run(call("save", folder=folder, optimizer=False))
    # A directory cannot be renamed to the name of a file.
    (root / f"{ASIDE}0b").touch()
    for folders in (["0c"], []):
        assert trainer.run(call("keep", "", models=[MODEL], folders=folders)) == {}
    assert sorted(path.name for path in root.iterdir()) == [f"{ASIDE}0b", "0b"]
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [each for each in warned if "cannot delete" in each] == [
        f"cannot delete {root / '0b'}: delete it by hand"
    ]


def test_what_a_save_left_when_it_was_killed_is_removed(
    trainer: Trainer, config: LearnerConfig
) -> None:
    left = config.out_dir / "tinker" / ".tmp-0a-1234"
    left.mkdir()
    (left / "slot.json").touch()
    trainer.run(call("save", folder="0b", optimizer=False))
    Trainer(config)
    assert [path.name for path in left.parent.iterdir()] == ["0b"]


def test_a_model_that_is_not_kept_is_the_servers_failure(trainer: Trainer) -> None:
    assert trainer.run(call("keep", "", models=[], folders=[])) == {}
    assert trainer.models == 0
    found = result_of(trainer, call("optim_step", **ADAM))
    assert isinstance(found, OperationFailed)
    assert found.category == "server"
    assert found.detail.startswith(f"model {MODEL} is not in the learner's memory")


def test_an_unknown_call_is_the_servers_failure(trainer: Trainer) -> None:
    found = trainer.run(call("merge"))
    assert found == OperationFailed("this learner does not know the call 'merge'", "server")


def test_the_log_says_once_that_the_head_is_not_trained(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for model in (MODEL, OTHER):
            assert trainer.run(call("create", model, **{**CREATE, "train_unembed": True})) == {}
    assert [record.message for record in caplog.records] == [
        "not trained: train_unembed; such layers of this model get no adapter"
    ]


def test_there_is_a_limit_of_models(trainer: Trainer) -> None:
    for number in range(1, MODELS_MAX):
        trainer.run(call("create", f"s:train:{number}", **CREATE))
    found = result_of(trainer, call("create", "one more", **CREATE))
    assert found == OperationFailed(
        f"expected at most {MODELS_MAX} models at a time; one must end first"
    )
    assert trainer.run(call("create", MODEL, **CREATE)) == {}, "it takes the place of the same one"


def test_there_is_a_limit_of_memory(trainer: Trainer, config: LearnerConfig) -> None:
    trainer.run(call("save", folder="0a", optimizer=True))
    trainer._slots_bytes_max = 2.5 * slot_of(trainer).memory
    trainer.run(call("create", OTHER, **CREATE))
    with_it, most = (f"{n * slot_of(trainer).memory / 1e9:.3g} GB" for n in (3, 2.5))
    for refused in (
        call("create", "one more", **CREATE),
        call("load", "one more", folder="0a", optimizer=False),
    ):
        assert result_of(trainer, refused) == OperationFailed(
            f"expected at most {most} for the weights of all models with their optimizer states; "
            f"with this one they need {with_it}"
        )
    assert trainer.run(call("create", **CREATE)) == {}, "it takes the place of the same one"
    assert trainer.run(call("load", folder="0a", optimizer=True)) == {"rank": 4}


def test_a_model_that_is_made_again_begins_again(trainer: Trainer) -> None:
    first = scored(trainer, rows(), forward_only=True)
    step(trainer, 0)
    scored(trainer, rows())
    assert trainer.run(call("create", **CREATE)) == {}
    assert slopes(trainer) == []
    again = scored(trainer, rows(), forward_only=True)
    assert all(map(np.array_equal, first.logprobs, again.logprobs))
    assert slot_of(trainer).steps == 0


def with_input(**changes: Any) -> list[Row]:
    tokens, inputs = rows()[0]
    return [rows()[1], (tokens, {**inputs, **changes})]


@pytest.mark.parametrize(
    ("operation", "line"),
    [
        (forward_backward(rows(), "reinforce"), "loss_fn: expected one of cross_entropy, "),
        (forward_backward(rows(), "dro", alpha=1.0), "loss_fn_config: dro: expected one of beta; "),
        (
            forward_backward(with_input(weights=np.ones(4))),
            "datum 1: weights: expected the shape of target_tokens, (5,); found (4,)",
        ),
        (
            forward_backward(with_input(target_tokens=np.full(5, 17))),
            "datum 1: target_tokens: expected tokens from 0 to 16; found 17",
        ),
        (
            forward_backward([([3, 17], {})]),
            "datum 0: model_input: expected tokens from 0 to 16; found 17",
        ),
        (forward_backward([([], {})]), "datum 0: model_input: expected 1 to 30 tokens; found 0"),
        (
            forward_backward([([1] * 31, {})]),
            "datum 0: model_input: expected 1 to 30 tokens; found 31",
        ),
        (
            TinkerOperation(MODEL, 1, "forward_backward", {}, b"\xff"),
            "body: expected a protobuf message",
        ),
        (call("optim_step", **{**ADAM, "beta1": 1.0}), "beta1: expected a number from 0 to below"),
        (call("create", **{**CREATE, "rank": 1000}), "rank: expected 1 to 512; found 1000"),
        (call("save", folder="../x", optimizer=True), "folder: expected at most 64 hex digits; "),
        (
            call("save", folder="", optimizer=True),
            "folder: expected at most 64 hex digits; found ''",
        ),
    ],
)
def test_a_wrong_call_has_one_line_and_changes_nothing(
    config: LearnerConfig, operation: TinkerOperation, line: str
) -> None:
    trainer = with_models(dataclasses.replace(config, row_tokens_max=30), MODEL)
    weights = [weight.detach().clone() for weight in slot_of(trainer).weights.values()]
    found = result_of(trainer, operation)
    assert isinstance(found, OperationFailed)
    assert found.category == "user"
    assert found.detail.startswith(line)
    assert "\n" not in found.detail
    assert slopes(trainer) == []
    for weight, before in zip(slot_of(trainer).weights.values(), weights, strict=True):
        assert torch.equal(weight, before)


def test_a_gradient_that_is_not_finite_is_reported(trainer: Trainer) -> None:
    scored(trainer, rows())
    next(iter(slot_of(trainer).weights.values())).grad.fill_(torch.nan)  # type: ignore[union-attr]
    found = result_of(trainer, call("optim_step", **ADAM))
    assert found == OperationFailed(
        "the gradient is not finite; it was dropped, and the weights are as before"
    )


def test_layers_that_are_recomputed_have_the_same_gradient(
    config: LearnerConfig, deep: Path
) -> None:
    found, runs = [], []
    for recompute in ("none", "all"):
        changed = dataclasses.replace(config, recompute=recompute, model=deep)
        trainer, count = with_models(changed, MODEL), [0]
        layer = next(iter(trainer._factory._targets.values()))

        def counted(*_: object, count: list[int] = count) -> None:
            count[0] += 1

        layer.register_forward_hook(counted)
        step(trainer, 0)
        scored(trainer, rows())
        found.append(slopes(trainer))
        runs.append(count[0])
    assert runs == [2, 4]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_layers_in_bfloat16_are_close_to_float32(config: LearnerConfig, deep: Path) -> None:
    found = []
    for dtype in ("float32", "bfloat16"):
        trainer = with_models(dataclasses.replace(config, dtype=dtype, model=deep), MODEL)
        step(trainer, 0)
        answer = scored(trainer, rows())
        slope = torch.cat([each.flatten() for each in slopes(trainer)])
        assert slope.dtype == torch.float32
        found.append((np.concatenate(answer.logprobs), slope))
    (wide, wide_slope), (narrow, narrow_slope) = found
    np.testing.assert_allclose(narrow, wide, atol=0.1)
    assert float(torch.cosine_similarity(wide_slope, narrow_slope, dim=0)) > 0.99


def test_compiled_layers_are_refused(config: LearnerConfig) -> None:
    with pytest.raises(OperatorFault, match=r"learner\.compile: expected false with --serve"):
        Trainer(dataclasses.replace(config, compile=True))


def published(config: LearnerConfig) -> tuple[Trainer, list[tuple[int, dict[str, bytes]]]]:
    """A trainer, and the versions that it has published with their files."""
    versions: list[tuple[int, dict[str, bytes]]] = []

    def publish(version: int, directory: Path) -> None:
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        versions.append((version, files))

    trainer = Trainer(config, publish)
    trainer.run(call("create", **CREATE))
    return trainer, versions


def test_saved_weights_are_published_as_an_adapter_alone(config: LearnerConfig) -> None:
    trainer, versions = published(config)
    trainer.run(call("save", folder="0a", optimizer=True))
    assert trainer.run(call("publish", "", folder="0a", version=3)) == {}
    ((version, files),) = versions
    assert version == 3
    saved = config.out_dir / "tinker" / "0a"
    names = {"adapter_config.json", "adapter_model.safetensors", "base.json"}
    assert files == {name: (saved / name).read_bytes() for name in names}
    assert list(config.snapshot_root.iterdir()) == [], "what is published is copied"


def test_the_base_model_is_published_as_an_adapter_that_adds_nothing(config: LearnerConfig) -> None:
    trainer, versions = published(config)
    trainer.run(call("publish", "", folder="", version=1))
    ((_, files),) = versions
    weights = load(files["adapter_model.safetensors"])
    assert not any(weight.any() for weight in weights.values())

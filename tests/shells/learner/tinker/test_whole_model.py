"""Full weights of a client: how they learn, what is saved of them, and that adapters beside them stay as they were."""

import dataclasses
import json
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.client import OperationFailed, TinkerOperation
from echo2d.core.tinker.events import OpenSession, SessionName, StepSaved
from echo2d.core.tinker.futures import Failed
from echo2d.core.tinker.operations import ModelId
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
from echo2d.learner.ranks.ranks import own_shard
from echo2d.learner.tinker import whole_model
from echo2d.learner.tinker.serve import result_of
from echo2d.learner.tinker.sums import WrongCall
from echo2d.learner.tinker.trainer import Trainer
from echo2d.learner.tinker.whole_model import WholeModel, WholeModels
from echo2d.tinker import messages_pb2 as pb
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
)
from tests.support.tinker_world import TinkerWorld

VOCABULARY = 17
OTHER = "s:train:1"
WHOLE = {**CREATE, "rank": 0}
CLOSE = 1e-6
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("deep"), layers=2)


@pytest.fixture
def trainer(config: LearnerConfig) -> Trainer:
    return made(config)


def made(config: LearnerConfig, **more: Any) -> Trainer:
    trainer = Trainer(config, **more)
    assert trainer.run(call("create", **WHOLE)) == {"rank": 0}
    return trainer


def rows(rng_seed: int = 0, lengths: Sequence[int] = (5, 9, 1, 7)) -> list[Row]:
    rng = np.random.default_rng(rng_seed)
    made: list[Row] = []
    for length in lengths:
        inputs = {
            "target_tokens": rng.integers(0, VOCABULARY, length),
            "weights": rng.normal(size=length),
        }
        made.append((rng.integers(0, VOCABULARY, length).tolist(), inputs))
    return made


def scored(trainer: Trainer, rng_seed: int, model: str = MODEL, **how: Any) -> Answer:
    return answer_of(trainer.run(forward_backward(rows(rng_seed), model=model, **how)))


def step(
    trainer: Trainer, rng_seed: int, model: str = MODEL, folder: str = "", **adam: float
) -> None:
    scored(trainer, rng_seed, model)
    result = trainer.run(call("optim_step", model, folder=folder, **{**ADAM, **adam}))
    assert isinstance(result, dict), result


def slot_of(trainer: Trainer) -> WholeModel:
    found = trainer._slots[MODEL]
    assert isinstance(found, WholeModel)
    return found


def copies(trainer: Trainer) -> dict[str, Tensor]:
    slot = slot_of(trainer)
    kept = {name: each.detach().clone() for name, each in slot.saved_tensors().items()}
    return {**kept, "steps": torch.tensor(slot.steps)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logprobs(trainer: Trainer, folder: str) -> NDArray[np.float32]:
    """The logprobs of the prompt under saved weights."""
    asked = pb.PromptCall(tokens=np.array(PROMPT, "<i4").tobytes(), logprobs=True, last=7)
    scores = call("score", "", folder=folder)
    result = trainer.run(dataclasses.replace(scores, body=asked.SerializeToString()))
    assert isinstance(result, bytes), result
    return np.frombuffer(pb.SampleResult.FromString(result).prompt_logprobs, "<f4")[1:]


def logprobs_by(model: Any) -> NDArray[np.float32]:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    found = logits.log_softmax(1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    return np.asarray(found.numpy())


def loop(model: Path, steps: Sequence[dict[str, float]]) -> tuple[Any, list[Tensor]]:
    """The plain loop: a gradient of two calls for each step, and AdamW. Returns the model, and the first gradient."""
    plain, slopes = load_model(model), list[Tensor]()
    weights = [*plain.parameters()]
    optimizer = torch.optim.AdamW(weights)
    for number, adam in enumerate(steps):
        loss = torch.zeros(())
        for tokens, inputs in [*rows(2 * number), *rows(2 * number + 1)]:
            found = plain(torch.tensor([tokens])).logits[0].log_softmax(1)
            targets = torch.from_numpy(inputs["target_tokens"])[:, None]
            chosen = found.gather(1, targets)[:, 0]
            loss = loss - (torch.from_numpy(inputs["weights"]).float() * chosen).sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        slopes = slopes or [weight.grad.clone() for weight in weights if weight.grad is not None]
        torch.nn.utils.clip_grad_norm_(weights, adam["grad_clip_norm"] or float("inf"))
        (group,) = optimizer.param_groups
        group["lr"], group["betas"] = adam["learning_rate"], (adam["beta1"], adam["beta2"])
        group["eps"], group["weight_decay"] = adam["eps"], adam["weight_decay"]
        optimizer.step()
    return plain, slopes


@pytest.mark.parametrize("packing", [True, False])
def test_gradient_and_weights_are_those_of_a_plain_loop(
    config: LearnerConfig, deep: Path, packing: bool
) -> None:
    # AdamW multiplies the rounding of small gradients by learning_rate / eps, and processors round differently.
    adam = {**ADAM, "learning_rate": 1e-3, "eps": 1e-3}
    steps = [
        adam,
        {**adam, "learning_rate": 3e-4, "weight_decay": 0.1, "beta1": 0.8},
        {**adam, "grad_clip_norm": 0.5},
    ]
    changed = dataclasses.replace(config, model=deep, packing=packing, micro_batch_tokens=10)
    trainer, (plain, slopes) = made(changed), loop(deep, steps)
    for number, adam in enumerate(steps):
        scored(trainer, 2 * number)
        scored(trainer, 2 * number + 1)
        if not number:
            found = [weight.grad for weight in slot_of(trainer).weights.values()]
            for mine, its in zip(found, slopes, strict=True):
                assert mine is not None
                assert float((mine - its).norm() / its.norm().clamp_min(1e-3)) < 1e-5
        assert isinstance(trainer.run(call("optim_step", **adam)), dict)
    for name, weight in plain.named_parameters():
        mine = slot_of(trainer).weights[name].detach()
        assert float((mine - weight.detach()).abs().max()) < CLOSE, name
    assert slot_of(trainer).steps == len(steps)


def test_a_step_without_a_gradient_is_one_of_zeros(trainer: Trainer) -> None:
    before = copies(trainer)
    result = trainer.run(call("optim_step", **{**ADAM, "weight_decay": 0.5}))
    assert isinstance(result, dict)
    assert result["metrics"] == {"grad_norm": 0.0}
    for name, weight in slot_of(trainer).weights.items():
        torch.testing.assert_close(weight.detach(), before[name] * (1 - 1e-2 * 0.5))


def test_a_dropped_gradient_leaves_nothing(trainer: Trainer) -> None:
    before = copies(trainer)
    scored(trainer, 0)
    assert trainer.run(call("discard")) == {}
    scored(trainer, 0)
    next(iter(slot_of(trainer).weights.values())).grad.fill_(torch.nan)  # type: ignore[union-attr]
    found = result_of(trainer, call("optim_step", **ADAM))
    assert found == OperationFailed(
        "the gradient is not finite; it was dropped, and the weights are as before"
    )
    assert same(copies(trainer), before)
    assert all(weight.grad is None for weight in slot_of(trainer).weights.values())


@pytest.mark.parametrize("moments", ["device", "host"])
def test_a_saved_model_continues_exactly(
    config: LearnerConfig, moments: Literal["device", "host"]
) -> None:
    changed = dataclasses.replace(config, moments=moments)
    trainer = made(changed)
    step(trainer, 1)
    saved = trainer.run(call("save", folder="0a", optimizer=True))
    size = sum(path.stat().st_size for path in (config.out_dir / "tinker" / "0a").iterdir())
    assert saved == {"bytes": size, "steps": 1}
    again = Trainer(changed)
    assert again.run(call("load", folder="0a", optimizer=True)) == {"rank": 0}
    assert same(copies(again), copies(trainer))
    for each in (trainer, again):
        step(each, 2)
    assert same(copies(again), copies(trainer))


def test_a_model_is_loaded_without_moments_from_either_kind(
    trainer: Trainer, config: LearnerConfig
) -> None:
    step(trainer, 1)
    trainer.run(call("save", folder="0a", optimizer=True))
    trainer.run(call("save", folder="0b", optimizer=False))
    after, again = copies(trainer), Trainer(config)
    for folder in ("0a", "0b"):
        assert again.run(call("load", folder=folder, optimizer=False)) == {"rank": 0}
        assert slot_of(again).steps == 0
        for name, weight in slot_of(again).weights.items():
            right = after[name] if folder == "0a" else after[name].bfloat16().float()
            assert torch.equal(weight.detach(), right), name
        assert not any(each.any() for each in slot_of(again).moments.values())
    found = result_of(again, call("load", folder="0b", optimizer=True))
    assert found == OperationFailed("the checkpoint was saved without the optimizer's state")


def test_a_checkpoint_of_another_base_model_is_refused(
    trainer: Trainer, config: LearnerConfig, tmp_path: Path
) -> None:
    trainer.run(call("save", folder="0a", optimizer=True))
    other = make_base(tmp_path / "other")
    facts = json.loads((other / "config.json").read_bytes())
    (other / "config.json").write_text(json.dumps({**facts, "bos_token_id": 3}))
    again = Trainer(dataclasses.replace(config, model=other))
    found = result_of(again, call("load", folder="0a", optimizer=True))
    assert found == OperationFailed("the checkpoint belongs to another base model")


def test_weights_that_are_not_finite_are_not_saved(trainer: Trainer) -> None:
    with torch.no_grad():
        next(iter(slot_of(trainer).weights.values()))[0] = math.inf
    with pytest.raises(WrongCall, match="the weights are not finite"):
        trainer.run(call("save", folder="ab", optimizer=False))


def test_saved_weights_are_published_as_a_whole_model(config: LearnerConfig) -> None:
    versions: list[tuple[int, dict[str, bytes]]] = []

    def publish(version: int, directory: Path) -> None:
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        versions.append((version, files))
        mine = slot_of(taught).weights
        for name, weight in load_model(directory).named_parameters():
            assert torch.equal(weight, mine[name].detach().bfloat16().float()), name

    taught = made(config, publish=publish)
    step(taught, 1)
    taught.run(call("save", folder="0a", optimizer=False))
    assert taught.run(call("publish", "", folder="0a", version=3)) == {}
    ((version, files),) = versions
    assert version == 3
    assert files.keys() == {path.name for path in config.model.iterdir()}
    assert files["tokenizer.json"] == (config.model / "tokenizer.json").read_bytes()
    assert list(config.snapshot_root.iterdir()) == [], "what is published is copied"
    taught.run(call("save", folder="0b", optimizer=True))
    wrong = (
        "full weights are sampled from a path of save_weights_for_sampler; "
        "these are those of save_state"
    )
    for kind, more in (("publish", {"version": 4}), ("score", {})):
        asked = pb.PromptCall(tokens=np.array(PROMPT, "<i4").tobytes(), logprobs=True, last=7)
        operation = call(kind, "", folder="0b", **more)
        operation = dataclasses.replace(operation, body=asked.SerializeToString())
        assert result_of(taught, operation) == OperationFailed(wrong)


def test_prompts_are_scored_under_saved_weights_and_adapters_stay_as_they_were(
    trainer: Trainer, config: LearnerConfig
) -> None:
    trainer.run(call("create", OTHER, **CREATE))
    step(trainer, 1)
    step(trainer, 2, OTHER)
    trainer.run(call("save", folder="0a", optimizer=False))
    trainer.run(call("save", OTHER, folder="0c", optimizer=False))
    base, adapter = logprobs(trainer, ""), logprobs(trainer, "0c")
    before = scored(trainer, 3, OTHER, forward_only=True)
    whole = logprobs(trainer, "0a")
    right = logprobs_by(load_model(config.out_dir / "tinker" / "0a"))
    np.testing.assert_allclose(whole, right, atol=1e-5)
    assert np.abs(whole - base).max() > 1e-2
    after = scored(trainer, 3, OTHER, forward_only=True)
    assert all(map(np.array_equal, before.logprobs, after.logprobs))
    for folder, known in (("0a", whole), ("0c", adapter), ("0a", whole), ("", base)):
        np.testing.assert_array_equal(logprobs(trainer, folder), known)


def test_layers_in_bfloat16_train_weights_in_float32(config: LearnerConfig, deep: Path) -> None:
    found = []
    for dtype in ("float32", "bfloat16"):
        trainer = made(dataclasses.replace(config, dtype=dtype, model=deep))
        base = logprobs(trainer, "")
        step(trainer, 1, learning_rate=1e-3, eps=1e-4)
        trainer.run(call("save", folder=dtype.encode().hex(), optimizer=False))
        after = logprobs(trainer, dtype.encode().hex())
        assert np.abs(after - base).max() > 1e-2
        np.testing.assert_array_equal(logprobs(trainer, ""), base)
        weights = [own_shard(each).detach() for each in slot_of(trainer).weights.values()]
        assert {each.dtype for each in weights} == {torch.float32}
        found.append((after, torch.cat([each.flatten() for each in weights])))
    (wide, wide_weights), (narrow, narrow_weights) = found
    np.testing.assert_allclose(narrow, wide, atol=0.1)
    assert float((narrow_weights - wide_weights).abs().mean()) < 1e-4


def test_full_weights_that_cannot_be_read_do_not_stay_half_read(
    trainer: Trainer, config: LearnerConfig
) -> None:
    base = logprobs(trainer, "")
    step(trainer, 1)
    trainer.run(call("save", folder="0a", optimizer=False))
    damaged = config.out_dir / "tinker" / "0a" / "model.safetensors"
    os_bytes = damaged.read_bytes()
    damaged.write_bytes(os_bytes[: len(os_bytes) // 2])
    asked = pb.PromptCall(tokens=np.array(PROMPT, "<i4").tobytes(), logprobs=True, last=7)
    operation = dataclasses.replace(call("score", "", folder="0a"), body=asked.SerializeToString())
    found = result_of(trainer, operation)
    assert isinstance(found, OperationFailed)
    assert found.category == "server"
    np.testing.assert_array_equal(logprobs(trainer, ""), base)


def test_there_is_one_model_of_full_weights_at_a_time(trainer: Trainer) -> None:
    step(trainer, 1)
    trainer.run(call("save", folder="0a", optimizer=True))
    refused = OperationFailed("one model of full weights at a time: another one must end first")
    assert result_of(trainer, call("create", OTHER, **WHOLE)) == refused
    assert result_of(trainer, call("load", OTHER, folder="0a", optimizer=True)) == refused
    assert trainer.run(call("create", OTHER, **CREATE)) == {}
    assert trainer.run(call("load", folder="0a", optimizer=True)) == {"rank": 0}, "it replaces it"
    freed = weakref.ref(slot_of(trainer).scorer.model)
    assert trainer.run(call("keep", "", models=[OTHER], folders=["0a"])) == {}
    assert freed() is None
    assert trainer.run(call("create", "s:train:2", **WHOLE)) == {"rank": 0}


def test_a_model_that_does_not_fit_is_refused(trainer: Trainer, config: LearnerConfig) -> None:
    most = slot_of(trainer).memory
    assert trainer._wholes.memory == most
    small = Trainer(config)
    small._slots_bytes_max = most - 1
    found = result_of(small, call("create", **WHOLE))
    assert isinstance(found, OperationFailed)
    assert found.detail.startswith("expected at most ")
    assert small.models == 0


# --- states


def test_a_state_continues_as_if_nothing_had_happened(
    trainer: Trainer, config: LearnerConfig
) -> None:
    step(trainer, 1, folder="01")
    after = copies(trainer)
    step(trainer, 2)
    trainer.states.settle()
    assert trainer.states.written() == ((MODEL, 1),)
    again = Trainer(config)
    assert again.run(call("load", folder="01", optimizer=True)) == {"rank": 0}
    assert same(copies(again), after)
    step(again, 2)
    assert same(copies(again), copies(trainer))


def test_a_state_is_written_when_writing_takes_a_tenth_of_the_time(
    trainer: Trainer, config: LearnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, root = [1000.0], config.out_dir / "tinker"
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    write = WholeModels._write

    def slowly(*given: Any) -> int:
        now[0] += 2.0
        return write(*given)

    monkeypatch.setattr(WholeModels, "_write", slowly)

    def written(number: int) -> bool:
        step(trainer, number, folder=f"{number:02x}")
        trainer.states.settle()
        return (root / f"{number:02x}").exists()

    assert written(1)
    assert not written(2)
    now[0] += 17.9
    assert not written(3)
    now[0] += 0.2
    assert written(4), "writing took a tenth of the time"
    slot_of(trainer).unsaved = whole_model.UNSAVED_BYTES_MAX
    assert written(5), "the ledger keeps the calls until then"
    assert not written(6)
    assert trainer.states.written() == ((MODEL, 1),)


def test_a_state_that_does_not_fit_into_memory_is_written_before_training_goes_on(
    trainer: Trainer, config: LearnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_model, "_available_bytes", lambda: 0)
    step(trainer, 1, folder="01")
    assert trainer.states.written() == ((MODEL, 1),)
    after = copies(trainer)
    step(trainer, 2)
    again = Trainer(config)
    again.run(call("load", folder="01", optimizer=True))
    assert same(copies(again), after)


def test_a_state_that_cannot_be_copied_does_not_fail_the_step(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(whole_model, "Shards", short)
        step(trainer, 1, folder="01")
    assert f"the state of {MODEL} after operation 1 is not saved: cannot copy it" in caplog.text
    assert slot_of(trainer).steps == 1
    slot_of(trainer).state_at = 0.0
    step(trainer, 2, folder="02")
    trainer.states.settle()
    assert trainer.states.written() == ((MODEL, 1),)


class TrainedWorld(TinkerWorld):
    """The coordinator's service, whose orders a trainer runs."""

    def __init__(self, config: LearnerConfig) -> None:
        super().__init__()
        self.trainer = Trainer(config)

    def learn_one(self) -> bool:
        """Run an order, if there is one."""
        # Otherwise it would be chance which states are reported before the learner is killed.
        self.trainer.states.settle()
        saved = self.trainer.states.written()
        order = self.next_order(*(StepSaved(ModelId(name), number) for name, number in saved))
        self.trainer.states.forget(saved)
        if order is None:
            return False
        self.ran.append((order["model"], order["number"], order["kind"]))
        result = result_of(self.trainer, TinkerOperation(**order))
        if isinstance(result, OperationFailed):
            self.end(order, Failed(result.detail, result.category))
        else:
            self.end(order, dict(result) if isinstance(result, Mapping) else result)
        return True

    def kill_learner(self, config: LearnerConfig) -> None:
        self.trainer.states.settle()
        self.trainer = Trainer(config)
        self.take(self.service.learner_began(now=self.now))


@pytest.mark.parametrize("kills", [0, 5])
@pytest.mark.parametrize("state_every", [1, 3, 99])
def test_a_model_is_the_same_however_often_its_learner_is_killed(
    config: LearnerConfig, kills: int, state_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        WholeModel, "state_due", property(lambda self: self.steps % state_every == 1 % state_every)
    )
    world = TrainedWorld(config)
    world.body("ann", OpenSession(SessionName("s")))
    world.create("ann", ModelId(MODEL), rank=0)
    for number in range(1, 19, 2):
        body = forward_backward(rows(number)).body
        world.submit("ann", ModelId(MODEL), number, body=body)
        world.submit("ann", ModelId(MODEL), number + 1, "optim_step", dict(ADAM))
    killed = 0
    while world.learn_one():
        if killed < kills and len(world.ran) >= 5 * (killed + 1):
            killed += 1
            world.kill_learner(config)
    assert killed == kills
    # It is made again before its next operation.
    world.submit("ann", ModelId(MODEL), 19, body=forward_backward(rows(19)).body)
    while world.learn_one():
        pass
    expected = made(config)
    for number in range(1, 19, 2):
        step(expected, number)
    assert same(copies(world.trainer), copies(expected))
    assert ("load" in {kind for _, _, kind in world.ran}) == bool(kills)

"""Several ranks run the calls of clients as one rank does, and a call that fails on one rank fails on all."""

import dataclasses
import os
import pickle
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from echo2d.client import OperationFailed, OperationResult, TinkerOperation
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.ranks import Ranks, whole
from echo2d.learner.tinker.serve import serve
from echo2d.learner.tinker.slots import Slots
from echo2d.learner.tinker.trainer import Trainer
from echo2d.learner.tinker.whole_model import WholeModel, WholeModels
from echo2d.tinker import messages_pb2 as pb
from echo2d.tinker.wire import SampledTokens, write_sample_result
from tests.support.forked_ranks import KILLED, outcomes_of
from tests.support.learner import make_base
from tests.support.tinker_calls import (
    ADAM,
    CREATE,
    MODEL,
    Row,
    ScriptedOperations,
    answer_of,
    call,
    forward_backward,
)

VOCABULARY = 17
RANKS = 2
ERROR_MAX = 1e-6
SERVED = "served"
OTHER = "s:train:1"
# AdamW multiplies the rounding of small gradients by learning_rate / eps.
GENTLE = {"learning_rate": 1e-3, "eps": 1e-4}


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("deep"), layers=2)


@pytest.fixture
def shared(config: LearnerConfig, deep: Path) -> LearnerConfig:
    """The rows of a call do not divide evenly: one rank has less to do."""
    return dataclasses.replace(config, model=deep, micro_batch_tokens=10, recompute="all")


def rows(rng_seed: int, lengths: Sequence[int] = (5, 9, 1, 7, 3)) -> list[Row]:
    rng = np.random.default_rng(rng_seed)
    made: list[Row] = []
    for length in lengths:
        inputs = {
            "target_tokens": rng.integers(0, VOCABULARY, length),
            "weights": rng.normal(size=length),
        }
        made.append((rng.integers(0, VOCABULARY, length).tolist(), inputs))
    return made


def fb(number: int, model: str = MODEL, **how: Any) -> TinkerOperation:
    return forward_backward(rows(number, **how), model=model, number=number)


def step(number: int, model: str = MODEL) -> TinkerOperation:
    return call("optim_step", model, number=number, folder=f"{number:02x}", **ADAM)


SAVE = call("save", number=3, folder="aa", optimizer=True)


def prompt(folder: str) -> TinkerOperation:
    asked = pb.PromptCall(tokens=np.arange(9, dtype="<i4").tobytes(), logprobs=True, last=8)
    arguments = {"folder": folder}
    return TinkerOperation("", 0, "score", arguments, asked.SerializeToString())


def sample(folder: str) -> TinkerOperation:
    drawn = [pack_tokens(list(range(length))) for length in (4, 1)]
    body = write_sample_result([SampledTokens(each, each, cut=True) for each in drawn])
    arguments = {"folder": folder, "prompt": pack_tokens([1, 2]), "top_tokens": 3}
    return TinkerOperation("", 0, "score_sample", {**arguments, "temperature": 0.5}, body)


def on_ranks(
    config: LearnerConfig, folder: Path, *calls: TinkerOperation, prepare: Callable[[int], Any]
) -> tuple[list[str], list[OperationResult], list[dict[str, Tensor]], ScriptedOperations]:
    """What each rank said, the results, and the weights of MODEL on each rank. prepare: called with the rank."""

    def run(rank: int) -> str:
        prepare(rank)
        coordinator = ScriptedOperations([*calls])
        publish, run_id = (None, "") if rank else (coordinator.publish, coordinator.run_id)
        trainer = Trainer(config, publish, run_id, Ranks(rank, RANKS))
        assert any(isinstance(each, DTensor) for each in trainer.model.parameters())
        source = None if rank else coordinator
        kept = None
        try:
            serve(trainer, source, stopped=lambda: source is not None and source.over)
            if slot := trainer._slots.get(MODEL):
                kept = {name: whole(each.detach()) for name, each in slot.weights.items()}
        finally:
            left = kept, coordinator.results, coordinator
            (folder / f"left-{rank}").write_bytes(pickle.dumps(left))
        return SERVED

    said = outcomes_of(run, RANKS, folder)
    left = [
        pickle.loads((folder / f"left-{rank}").read_bytes())
        for rank in range(RANKS)
        if said[rank] != KILLED
    ]
    return said, left[0][1], [kept for kept, *_ in left], left[0][2]


def alone(config: LearnerConfig, *calls: TinkerOperation) -> tuple[Trainer, ScriptedOperations]:
    coordinator = ScriptedOperations([*calls])
    trainer = Trainer(config, coordinator.publish, "alone")
    serve(trainer, coordinator, stopped=lambda: coordinator.over)
    return trainer, coordinator


def unchanged(_: int) -> None:
    """The ranks are as they are."""


CALLS = (
    call("create", number=0, **CREATE),
    call("create", OTHER, number=0, **{**CREATE, "seed": None}),
    fb(1),
    fb(2, lengths=(4,)),
    step(3),
    fb(4, OTHER),
    fb(5),
    forward_backward(rows(6), number=6, forward_only=True),
    step(7),
    call("discard", OTHER),
    forward_backward([*rows(8), ([VOCABULARY], rows(8)[2][1])], number=8),
    fb(9),
    step(10),
    call("save", number=11, folder="aa", optimizer=True),
    prompt("aa"),
    prompt(""),
    sample("aa"),
    call("publish", "", version=3, folder="aa"),
    call("load", OTHER, number=1, folder="07", optimizer=True),
    call("keep", "", models=[MODEL, OTHER], folders=["aa"]),
    fb(12),
)


@pytest.mark.parametrize("packing", [True, False])
def test_ranks_have_the_results_and_weights_of_one_rank(
    shared: LearnerConfig, tmp_path: Path, packing: bool
) -> None:
    config = dataclasses.replace(shared, packing=packing)
    trainer, expected = alone(config, *CALLS)
    said, results, weights, coordinator = on_ranks(config, tmp_path, *CALLS, prepare=unchanged)
    assert said == [SERVED] * RANKS
    for operation, mine, its in zip(CALLS, results, expected.results, strict=True):
        check_same(operation, mine, its)
    for name, weight in trainer._slots[MODEL].weights.items():
        assert float((weights[0][name] - weight.detach()).abs().max()) < ERROR_MAX
        assert all(torch.equal(weights[0][name], each[name]) for each in weights)
    assert coordinator.published == expected.published
    assert coordinator.saved == [(MODEL, number) for number in (3, 7, 10)]
    assert {path.name for path in (config.out_dir / "tinker" / "run").iterdir()} == {"aa"}


def check_same(operation: TinkerOperation, mine: OperationResult, its: OperationResult) -> None:
    if operation.number == 8:
        wrong = f"datum 5: model_input: expected tokens from 0 to {VOCABULARY - 1}; found 17"
        assert mine == its == OperationFailed(wrong)
    elif operation.kind == "forward_backward":
        found, right = answer_of(mine), answer_of(its)
        for one, other in zip(found.logprobs, right.logprobs, strict=True):
            np.testing.assert_allclose(one, other, rtol=ERROR_MAX, atol=ERROR_MAX)
        assert found.metrics == pytest.approx(right.metrics, abs=1e-5)
    elif operation.kind == "optim_step":
        assert isinstance(mine, dict)
        assert isinstance(its, dict)
        assert mine["metrics"] == pytest.approx(its["metrics"], rel=1e-5)
        assert mine["tokens"] == its["tokens"]
    elif operation.kind == "score":
        assert isinstance(mine, bytes)
        assert isinstance(its, bytes)
        one, other = (
            np.frombuffer(pb.SampleResult.FromString(each).prompt_logprobs, "<f4")
            for each in (mine, its)
        )
        assert len(one) == 9
        np.testing.assert_allclose(one, other, rtol=ERROR_MAX, atol=ERROR_MAX)
    elif operation.kind == "score_sample":
        assert isinstance(mine, bytes)
        assert isinstance(its, bytes)
        tops, expected = (
            [each.top_tokens for each in pb.SampleResult.FromString(result).sequences]
            for result in (mine, its)
        )
        assert [each.positions for each in tops] == [4, 1]
        assert [each.tokens for each in tops] == [each.tokens for each in expected]
        near, close = (
            np.frombuffer(b"".join(each.logprobs for each in some), "<f4")
            for some in (tops, expected)
        )
        np.testing.assert_allclose(near, close, rtol=ERROR_MAX, atol=ERROR_MAX)
    else:
        assert mine == its


WHOLE_CALLS = (
    call("create", number=0, **{**CREATE, "rank": 0}),
    call("create", OTHER, number=0, **CREATE),
    fb(1),
    fb(2, lengths=(4,)),
    call("optim_step", number=3, folder="03", **{**ADAM, **GENTLE}),
    fb(4, OTHER),
    forward_backward(rows(6), number=6, forward_only=True),
    fb(9),
    call("optim_step", number=10, folder="", **{**ADAM, **GENTLE, "grad_clip_norm": 0.5}),
    call("save", number=11, folder="aa", optimizer=True),
    call("save", number=12, folder="bb", optimizer=False),
    prompt("bb"),
    prompt(""),
    call("publish", "", version=3, folder="bb"),
    fb(13),
    call("optim_step", number=14, folder="", **{**ADAM, **GENTLE}),
    call("load", number=11, folder="aa", optimizer=True),
    call("create", "s:train:2", number=0, **{**CREATE, "rank": 0}),
    call("keep", "", models=[MODEL, OTHER], folders=["aa", "bb"]),
    fb(15),
    call("optim_step", number=16, folder="", **{**ADAM, **GENTLE}),
)


@pytest.mark.parametrize("moments", ["device", "host"])
def test_ranks_have_the_full_weights_of_one_rank(
    shared: LearnerConfig, tmp_path: Path, moments: Literal["device", "host"]
) -> None:
    config = dataclasses.replace(shared, moments=moments)
    trainer, expected = alone(config, *WHOLE_CALLS)
    said, results, weights, coordinator = on_ranks(
        config, tmp_path, *WHOLE_CALLS, prepare=unchanged
    )
    assert said == [SERVED] * RANKS
    for operation, mine, its in zip(WHOLE_CALLS, results, expected.results, strict=True):
        check_same(operation, mine, its)
    for name, weight in trainer._slots[MODEL].weights.items():
        assert float((weights[0][name] - weight.detach()).abs().max()) < ERROR_MAX
        assert all(torch.equal(weights[0][name], each[name]) for each in weights)
    assert coordinator.published == expected.published
    assert coordinator.saved == [(MODEL, 3)]
    root = config.out_dir / "tinker"
    assert {path.name for path in (root / "run").iterdir()} == {"aa", "bb"}
    check_loaded_by_another_number_of_ranks(config, root, trainer, tmp_path)


def check_loaded_by_another_number_of_ranks(
    config: LearnerConfig, root: Path, trainer: Trainer, folder: Path
) -> None:
    """What two ranks saved is what one rank saved, and each loads the folders of the other."""
    for name in ("aa", "bb"):
        for path in (root / "alone" / name).glob("*.safetensors"):
            one, other = load_file(path), load_file(root / "run" / name / path.name)
            assert one.keys() == other.keys()
            for tensor in one:
                error = (one[tensor].float() - other[tensor].float()).abs().max()
                most = ERROR_MAX if name == "aa" else float(one[tensor].abs().max()) / 128
                assert float(error) <= most, (path, tensor)
    loads = (
        call("load", number=11, folder="aa", optimizer=True),
        fb(15),
        call("optim_step", number=16, folder="", **{**ADAM, **GENTLE}),
    )
    (root / "run" / "aa").rename(root / "kept")
    (root / "alone" / "aa").rename(root / "run" / "aa")
    (root / "kept").rename(root / "alone" / "aa")
    again, _ = alone(config, *loads)
    said, _, weights, _ = on_ranks(config, folder, *loads, prepare=unchanged)
    assert said == [SERVED] * RANKS
    for name, weight in trainer._slots[MODEL].weights.items():
        for found in (again._slots[MODEL].weights[name].detach(), weights[0][name]):
            assert float((found - weight.detach()).abs().max()) < ERROR_MAX


def failing_on_the_second_rank(owner: type, name: str) -> Callable[[int], None]:
    """The first call of this method on rank 1 fails."""

    def prepare(rank: int) -> None:
        works = getattr(owner, name)

        def fails(*_: object, **__: object) -> None:
            setattr(owner, name, works)
            raise torch.OutOfMemoryError("no memory is left")

        if rank == 1:
            setattr(owner, name, fails)

    return prepare


def test_full_weights_that_do_not_fit_one_rank_end_all_and_the_next_learner_says_so(
    shared: LearnerConfig, tmp_path: Path
) -> None:
    calls = call("create", number=0, **{**CREATE, "rank": 0}), call("create", OTHER, **CREATE)
    prepare = failing_on_the_second_rank(WholeModels, "create")
    said, results, _, _ = on_ranks(shared, tmp_path, *calls, prepare=prepare)
    assert said[1] == "OutOfMemoryError: no memory is left"
    assert said[0] != SERVED
    assert results == []
    said, results, _, _ = on_ranks(shared, tmp_path, *calls, prepare=unchanged)
    assert said == [SERVED] * RANKS
    assert results == [NO_MEMORY, {}]


def test_a_state_that_one_rank_cannot_copy_is_not_written(
    shared: LearnerConfig, tmp_path: Path
) -> None:
    calls = call("create", number=0, **{**CREATE, "rank": 0}), fb(1), step(2), fb(3), step(4)
    prepare = failing_on_the_second_rank(WholeModel, "saved_tensors")
    said, results, _, coordinator = on_ranks(shared, tmp_path, *calls, prepare=prepare)
    assert said == [SERVED] * RANKS
    assert not any(isinstance(each, OperationFailed) for each in results)
    assert coordinator.saved in ([], [(MODEL, 4)])


NO_MEMORY = OperationFailed("OutOfMemoryError: no memory is left", "server")


def test_a_call_that_fails_on_one_rank_before_they_compute_fails_on_all(
    shared: LearnerConfig, tmp_path: Path
) -> None:
    create = call("create", number=0, **CREATE)
    prepare = failing_on_the_second_rank(Slots, "create")
    said, results, _, _ = on_ranks(shared, tmp_path, create, fb(1), create, fb(1), prepare=prepare)
    assert said == [SERVED] * RANKS
    lost = OperationFailed(f"model {MODEL} is not in the learner's memory", "server")
    assert results[:3] == [NO_MEMORY, lost, {}]
    assert isinstance(results[3], bytes)


@pytest.mark.parametrize(
    ("owner", "name"), [(Slots, "create"), (AnswerScorer, "score_targets"), (Slots, "files_of")]
)
def test_a_call_in_which_a_rank_dies_is_not_answered(
    shared: LearnerConfig, tmp_path: Path, owner: type, name: str
) -> None:
    """Wherever the others notice it: while they agree whether they can begin, or while they compute."""

    def dies_on_the_second_rank(rank: int) -> None:
        if rank == 1:
            setattr(owner, name, lambda *_, **__: os._exit(1))

    calls = call("create", number=0, **CREATE), fb(1), step(2), SAVE
    said, results, _, _ = on_ranks(shared, tmp_path, *calls, prepare=dies_on_the_second_rank)
    assert said[0] not in (SERVED, KILLED)
    assert said[1] == KILLED
    assert not any(isinstance(each, OperationFailed) for each in results)
    said, results, _, _ = on_ranks(shared, tmp_path, *calls, prepare=unchanged)
    assert said == [SERVED] * RANKS
    assert len(results) == len(calls)
    assert not any(isinstance(each, OperationFailed) for each in results)


def test_ranks_end_when_one_cannot_save_full_weights(shared: LearnerConfig, tmp_path: Path) -> None:
    calls = call("create", number=0, **{**CREATE, "rank": 0}), SAVE
    prepare = failing_on_the_second_rank(WholeModel, "saved_tensors")
    said, results, _, _ = on_ranks(shared, tmp_path, *calls, prepare=prepare)
    assert said[1] == "OutOfMemoryError: no memory is left"
    assert said[0] != SERVED
    assert results == [{"rank": 0}]
    said, results, _, _ = on_ranks(shared, tmp_path, *calls, prepare=unchanged)
    assert said == [SERVED] * RANKS
    assert results == [{"rank": 0}, NO_MEMORY]


def test_a_full_disk_fails_the_save_and_the_ranks_go_on(
    shared: LearnerConfig, tmp_path: Path
) -> None:
    def prepare(_: int) -> None:
        works = WholeModels.save

        def save(*arguments: Any, **named: Any) -> int:
            with file_size_max(1024):
                return works(*arguments, **named)

        WholeModels.save = save  # type: ignore[method-assign]

    calls = call("create", number=0, **{**CREATE, "rank": 0}), SAVE, fb(1)
    said, results, _, _ = on_ranks(shared, tmp_path, *calls, prepare=prepare)
    assert said == [SERVED] * RANKS
    assert isinstance(results[1], OperationFailed)
    assert "File too large" in results[1].detail
    assert isinstance(results[2], bytes)


@contextmanager
def file_size_max(size: int) -> Iterator[None]:
    """No file of this process can grow beyond it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_ranks_end_when_one_fails_amid_a_call_and_the_next_learner_answers_it(
    shared: LearnerConfig, tmp_path: Path
) -> None:
    calls = call("create", number=0, **CREATE), fb(1)
    prepare = failing_on_the_second_rank(AnswerScorer, "score_targets")
    said, results, _, _ = on_ranks(shared, tmp_path, *calls, prepare=prepare)
    assert said[1] == "OutOfMemoryError: no memory is left"
    assert said[0] != SERVED
    assert results == [{}]
    said, results, _, _ = on_ranks(shared, tmp_path, *calls, fb(2), prepare=unchanged)
    assert said == [SERVED] * RANKS
    assert results[:2] == [{}, NO_MEMORY]
    assert isinstance(results[2], bytes)

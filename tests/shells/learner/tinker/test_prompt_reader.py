"""What a learner finds out about prompts and samples, against the logits of the whole prompt in float64."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.func import functional_call

from echo2d.client import TinkerOperation
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model import logprobs
from echo2d.learner.model.load import load_model
from echo2d.learner.tinker.slots import Slot
from echo2d.learner.tinker.sums import WrongCall
from echo2d.learner.tinker.trainer import Trainer
from echo2d.tinker import messages_pb2 as pb
from echo2d.tinker.prompts import NO_LOGPROB, PromptCall, PromptTargets
from echo2d.tinker.wire import (
    SampledTokens,
    read_sample_result,
    write_prompt_call,
    write_sample_result,
)
from tests.support.tinker_calls import (
    ADAM,
    CREATE,
    MODEL,
    call,
    forward_backward,
    merged_weights,
)

VOCABULARY = 17
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
DENSE = np.full((10, 3), -1)
DENSE[0], DENSE[2, 1], DENSE[9, :2] = (7, 0, 7), 11, (16, 2)
CLOSE = 2e-5


class Whole(NamedTuple):
    """A trainer whose first model is saved in the folder 0a and trained since, and the right logprobs [t - 1, v]."""

    trainer: Trainer
    right: dict[str, NDArray[np.float64]]  # by folder

    def ask(self, folder: str = "0a", tokens_t: NDArray[Any] = TOKENS, **asked: Any) -> Any:
        asked = {"last": len(tokens_t) - 1, **asked}
        call = PromptCall(tokens_t=tokens_t, **asked)
        body = write_prompt_call(call)
        result = self.trainer.run(TinkerOperation("", 0, "score", {"folder": folder}, body))
        assert isinstance(result, bytes)
        # Besides the numbers there are only the heads of messages.
        assert len(result) < call.answer_bytes + 100
        return pb.SampleResult.FromString(result)


@pytest.fixture(params=[True, False], ids=["packed", "padded"])
def whole(
    config: LearnerConfig, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Whole:
    # The logits of three tokens at a time.
    monkeypatch.setitem(logprobs.WHOLE_LOGITS_BYTES, "cpu", 3 * 4 * VOCABULARY)
    trainer = Trainer(dataclasses.replace(config, packing=request.param))
    trainer.run(call("create", **CREATE))
    right = {"": right_logprobs(config, trainer, adapter=False)}
    targets = {"target_tokens": np.roll(TOKENS, -1), "weights": np.ones(len(TOKENS))}
    for step in range(4):
        if step == 3:
            trainer.run(call("save", folder="0a", optimizer=False))
            right["0a"] = right_logprobs(config, trainer, adapter=True)
        trainer.run(forward_backward([(TOKENS.tolist(), targets)]))
        trainer.run(call("optim_step", **ADAM))
    assert abs(right[""] - right["0a"]).max() > 0.1
    return Whole(trainer, right)


def right_logprobs(config: LearnerConfig, trainer: Trainer, *, adapter: bool) -> NDArray[Any]:
    base, slot = load_model(config.model).double(), trainer._slots[MODEL]
    assert isinstance(slot, Slot)
    weights = {name: each.detach().double() for name, each in slot.weights.items()}
    merged = merged_weights(base, slot.pairs if adapter else (), weights)
    logits = functional_call(base, merged, (torch.tensor([TOKENS[:-1].tolist()]),)).logits[0]
    found: NDArray[Any] = logits.log_softmax(1).detach().numpy()
    return found


def floats(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, "<f4")


def top_of(found: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Tokens and logprobs, each [positions, kept]."""
    top = found.prompt_top_tokens
    shape = top.positions, top.kept
    return np.frombuffer(top.tokens, "<i4").reshape(shape), floats(top.logprobs).reshape(shape)


@pytest.mark.parametrize("folder", ["", "0a"])
@pytest.mark.parametrize("last", [10, 4, 1])
def test_logprobs_and_top_tokens_are_those_of_the_last_tokens(
    whole: Whole, folder: str, last: int
) -> None:
    right, first = whole.right[folder], len(TOKENS) - last
    found = whole.ask(folder, logprobs=True, top_tokens=5, last=last)
    own = floats(found.prompt_logprobs)
    assert np.isnan(own[:first]).all()
    np.testing.assert_allclose(
        own[1:][first - 1 :], right[range(10), TOKENS[1:]][first - 1 :], atol=CLOSE
    )
    tokens_tk, logprobs_tk = top_of(found)
    assert (tokens_tk.shape, logprobs_tk.shape) == ((11, 5), (11, 5))
    assert not tokens_tk[:first].any()
    assert (logprobs_tk[:first] == np.float32(NO_LOGPROB)).all()
    order = np.argsort(-right, axis=1)[first - 1 :, :5]
    assert (tokens_tk[first:] == order).all()
    expected = np.take_along_axis(right[first - 1 :], order, 1)
    np.testing.assert_allclose(logprobs_tk[first:], expected, atol=CLOSE)


def test_all_tokens_of_the_vocabulary_can_be_asked_for(whole: Whole) -> None:
    tokens_tk, logprobs_tk = top_of(whole.ask(top_tokens=VOCABULARY))
    assert (np.sort(tokens_tk[1:], 1) == np.arange(VOCABULARY)).all()
    np.testing.assert_allclose(np.exp(logprobs_tk[1:]).sum(1), 1.0, atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_targets_have_their_logprobs_in_the_layout_of_the_client(
    whole: Whole, sparse: bool
) -> None:
    rows, columns = np.nonzero(DENSE >= 0) if sparse else np.indices(DENSE.shape).reshape(2, -1)
    cells = DENSE[rows, columns]
    expected = np.where(cells >= 0, whole.right["0a"][rows, cells], 0.0)
    starts = np.searchsorted(rows, np.arange(11))
    layout = (starts, columns) if sparse else ()
    # Other rows are read besides, or only these.
    others: list[dict[str, Any]] = [{}, {"logprobs": True, "last": 4}]
    for more in others:
        found = whole.ask(targets=PromptTargets((10, 3), cells, *layout), **more)
        tensor = found.target_prompt_logprobs
        assert (tensor.element, list(tensor.shape)) == (pb.ELEMENT_FLOAT32, [10, 3])
        entries = tensor.sparse.entries if sparse else tensor.dense
        np.testing.assert_allclose(floats(entries), expected, atol=CLOSE)
        assert bool(found.prompt_logprobs) == bool(more)
        assert not found.HasField("prompt_top_tokens")
        if sparse:
            assert np.frombuffer(tensor.sparse.columns, "<i8").tolist() == columns.tolist()
            assert np.frombuffer(tensor.sparse.row_starts, "<i8").tolist() == starts.tolist()


def alternatives_of(found: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Tokens and logprobs, each [t - 1, k]."""
    pair = found.prompt_alternatives
    tokens = np.frombuffer(pair.tokens.dense, "<i8").reshape(pair.tokens.shape)
    return tokens, floats(pair.logprobs.dense).reshape(pair.logprobs.shape)


def test_alternatives_are_drawn_at_the_temperature(whole: Whole) -> None:
    count, right = 4000, whole.right["0a"]
    tokens, found = alternatives_of(whole.ask(alternatives=count, temperature=2.0, rng_seed=3))
    assert tokens.shape == (10, count)
    np.testing.assert_allclose(found, np.take_along_axis(right, tokens, 1), atol=CLOSE)
    chances = np.exp(right / 2)
    chances /= chances.sum(1, keepdims=True)
    shares = np.stack([np.bincount(row, minlength=VOCABULARY) for row in tokens]) / count
    # Five standard deviations.
    assert (abs(shares - chances) < 5 * np.sqrt(chances / count) + 1 / count).all()


def test_a_seed_draws_the_same_alternatives_again(whole: Whole) -> None:
    how: dict[str, Any] = {"alternatives": 50, "temperature": 5.0}
    same, again, other, free = [
        alternatives_of(whole.ask(rng_seed=seed, **how))[0] for seed in (-1, -1, 2, None)
    ]
    assert (same == again).all()
    assert (same != other).any()
    assert (same != free).any()
    greedy, _ = alternatives_of(whole.ask(alternatives=2, temperature=0.0))
    assert (greedy == whole.right["0a"].argmax(1)[:, None]).all()


@pytest.mark.parametrize("folder", ["", "0a"])
@pytest.mark.parametrize(("prompt", "temperature"), [(3, 1.0), (3, 0.25), (1, 2.0), (1, 0.0)])
@pytest.mark.parametrize("row_tokens", [1, 16, 64])
def test_the_top_tokens_of_sequences_are_those_at_the_temperature(
    whole: Whole, folder: str, prompt: int, temperature: float, row_tokens: int
) -> None:
    whole.trainer._config = dataclasses.replace(
        whole.trainer._config, micro_batch_tokens=row_tokens
    )
    ends = (5, prompt, 11, 4)
    drawn = [pack_tokens(TOKENS[prompt:end].tolist()) for end in ends]
    body = write_sample_result([SampledTokens(each, each, cut=bool(each)) for each in drawn])
    said = {"prompt": pack_tokens(TOKENS[:prompt].tolist()), "top_tokens": 4}
    said |= {"folder": folder, "temperature": temperature}
    result = whole.trainer.run(TinkerOperation("", 0, "score_sample", said, body))
    assert isinstance(result, bytes)
    assert read_sample_result(result) == read_sample_result(body)
    # At temperature 0 engines give the logprobs at 1.
    right = torch.tensor(whole.right[folder] / (temperature or 1.0)).log_softmax(1)
    for end, each in zip(ends, pb.SampleResult.FromString(result).sequences, strict=True):
        top, expected = each.top_tokens, right[prompt - 1 : end - 1].topk(4)
        assert (top.positions, top.kept) == expected.values.shape
        tokens = np.frombuffer(top.tokens, "<i4").reshape(-1, 4)
        assert (tokens == expected.indices.numpy()).all()
        found = floats(top.logprobs).reshape(-1, 4)
        np.testing.assert_allclose(found, expected.values, atol=4 * CLOSE)


def test_a_prompt_of_one_token_has_no_logprobs(whole: Whole) -> None:
    found = whole.ask(tokens_t=TOKENS[:1], logprobs=True, top_tokens=2, alternatives=3)
    assert np.isnan(floats(found.prompt_logprobs)).tolist() == [True]
    assert top_of(found)[1].tolist() == [[NO_LOGPROB] * 2]
    assert alternatives_of(found)[0].shape == (0, 3)


def test_a_token_beyond_the_vocabulary_is_refused(whole: Whole) -> None:
    with pytest.raises(WrongCall, match="prompt: expected tokens from 0 to 16; found 17"):
        whole.ask(tokens_t=np.array([1, 17]), logprobs=True)
    body = write_sample_result([SampledTokens(pack_tokens([17]), bytes(4), cut=True)])
    said = {"folder": "", "prompt": pack_tokens([1]), "top_tokens": 1, "temperature": 1.0}
    with pytest.raises(WrongCall, match="sample: expected tokens from 0 to 16; found 17"):
        whole.trainer.run(TinkerOperation("", 0, "score_sample", said, body))

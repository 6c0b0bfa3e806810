"""What the torch engine says of prompts, against what the learner says."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from echo2d.adapters import base_digest
from echo2d.client import TinkerOperation
from echo2d.engines.base import AdapterBase
from echo2d.engines.layout import file_tensor_digests
from echo2d.engines.torch_engine import TorchEngine, prompt_pass
from echo2d.engines.torch_engine.policy import InferencePolicy
from echo2d.errors import EngineFault
from echo2d.learner.tinker.trainer import Trainer
from echo2d.tinker import messages_pb2 as pb
from echo2d.tinker.prompts import PromptCall, PromptTargets
from echo2d.tinker.wire import write_prompt_call
from tests.support.engine_contract import ENDLESS, running
from tests.support.engine_harness import CONTEXT_MAX, label
from tests.support.held_contract import refit
from tests.support.learner import config_in, make_base
from tests.support.lora import AdapterHarness
from tests.support.tinker_calls import ADAM, CREATE, call, forward_backward

VOCABULARY = 17
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
DENSE = np.full((10, 3), -1)
DENSE[0], DENSE[2, 1], DENSE[9, :2] = (7, 0, 7), 11, (16, 2)
STARTS = np.searchsorted(np.nonzero(DENSE >= 0)[0], np.arange(11))
SPARSE = PromptTargets((10, 3), DENSE[DENSE >= 0], STARTS, np.nonzero(DENSE >= 0)[1])
CLOSE = 1e-4
QUESTIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True},
    "last logprobs": {"logprobs": True, "last": 3},
    "top tokens": {"top_tokens": 5},
    "all tokens": {"top_tokens": VOCABULARY, "last": 7},
    "targets": {"targets": PromptTargets((10, 3), DENSE.reshape(-1))},
    "sparse targets": {"targets": SPARSE},
    "targets and others": {"targets": SPARSE, "logprobs": True, "top_tokens": 2, "last": 1},
    "greedy alternatives": {"alternatives": 2, "temperature": 0.0},
    "one token": {"tokens_t": TOKENS[:1], "last": 0, "logprobs": True, "top_tokens": 2},
}


class Site(NamedTuple):
    """A trainer, the base of its adapters, and where its versions are: 1 is the base model, 2 is trained."""

    trainer: Trainer
    base: AdapterBase
    folder: Path

    def learner_says(self, body: bytes, version: int) -> bytes:
        said = {"folder": {1: "", 2: "0a"}[version]}
        found = self.trainer.run(TinkerOperation("", 0, "score", said, body))
        assert isinstance(found, bytes)
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("prompts")
    model = make_base(folder / "model", layers=2)
    (folder / "snapshots").mkdir()

    def publish(version: int, directory: Path) -> None:
        shutil.copytree(directory, folder / str(version))

    trainer = Trainer(config_in(folder, model), publish)
    trainer.run(call("create", **CREATE))
    targets = {"target_tokens": np.roll(TOKENS, -1), "weights": np.ones(len(TOKENS))}
    for _ in range(3):
        trainer.run(forward_backward([(TOKENS.tolist(), targets)]))
        trainer.run(call("optim_step", **ADAM))
    trainer.run(call("save", folder="0a", optimizer=False))
    for version, saved in ((1, ""), (2, "0a")):
        trainer.run(call("publish", "", folder=saved, version=version))
    kept = frozenset(map(label, (1, 2)))
    base = AdapterBase(model, base_digest(model), file_tensor_digests(model), kept=kept, held_max=2)
    return Site(trainer, base, folder)


@pytest.fixture
async def engine(site: Site) -> AsyncIterator[TorchEngine]:
    """It holds both versions, and serves the second one."""
    engine = TorchEngine(threads=1)
    await engine.start()
    for version in (1, 2):
        await engine.refit(site.folder / str(version), label(version), base=site.base)
    yield engine
    await engine.close()


def body_of(**asked: Any) -> bytes:
    given = {"tokens_t": TOKENS, "last": len(TOKENS) - 1, **asked}
    return write_prompt_call(PromptCall(**given))


def numbers(found: bytes) -> dict[str, NDArray[Any]]:
    """All that is said, by the names of its fields."""
    told = pb.SampleResult.FromString(found)
    top, drawn, given = (
        told.prompt_top_tokens,
        told.prompt_alternatives,
        told.target_prompt_logprobs,
    )
    return {
        "logprobs": np.frombuffer(told.prompt_logprobs, "<f4"),
        "top tokens": np.frombuffer(top.tokens, "<i4"),
        "top logprobs": np.frombuffer(top.logprobs, "<f4"),
        "drawn": np.frombuffer(drawn.tokens.dense, "<i8"),
        "drawn logprobs": np.frombuffer(drawn.logprobs.dense, "<f4"),
        "targets": np.frombuffer(given.dense or given.sparse.entries, "<f4"),
    }


@pytest.mark.parametrize("part_tokens", [1, 4, 256])
@pytest.mark.parametrize("name", QUESTIONS)
async def test_an_engine_says_what_the_learner_says_under_any_held_version(
    site: Site, engine: TorchEngine, name: str, part_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_pass, "PART_TOKENS", part_tokens)
    body = body_of(**QUESTIONS[name])
    for version in (1, 2):
        expected = await asyncio.to_thread(site.learner_says, body, version)
        found = await engine.read_prompt(body, label=label(version))
        assert len(found) == len(expected)
        for field, right in numbers(expected).items():
            np.testing.assert_allclose(numbers(found)[field], right, atol=CLOSE, err_msg=field)


async def test_drawn_alternatives_have_the_logprobs_of_their_tokens(engine: TorchEngine) -> None:
    every = numbers(await engine.read_prompt(body_of(top_tokens=VOCABULARY), label=label(2)))
    right = np.empty((10, VOCABULARY))
    rows = every["top tokens"].reshape(11, -1)[1:]
    np.put_along_axis(right, rows, every["top logprobs"].reshape(11, -1)[1:], 1)
    body = body_of(alternatives=1000, temperature=2.0, rng_seed=3)
    found = numbers(await engine.read_prompt(body, label=label(2)))
    tokens = found["drawn"].reshape(10, -1)
    expected = np.take_along_axis(right, tokens, 1)
    np.testing.assert_allclose(found["drawn logprobs"].reshape(10, -1), expected, atol=CLOSE)
    chances = np.exp(right / 2)
    chances /= chances.sum(1, keepdims=True)
    shares = np.stack([np.bincount(row, minlength=VOCABULARY) for row in tokens]) / 1000
    assert (abs(shares - chances) < 5 * np.sqrt(chances / 1000) + 1 / 1000).all()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff", "expected a protobuf message"),
        (body_of(tokens_t=np.array([1, VOCABULARY])), "prompt: expected tokens from 0 to 16"),
        (body_of(top_tokens=VOCABULARY + 1), "topk_prompt_logprobs: expected 0 to 17; found 18"),
    ],
)
async def test_a_prompt_that_does_not_fit_the_model_is_not_read(
    engine: TorchEngine, body: bytes, said: str
) -> None:
    with pytest.raises(EngineFault, match=said):
        await engine.read_prompt(body, label=label(2))
    with pytest.raises(EngineFault, match="is not held"):
        await engine.read_prompt(body_of(logprobs=True), label=label(3))


LONG = 1500


@pytest.fixture
async def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TorchEngine]:
    """It serves adapter 0 of a model with a long context, and reads each token of a prompt in a part of its own."""
    monkeypatch.setattr(prompt_pass, "PART_TOKENS", 1)
    harness = await asyncio.to_thread(AdapterHarness, tmp_path)
    engine = harness.engine()
    await engine.start()
    await refit(harness, engine, 0)
    yield engine
    await engine.close()


def long_body(tokens: int) -> bytes:
    return body_of(tokens_t=np.resize(TOKENS, tokens), logprobs=True, last=5)


async def test_samples_go_on_between_the_parts_of_a_long_prompt(busy: TorchEngine) -> None:
    async with running(busy, ENDLESS):
        assert busy._decoder is not None
        sample = busy._decoder.running[0]
        before = len(sample.output)
        await busy.read_prompt(long_body(100), label=label(0))
        assert len(sample.output) >= before + 50


async def test_a_prompt_whose_version_is_dropped_is_not_read_to_its_end(
    busy: TorchEngine, tmp_path: Path
) -> None:
    reading = asyncio.create_task(busy.read_prompt(long_body(LONG), label=label(0)))
    # Its base is that of the harness.
    await busy.refit(tmp_path / "1", label(1))
    with pytest.raises(EngineFault, match=f"version {label(0)} is not held"):
        await reading


async def test_a_prompt_beyond_the_context_is_not_read(busy: TorchEngine) -> None:
    with pytest.raises(EngineFault, match=f"expected at most {CONTEXT_MAX} tokens"):
        await busy.read_prompt(long_body(CONTEXT_MAX + 1), label=label(0))


async def test_a_prompt_for_which_the_memory_is_too_small_is_not_read(
    busy: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(InferencePolicy, "more_logits", fails)
    with pytest.raises(EngineFault, match=r"9 tokens are not read: out of memory$"):
        await busy.read_prompt(long_body(10), label=label(0))
    assert busy.label == label(0), "samples go on"

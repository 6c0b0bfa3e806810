"""The wire against the official client: it writes random bodies that are read here, and reads the results."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo2d.tinker.prompts import MostLikely, PromptCall, PromptScores, PromptTargets
from echo2d.tinker.wire import (
    SampledTokens,
    SequenceSpan,
    read_forward_backward,
    read_head,
    write_forward_backward_output,
    write_prompt_scores,
    write_sample_result,
)
from tests.support.paths import REPO, TINKER_ENVIRONMENT

BODIES = 300
RNG_SEED = 38


def client(*words: str) -> None:
    """Run `tests/support/tinker_bodies.py` in the client's environment."""
    python = TINKER_ENVIRONMENT / "venv" / "bin" / "python"
    ended = subprocess.run(
        [str(python), "-m", "tests.support.tinker_bodies", *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """N.body and N.json for each body."""
    made = tmp_path_factory.mktemp("bodies")
    client("write", str(made), str(RNG_SEED), str(BODIES))
    return made


def test_every_body_of_the_client_is_read_as_it_was(folder: Path) -> None:
    sparse = 0
    for index in range(BODIES):
        body = (folder / f"{index}.body").read_bytes()
        holds: dict[str, Any] = json.loads((folder / f"{index}.json").read_text())
        found = read_forward_backward(body)
        assert read_head(body) == found.head
        assert (found.head.model, found.head.number) == (holds["model"], holds["number"])
        assert (found.head.loss, found.head.forward_only) == (holds["loss"], holds["forward_only"])
        assert found.config == holds["config"]
        for one, expected in zip(found.data, holds["data"], strict=True):
            assert one.tokens_t.tolist() == expected["tokens"]
            assert one.spans == tuple(SequenceSpan(**span) for span in expected["spans"])
            assert one.inputs.keys() == expected["inputs"].keys()
            for name, (dtype, numbers) in expected["inputs"].items():
                assert one.inputs[name].dtype == dtype
                assert np.array_equal(one.inputs[name], np.array(numbers, dtype))
            sparse += len(expected["sparse"])
    assert sparse > BODIES // 2  # inputs that the client sent in the sparse form


def test_the_client_reads_every_result_as_it_was_written(folder: Path) -> None:
    rng = np.random.default_rng(RNG_SEED)
    written: list[tuple[list[Any], dict[str, float]]] = []
    for index in range(BODIES):
        shapes = [
            (int(rng.integers(1, 9)), *([int(rng.integers(1, 4))] * int(rng.integers(2))))
            for _ in range(rng.integers(1, 6))
        ]
        arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        figures = {"loss:sum": float(rng.normal()), "tokens:sum": float(len(arrays))}
        written.append((arrays, figures))
        body = write_forward_backward_output(arrays, figures)
        (folder / f"{index}.result").write_bytes(body)
    client("read", str(folder))
    for index, (arrays, figures) in enumerate(written):
        found = json.loads((folder / f"{index}.found.json").read_text())
        assert (found["kind"], found["metrics"]) == ("ArrayRecord", figures)
        for array, (dtype, shape, numbers) in zip(arrays, found["logprobs"], strict=True):
            assert (dtype, tuple(shape)) == ("float32", array.shape)
            assert np.array_equal(np.array(numbers, np.float32).reshape(shape), array)


def random_answer(rng: np.random.Generator) -> tuple[PromptCall, PromptScores, dict[str, Any]]:
    """What was asked of a prompt, the answer, and what the client shows of it."""
    tokens, top, others, width = (int(each) for each in rng.integers((1, 0, 0, 1), (7, 4, 4, 4)))
    last = int(rng.integers(0, tokens))
    listed = rng.random((tokens - 1, width)) < 0.6
    rows, columns = np.nonzero(listed)
    layout: tuple[Any, ...] = (np.searchsorted(rows, np.arange(tokens)), columns)
    if rng.random() < 0.5:
        listed[:], layout = True, ()
    cells = rng.integers(0, 99, int(listed.sum()))
    targets = PromptTargets((tokens - 1, width), cells, *layout) if rng.random() < 0.7 else None
    call = PromptCall(
        tokens_t=np.arange(tokens),
        logprobs=bool(rng.random() < 0.5),
        last=last,
        top_tokens=top,
        targets=targets,
        alternatives=others,
    )
    scores = PromptScores.empty(call)
    scores.logprobs_t[tokens - last :] = rng.normal(size=last)
    scores.top_tokens_tk[tokens - last :] = rng.integers(1, 99, (last, top))
    scores.top_logprobs_tk[tokens - last :] = rng.normal(size=(last, top))
    scores.targets_c[:] = rng.normal(size=len(scores.targets_c))
    scores.alternatives_tk[:] = rng.integers(0, 99, scores.alternatives_tk.shape)
    scores.alternative_logprobs_tk[:] = rng.normal(size=scores.alternatives_tk.shape)
    pairs = zip(scores.top_tokens_tk.tolist(), scores.top_logprobs_tk.tolist(), strict=True)
    tops = [[list(each) for each in zip(*pair, strict=True)] for pair in pairs]
    dense = np.zeros(listed.shape, np.float32)
    if targets is not None:
        dense[listed] = scores.targets_c
    shape = list(scores.alternatives_tk.shape)
    drawn = ("int64", scores.alternatives_tk), ("float32", scores.alternative_logprobs_tk)
    shown = {
        "logprobs": [None] * (tokens - last) + scores.logprobs_t[tokens - last :].tolist()
        if call.logprobs
        else None,
        "top": [None] * (tokens - last) + tops[tokens - last :] if top else None,
        "targets": ["float32", list(listed.shape), dense.tolist()] if targets else None,
        "alternatives": [[dtype, shape, each.tolist()] for dtype, each in drawn]
        if others
        else None,
    }
    return call, scores, shown


def test_the_client_reads_every_answer_about_a_prompt_as_it_was_written(folder: Path) -> None:
    rng = np.random.default_rng(RNG_SEED)
    written = [random_answer(rng) for _ in range(BODIES)]
    for index, (call, scores, shown) in enumerate(written):
        shape = int(rng.integers(0, 4)), int(rng.integers(1, 4))
        ids, logprobs = rng.integers(0, 99, shape), rng.normal(size=shape)
        top = MostLikely(ids.astype(np.int32), logprobs.astype(np.float32))
        numbers = zip(top.tokens_nk.tolist(), top.logprobs_nk.tolist(), strict=True)
        tops = [[list(each) for each in zip(*pair, strict=True)] for pair in numbers]
        shown["sampled"] = tops or None
        data = bytes(4 * len(ids))
        sampled = write_sample_result([SampledTokens(data, data, cut=True, top=top)])
        (folder / f"{index}.sample").write_bytes(sampled + write_prompt_scores(call, scores))
    client("read-samples", str(folder))
    for index, (_, _, shown) in enumerate(written):
        assert json.loads((folder / f"{index}.sample.json").read_text()) == shown

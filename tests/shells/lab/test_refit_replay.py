"""The proof that spans are right finds wrong ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from echo2d_lab.bench.refit.replay import ERROR_MAX, ReplayedSample, load_model, replay
from tests.support.engine_harness import save_random_model, tiny_config

PROMPT = [3, 1, 4, 1, 5, 9]
# Output tokens that each version wrote, and whether it began with a fresh KV cache.
PARTS = (("0", 12, True), ("1", 9, False), ("2", 7, False), ("2", 8, True), ("0", 6, False))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    for version in range(3):
        save_random_model(folder / str(version), tiny_config(), rng_seed=version)
    return {name: load_model(Path(folder) / name) for name in "012"}


@torch.no_grad()
def written(models: dict[str, Any]) -> tuple[list[int], list[float], list[str]]:
    """Tokens, logprobs and labels of a sample, made one token at a time as a server makes them."""
    torch.manual_seed(0)
    context, logprobs, labels = list(PROMPT), list[float](), list[str]()
    cache, fed = DynamicCache(), 0
    for name, count, fresh in PARTS:
        if fresh:
            cache, fed = DynamicCache(), 0
        for _ in range(count):
            rows = torch.tensor([context[fed:]])
            logits = models[name](input_ids=rows, past_key_values=cache, use_cache=True).logits
            fed = len(context)
            chances = torch.log_softmax(logits[0, -1].float(), dim=-1)
            token = int(torch.multinomial(chances.exp(), 1))
            context.append(token)
            logprobs.append(float(chances[token]))
            labels.append(name)
    return context[len(PROMPT) :], logprobs, labels


def replayed(models: dict[str, Any], labels: list[str], *, keeps_kv: bool = True) -> ReplayedSample:
    tokens, logprobs, _ = written(models)
    return replay(models.__getitem__, PROMPT, tokens, logprobs, labels, keeps_kv=keeps_kv)


def test_right_spans_explain_every_token_and_the_cut_is_found(models: dict[str, Any]) -> None:
    found = replayed(models, written(models)[2])
    assert (found.wrong, found.cuts) == (0, 1)
    assert found.error < ERROR_MAX
    assert len(found.unlike) == 9 + 7 + 6
    assert max(found.unlike) > ERROR_MAX
    assert len(found.moved) >= len(found.unlike)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_span_that_is_off_by_one_token_is_found(models: dict[str, Any], shift: int) -> None:
    labels = written(models)[2]
    labels[12 + min(0, shift)] = "1" if shift < 0 else "0"
    assert replayed(models, labels).wrong > 0


def test_kv_caches_that_were_kept_are_found_where_they_should_be_fresh(
    models: dict[str, Any],
) -> None:
    assert replayed(models, written(models)[2], keeps_kv=False).wrong > 0

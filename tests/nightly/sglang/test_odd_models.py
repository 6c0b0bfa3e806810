"""SGLang loads the weights of `from_pretrained` from the version that an odd model directory is published as."""

import asyncio
from pathlib import Path

import pytest

from tests.support.learner import config_in, learn, make_base
from tests.support.odd_models import draw
from tests.support.scripted_coordinator import ScriptedCoordinator
from tests.support.sglang_servers import TOKENS, answered, logprobs

# All oddities that can be read, but the type of the numbers and a second copy of a tied weight.
SEEDS = range(8)


def published(seed: int, folder: Path) -> Path:
    base = make_base(folder / "models")
    assert draw(seed, folder / "model", base, ["qwen3", "llama"])[2]
    (folder / "snapshots").mkdir()
    coordinator = ScriptedCoordinator(folder / "taken")
    learn(config_in(folder, folder / "model", steps=1), coordinator)
    return coordinator.published(0)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_server_has_the_weights_of_from_pretrained(seed: int, tmp_path: Path) -> None:
    answer = await answered(await asyncio.to_thread(published, seed, tmp_path), tmp_path / "server")
    tokens = [token for _, token in answer]
    assert len(tokens) == TOKENS
    expected = await asyncio.to_thread(logprobs, tmp_path / "model", tokens)
    assert [logprob for logprob, _ in answer] == pytest.approx(expected, abs=1e-3)

"""SGLang starts with the learner's exports, and gives the logprobs of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from echo2d.learner.__main__ import main
from tests.support.learner import config_in, learn, make_base, write_config
from tests.support.lora import OnBase
from tests.support.scripted_coordinator import ScriptedCoordinator
from tests.support.sglang_servers import TOKENS, answered, logprobs


def exported(folder: Path, *, merged: bool) -> tuple[Path, Path]:
    """The base of a short run, and the export of its last step."""
    base = make_base(folder / "models", layers=2)
    (folder / "snapshots").mkdir()
    changes: dict[str, Any] = {"lora_rank": 4} if merged else {}
    config = config_in(folder, base, steps=2, lr=1e-2, warmup_steps=0, **changes)
    taken = folder / "taken"
    learn(config, OnBase(taken, base) if merged else ScriptedCoordinator(taken))
    command = ["--config", str(write_config(folder / "run.toml", config)), "--export", "last"]
    assert main([*command, str(folder / "export"), *["--merge"] * merged]) == 0
    return base, folder / "export"


@pytest.mark.parametrize("merged", [False, True])
async def test_a_server_starts_with_an_export(tmp_path: Path, merged: bool) -> None:
    base, export = await asyncio.to_thread(exported, tmp_path, merged=merged)
    answer = await answered(export, tmp_path / "server")
    tokens = [token for _, token in answer]
    assert len(tokens) == TOKENS
    expected = await asyncio.to_thread(logprobs, export, tokens)
    assert [logprob for logprob, _ in answer] == pytest.approx(expected, abs=1e-3)
    assert expected != pytest.approx(await asyncio.to_thread(logprobs, base, tokens), abs=1e-2)

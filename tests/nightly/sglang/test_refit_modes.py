"""The effect of each refit mode on a real server's tokens, proved token by token."""

from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.engines.server.launch import Running
from echo2d_lab.bench.refit.modes import Mode, ModeFound, RefitWork, make_versions, measure
from tests.support.engine_harness import tiny_config

WORK = RefitWork(samples=6, prompt_tokens=24, answer_tokens=1500, refits=3, change=0.05, held_s=0.2)


async def found(server: Running, folder: Path, mode: Mode, work: RefitWork = WORK) -> ModeFound:
    versions = make_versions(folder, work, tiny_config(intermediate_size=64))
    measured = await measure(server, versions, work, mode)
    assert measured.checked == work.samples * work.answer_tokens
    assert measured.wrong == 0, "a token is not of the version that its span names"
    assert measured.lost == 0
    return measured


@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_a_refit_that_cuts_computes_every_running_sample_again(
    servers: list[Running], tmp_path: Path, mode: Mode
) -> None:
    measured = await found(servers[0], tmp_path, mode)
    contexts = WORK.samples * (WORK.prompt_tokens + WORK.answer_tokens)
    assert measured.tokens == sorted(measured.tokens)
    assert WORK.samples * WORK.prompt_tokens < measured.tokens[0] < contexts
    assert measured.recompute_s[0] is None
    for said in measured.recompute_s[1:]:
        assert said is not None
        assert said > 0
    assert measured.cuts == 0


async def test_a_refit_in_place_keeps_kv_caches_and_cuts_each_sample_a_little_later(
    servers: list[Running], tmp_path: Path
) -> None:
    """Each token was written by the version of its span on the KV caches of those before it; after
    a sample was cut, on clean ones. So a worker that dies takes less along.
    """
    never = await found(servers[0], tmp_path / "never", "in_place", replace(WORK, held_s=1e9))
    assert (never.cuts, never.tokens) == (0, [0] * WORK.refits)
    measured = await found(servers[0], tmp_path / "cut", "in_place")
    assert measured.tokens[0] == 0
    assert measured.cuts > 0
    assert sum(measured.tokens[1:]) > 0, "what the cuts dropped counts at the next refit"
    assert measured.risk < never.risk / 2
    assert measured.unlike > 0

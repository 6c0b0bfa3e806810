"""After a worker is killed, its unfinished samples go on with the tokens that the coordinator had received."""

import asyncio
import json
import shutil
from pathlib import Path

from echo2d.core.protocol.control_messages import LeaseProgress, RefitDone
from echo2d.engines.server.launch import Running
from echo2d.store.snapshots import build_manifest
from tests.support.engine_harness import CONTEXT_MAX
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_seed, a_worker
from tests.support.progress import ReportedSamples
from tests.support.sglang_harness import SglangHarness

LEASES, SAMPLES, BEFORE_S = 4, 4, 14.0
SURVIVES_MIN = 0.8


async def test_most_tokens_of_a_killed_worker_survive(
    tmp_path: Path, servers: list[Running]
) -> None:
    """It dies without a word; every token it was told of before has its version."""
    harness = SglangHarness(tmp_path / "models", servers)
    engine = harness.engine()
    async with CoordinatorDouble.serving(tmp_path / "run") as double, a_seed(double):
        async with a_worker(double, tmp_path / "box", engine):
            names = await double.peers(2)
            path = double.run.path / "versions" / "0"
            await asyncio.to_thread(shutil.copytree, harness.snapshot(0), path)
            await asyncio.to_thread((path / "tokenizer.json").write_text, "{}")
            digest = (await asyncio.to_thread(build_manifest, path)).digest
            facts = double.facts(0, 1)
            double.start_form(facts)
            double.chain(facts.form, [names["seed"], names["box"]], plan=1)
            double.send(names["seed"], double.order(facts, digest, path))
            done = await double.until_said(RefitDone, names["box"])
            assert done.memory_ok is None, "SGLang does not give its weights back"
            for number in range(1, LEASES + 1):
                double.send(
                    names["box"], double.lease(number, samples=SAMPLES, tokens=CONTEXT_MAX - 100)
                )
            await asyncio.sleep(
                BEFORE_S
            )  # progress is told every two seconds; this is what is measured
            made = [sample for call in engine._calls.values() for sample in call.outputs]
            written = sum(len(sample.output) for sample in made)
        told = ReportedSamples(double.said(LeaseProgress))
    survived = sum(map(len, told.tokens.values()))
    print(json.dumps({"written": written, "survived": survived, "share": survived / written}))  # noqa: T201
    assert len(made) == len(told.tokens) == LEASES * SAMPLES
    assert survived >= SURVIVES_MIN * written
    for key, tokens in told.tokens.items():
        assert len(told.versions[key]) == len(tokens)
        assert set(told.versions[key]) == {0}
        truth = harness.logprobs(0, [5, 6, 7], tokens, 1.0)
        assert max(abs(a - b) for a, b in zip(truth, told.logprobs[key], strict=True)) < 1e-3

"""One worker, several engines: one download, all engines generate, every token has its version, never a mixture."""

import asyncio
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2d.config.worker import WorkerConfig
from echo2d.core.base.ids import Digest, PeerId, version_label
from echo2d.core.protocol.control_messages import (
    Heartbeat,
    LeaseFailed,
    LeaseProgress,
    RefitDone,
    RefitFailed,
    SampleFinished,
    TransferReport,
)
from echo2d.engines.base import Engine
from echo2d.engines.fake import FakeEngine, FakePolicy, RefitOutcome, fake_logprob
from echo2d.engines.torch_engine import TorchEngine, devices_of
from echo2d.engines.torch_engine.engine import threads_each
from echo2d.errors import OperatorFault
from echo2d.runtime.worker.engine_refit import engine_options, make_engines
from echo2d.store.snapshots import build_manifest
from tests.support.engine_harness import CONTEXT_MAX, VOCAB_SIZE, FakeHarness, Harness, TorchHarness
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_seed, a_worker, config_of, spread
from tests.support.progress import ReportedSamples

LOGPROB_ERROR_MAX = 1e-3
TABLE_BYTES = 1000  # of a tiny form, headers included
PACE = (
    100.0  # tokens per second of one engine: a lease without an end goes on until the test is over
)
PROMPT = [5, 6, 7]  # of the double's leases

MakeEngine = Callable[[], Engine]
Logprobs = Callable[
    [int, str, list[int]], list[float]
]  # version, its label, output -> of each output token


def fake_engine(*outcomes: RefitOutcome) -> FakeEngine:
    endless = (CONTEXT_MAX, CONTEXT_MAX)
    return FakeEngine(
        FakePolicy(vocab_size=VOCAB_SIZE, eos_token_id=VOCAB_SIZE, answer_tokens=endless),
        tokens_per_s=PACE,
        refit_outcomes=outcomes,
    )


def fake_logprobs(version: int, label: str, output: list[int]) -> list[float]:
    context = [*PROMPT, *output]
    return [
        fake_logprob(label, context[:place], context[place])
        for place in range(len(PROMPT), len(context))
    ]


@pytest.fixture(params=["fake", "torch"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    folder = tmp_path / "models"
    return FakeHarness(folder) if request.param == "fake" else TorchHarness(folder)


def kind_of(harness: Harness) -> tuple[MakeEngine, Logprobs]:
    if isinstance(harness, FakeHarness):
        return fake_engine, fake_logprobs
    return (
        lambda: TorchEngine(threads=1, tokens_per_s_max=PACE),
        lambda version, _, output: harness.logprobs(version, PROMPT, output, 1.0),
    )


async def publish(
    double: CoordinatorDouble, harness: Harness, version: int, seed: PeerId, worker: PeerId
) -> Digest:
    path = double.run.path / "versions" / str(version)
    await asyncio.to_thread(lambda: shutil.copytree(harness.snapshot(version), path))
    await asyncio.to_thread((path / "tokenizer.json").write_text, "{}")
    digest = (await asyncio.to_thread(build_manifest, path)).digest
    facts = double.facts(version, version + 1)
    double.start_form(facts)
    double.chain(facts.form, [seed, worker], plan=version + 1)
    double.send(seed, double.order(facts, digest, path))
    return digest


async def both_busy(double: CoordinatorDouble, engines: list[Engine]) -> None:
    """Each runs one of two leases."""
    beats = len(double.said(Heartbeat))
    while [(await engine.load()).running for engine in engines] != [2, 2]:
        beats += 1
        await double.until_said(Heartbeat, count=beats)


@pytest.mark.timeout(120)
async def test_two_engines_share_one_download_and_have_true_spans_across_a_refit(
    double: CoordinatorDouble, tmp_path: Path, harness: Harness
) -> None:
    make_engine, logprobs = kind_of(harness)
    engines = [make_engine(), make_engine()]
    async with a_seed(double), a_worker(double, tmp_path / "box", *engines):
        names = await double.peers(2)
        seed, box = names["seed"], names["box"]
        digests = [await publish(double, harness, 0, seed, box)]
        assert (await double.until_said(RefitDone, box)).memory_ok
        for number in (1, 2):
            double.send(box, double.lease(number, tokens=CONTEXT_MAX - 100))
        await both_busy(double, engines)
        digests.append(await publish(double, harness, 1, seed, box))
        refit = await double.until_said(RefitDone, box, count=2)
        assert refit.memory_ok
        samples = {(lease, sample) for lease in (1, 2) for sample in (0, 1)}
        await double.until(
            lambda: (
                {key for key, wrote in told(double).versions.items() if {0, 1} <= set(wrote)}
                == samples
            ),
            timeout_s=60.0,
        )
        sent = [report for report in double.said(TransferReport, seed) if report.payload_bytes]
        assert sent[-1].sent_bytes < 1.1 * sent[-1].payload_bytes + TABLE_BYTES, (
            "the engines share one download"
        )
    assert refit.recomputed_tokens == sum(
        len(PROMPT) + told(double).versions[key].count(0) for key in samples
    ), "of both engines"
    assert refit.recompute_s is not None
    assert refit.recompute_s >= 0
    labels = [version_label(double.facts(v, 0).version, digest) for v, digest in enumerate(digests)]
    for key, output in told(double).tokens.items():
        written_by = told(double).versions[key]
        assert written_by == sorted(written_by)
        assert len(written_by) == len(output)
        for version, label in enumerate(labels):
            truth = logprobs(version, label, output)
            errors = [abs(a - b) for a, b in zip(truth, told(double).logprobs[key], strict=True)]
            assert (
                max(e for e, by in zip(errors, written_by, strict=True) if by == version)
                < LOGPROB_ERROR_MAX
            )
            assert (
                max(e for e, by in zip(errors, written_by, strict=True) if by != version)
                > LOGPROB_ERROR_MAX
            )


def told(double: CoordinatorDouble) -> ReportedSamples:
    return ReportedSamples(double.said(LeaseProgress))


@pytest.mark.parametrize(
    ("first", "second", "served"),
    [
        ("done", "fails", None),
        ("done", "doubtful", None),
        ("doubtful", "done", None),
        ("fails", "done", 0),
    ],
)
async def test_an_engine_that_fails_a_refit_never_serves_mixed_versions(
    double: CoordinatorDouble,
    tmp_path: Path,
    first: RefitOutcome,
    second: RefitOutcome,
    served: int | None,
) -> None:
    engines = [fake_engine("done", first), fake_engine("done", second)]
    async with a_seed(double), a_worker(double, tmp_path / "box", *engines):
        names = await double.peers(2)
        seed, box = names["seed"], names["box"]
        await spread(double, 0, seed, box)
        await double.until_said(RefitDone, box)
        for number in (1, 2):
            double.send(box, double.lease(number, tokens=CONTEXT_MAX - 100))
        await both_busy(double, list(engines))
        await spread(double, 1, seed, box)
        failed = await double.until_said(RefitFailed, box)
        assert (None if failed.serving is None else failed.serving.version) == served
        double.send(box, double.lease(3, samples=1))
        if served is None:  # what runs goes back, nothing new is begun
            await double.until(
                lambda: {each.lease for each in double.said(LeaseFailed)} == {1, 2, 3}
            )
            assert double.said(SampleFinished) == []
        else:  # the other engine was not asked: both go on as if nothing had been
            result = await double.until_said(SampleFinished, box)
            assert {span.version for span in result.spans} == {0}
            assert double.said(LeaseFailed) == []
        await spread(double, 2, seed, box)
        await double.until(lambda: any(done.version == 2 for done in double.said(RefitDone, box)))
        assert len({engine.label for engine in engines}) == 1
        double.send(box, double.lease(4, samples=1))
        await double.until(lambda: any(result.lease == 4 for result in double.said(SampleFinished)))
        assert {span.version for span in double.said(SampleFinished)[-1].spans} == {2}


async def test_slots_and_pace_are_reported_for_all_engines_together(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        await config_of(double, tmp_path / "box"), engines=3, tokens_per_s_max=30.0, slots=5
    )
    engines = await asyncio.to_thread(make_engines, config)
    assert [isinstance(engine, FakeEngine) and engine._tokens_per_s for engine in engines] == [
        10.0
    ] * 3
    async with a_worker(double, tmp_path / "box", *engines):
        names = await double.peers(1)
        assert double.hellos[names["box"]].slots == 3 * 16, "of the worker's config"


async def test_a_worker_in_int8_reports_its_quantization_and_offers_no_scores(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    chosen: dict[str, Any] = {"engine": "torch", "quantization": "int8"}
    async with a_worker(double, tmp_path / "box", TorchEngine(), **chosen):
        names = await double.peers(1)
        hello = double.hellos[names["box"]]
        assert (hello.quantization, hello.scores) == ("int8", False)


@pytest.mark.parametrize(
    ("device", "gpus", "engines", "devices"),
    [
        ("auto", 0, 2, ["cpu", "cpu"]),
        ("cpu", 8, 2, ["cpu", "cpu"]),
        ("auto", 1, 1, ["cuda"]),
        ("cuda:3", 4, 1, ["cuda:3"]),
        ("auto", 4, 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", 2, 2, ["cuda:0", "cuda:1"]),
    ],
)
def test_each_engine_has_its_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, engines: int, devices: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert devices_of(device, engines) == devices


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1), ("cuda", 0), ("cuda:0", 8)])
def test_fewer_gpus_than_engines_are_the_operators_mistake(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(OperatorFault, match="2 engines on device"):
        devices_of(device, 2)


@pytest.mark.parametrize(
    ("engines", "threads", "each"), [(1, 0, None), (1, 3, 3), (2, 6, 3), (4, 2, 1)]
)
def test_engines_share_the_threads_of_the_cpu(
    tmp_path: Path, engines: int, threads: int, each: int | None
) -> None:
    where = WorkerConfig(url="http://127.0.0.1:1", token_file=tmp_path, state_dir=tmp_path)
    config = dataclasses.replace(where, engines=engines, threads=threads)
    assert threads_each(engine_options(config)) == each

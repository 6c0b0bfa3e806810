"""The auditor: a real process with a real engine scores the ordered answers, and says why it cannot."""

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import PeerId, Version
from echo2d.core.protocol.control_messages import (
    AnswersScored,
    AnswerToScore,
    ScoreAnswers,
    ScoringFailed,
)
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d.engines.base import GenerateRequest
from echo2d.engines.torch_engine.engine import TorchEngine
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import public_bytes
from echo2d.runtime.audit import main as auditor_module
from echo2d.runtime.audit.main import Auditor, make_engine, require_room
from echo2d.runtime.audit.supervisor import AUDIT_MODULE, AuditHandover, supervise_auditor
from echo2d.store.snapshots import build_manifest
from tests.support.engine_harness import save_random_model, tiny_config
from tests.support.fake_coordinator import CoordinatorDouble

PROMPT, SEED, TOKENS = (3, 4, 5), 41, 12


def handover_of(double: CoordinatorDouble, **changes: Any) -> AuditHandover:
    key = Ed25519PrivateKey.generate()
    double.access.admit_own(public_bytes(key), "auditor")
    settings = {"device": "cpu", "dtype": "float32", "base_model": "", "threads": 1, **changes}
    return AuditHandover.make(double.url, key, double.run, **settings)


@asynccontextmanager
async def an_auditor(double: CoordinatorDouble) -> AsyncIterator[PeerId]:
    handover = await asyncio.to_thread(handover_of, double)
    engine = await asyncio.to_thread(make_engine, handover)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(Auditor(handover, engine).run())
        [peer] = (await double.peers(1)).values()
        yield peer
        running.cancel()


def a_version(double: CoordinatorDouble, number: int) -> Path:
    path = double.run.path / "versions" / f"{number}-x"
    save_random_model(path, tiny_config(), rng_seed=number)
    (path / "tokenizer.json").write_text("{}")
    return path


async def an_answer(model: Path) -> AnswerToScore:
    """What an honest engine writes."""
    engine = TorchEngine(threads=1)
    await engine.start()
    await engine.refit(model, "0-a")
    tokens, logprobs = list[int](), list[float]()
    request = GenerateRequest("r", PROMPT, 1, TOKENS, rng_seeds=[SEED])
    async for output in engine.generate(request):
        tokens += output.tokens
        logprobs += output.logprobs
    await engine.close()
    return AnswerToScore(pack_tokens(PROMPT), pack_tokens(tokens), pack_logprobs(logprobs), 0, SEED)


def an_order(number: int, path: Path, *answers: AnswerToScore) -> ScoreAnswers:
    digest = build_manifest(path).digest
    place = f"versions/{path.name}"
    return ScoreAnswers(number, Version(number), digest, place, "torch", answers)


async def test_honest_answers_and_lies_are_told_apart_version_by_version(
    double: CoordinatorDouble,
) -> None:
    old, new = [await asyncio.to_thread(a_version, double, number) for number in (0, 1)]
    answer = await an_answer(old)
    made_up = replace(answer, tokens=pack_tokens([7] * TOKENS))
    async with an_auditor(double) as peer:
        assert double.hellos[peer].kind == "auditor"
        double.send(peer, await asyncio.to_thread(an_order, 0, old, answer, made_up))
        scored = await double.until_said(AnswersScored)
        honest, lie = scored.found
        assert (honest.tokens, honest.missed) == (TOKENS, 0)
        assert honest.k < 1e-5
        assert lie.missed is not None
        assert lie.missed > TOKENS / 2
        assert lie.k > 0.1
        assert scored.loading_s > 0 < scored.scoring_s
        # The same answer under another version is a lie about the version.
        double.send(peer, await asyncio.to_thread(an_order, 1, new, answer))
        other = (await double.until_said(AnswersScored, count=2)).found[0]
        assert other.k > 0.1
        # Back to the first: an order names its version, whatever is loaded.
        double.send(peer, await asyncio.to_thread(an_order, 2, old, answer))
        assert (await double.until_said(AnswersScored, count=3)).found[0] == honest


async def test_a_piece_that_continues_another_workers_answer_is_replayed_at_its_place(
    double: CoordinatorDouble,
) -> None:
    model = await asyncio.to_thread(a_version, double, 0)
    whole = await an_answer(model)
    tail = AnswerToScore(
        whole.prompt + whole.tokens[:20], whole.tokens[20:], whole.logprobs[20:], 5, SEED
    )
    async with an_auditor(double) as peer:
        order = await asyncio.to_thread(an_order, 0, model, tail, replace(tail, written=0))
        double.send(peer, order)
        right, wrong_place = (await double.until_said(AnswersScored)).found
        assert right.missed == 0
        assert wrong_place.missed


@pytest.mark.parametrize("how", ["gone", "rotten", "vocabulary", "logprobs"])
async def test_an_order_that_cannot_be_scored_is_reported_and_the_next_one_is_done(
    double: CoordinatorDouble, how: str
) -> None:
    model = await asyncio.to_thread(a_version, double, 0)
    answer = await an_answer(model)
    good = await asyncio.to_thread(an_order, 1, model, answer)
    match how:
        case "gone":
            bad = replace(good, order=0, path="versions/9-x")
        case "rotten":
            bad = replace(good, order=0, digest=type(good.digest)(bytes(32)))
        case "vocabulary":
            tokens = np.full(TOKENS, 1 << 20, dtype=np.int32).tobytes()
            bad = replace(good, order=0, answers=(replace(answer, tokens=tokens),))
        case _:
            bad = replace(good, order=0, answers=(replace(answer, logprobs=b"1234"),))
    async with an_auditor(double) as peer:
        double.send(peer, bad)
        failed = await double.until_said(ScoringFailed)
        assert failed.order == 0
        assert failed.reason.count("\n") == 0
        double.send(peer, good)
        assert (await double.until_said(AnswersScored)).order == 1


async def test_the_process_joins_and_ends_with_its_parent(double: CoordinatorDouble) -> None:
    handover = await asyncio.to_thread(handover_of, double)
    async with asyncio.TaskGroup() as tasks:
        supervisor = tasks.create_task(supervise_auditor(handover, rng=random.Random(1)))
        [peer] = (await double.peers(1)).values()
        assert double.hellos[peer].kind == "auditor"
        supervisor.cancel()
    await double.until(lambda: not double.connected)


async def test_a_missing_device_ends_the_coordinator_with_one_line(
    double: CoordinatorDouble,
) -> None:
    handover = await asyncio.to_thread(handover_of, double, device="cuda:7")
    with pytest.raises(OperatorFault, match=r"cuda:7.*cannot be used") as refused:
        await supervise_auditor(handover, rng=random.Random(1))
    assert "\n" not in str(refused.value)


def test_a_model_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_model(tmp_path / "model", tiny_config(), rng_seed=0)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    engine = TorchEngine(threads=1)
    assert engine.free_bytes() > 1 << 20
    require_room(engine, tmp_path / "model")
    monkeypatch.setattr(auditor_module, "MEMORY_MARGIN", 1e12)
    with pytest.raises(OperatorFault, match=r"audit.device: the model has 0.0 GB"):
        require_room(engine, tmp_path / "model")


def test_an_auditor_started_by_hand_is_the_operators_mistake() -> None:
    command = [sys.executable, "-m", AUDIT_MODULE]
    ended = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert b"started by `echo2d coordinate`" in ended.stderr
    assert b"Traceback" not in ended.stderr

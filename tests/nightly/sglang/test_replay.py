"""A server with --enable-deterministic-inference draws the tokens of its seeds: hash, positions, columns."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.engines.base import GenerateRequest
from echo2d.engines.server.launch import Running
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang.engine import SglangEngine
from echo2d.engines.torch_engine.gumbel import murmur_hash
from echo2d.engines.torch_engine.policy import InferencePolicy, build, prepare
from echo2d.engines.torch_engine.scoring import ScoredAnswer, score
from tests.support.engine_harness import save_random_model, tiny_config
from tests.support.paths import REPO
from tests.support.sglang_servers import launch, until_ready

SEEDS = tuple(((1 << 63) - 1) // 17 * number for number in range(1, 17))
TOKENS = 40
REQUEST = GenerateRequest("r", [3, 4, 5], len(SEEDS), TOKENS, rng_seeds=SEEDS)
# Rounding alone: server and auditor compute in float32.
FAR = 0.0025  # of a tolerance: 0.001 nats
HASHES = """
import json, sys
import torch
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
seeds, positions, columns = json.loads(sys.argv[1])
hashes = torch.empty((len(seeds), len(columns)), dtype=torch.uint32)
murmur_hash32_kernel[(len(seeds), 1)](
    torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns), hashes,
    len(seeds), len(columns), BLOCK_SIZE=1024,
)
print(json.dumps(hashes.to(torch.int64).tolist()))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("deterministic")
    await asyncio.to_thread(save, folder / "model", 99)
    process = ServerProcess(launch(folder / "server", "--enable-deterministic-inference"))
    await process.start(folder / "model", "start")
    try:
        await until_ready(process)
        yield Running(process.url, folder, process.api_key, process.admin_key)
    finally:
        await process.stop()


@pytest_asyncio.fixture
async def engine(server: Running, tmp_path: Path) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(server)
    await engine.start()
    await asyncio.to_thread(save, tmp_path / "model", 0)
    await engine.refit(tmp_path / "model", "0-a")
    yield engine
    await engine.close()


@pytest.fixture
def policy(tmp_path: Path, engine: SglangEngine) -> InferencePolicy:
    with torch.inference_mode():
        return build(
            prepare(tmp_path / "model", None, torch.float32), torch.float32, torch.device("cpu")
        )


def save(folder: Path, version: int) -> None:
    save_random_model(folder, tiny_config(intermediate_size=64), rng_seed=version)


async def answers_of(engine: SglangEngine, request: GenerateRequest) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(request.samples)]
    async for delta in engine.generate(request):
        found[delta.sample].extend(delta.tokens)
    return found


def scored(
    policy: InferencePolicy, request: GenerateRequest, answer: Sequence[int], seed: int
) -> ScoredAnswer:
    return score(
        policy,
        request.prompt,
        answer,
        sampling=request.sampling,
        seed=seed,
        replay="sglang",
    )


def farthest(
    policy: InferencePolicy, request: GenerateRequest, answers: Sequence[Sequence[int]]
) -> float:
    """The largest distance of a token, in tolerances."""
    far = []
    for seed, answer in zip(SEEDS, answers, strict=True):
        assert len(answer) == TOKENS
        found = scored(policy, request, answer, seed)
        assert found.distances is not None
        far.append(float(found.distances.max()))
    return max(far)


def test_the_hash_equals_that_of_sglangs_kernel() -> None:
    random = torch.Generator().manual_seed(0)
    seeds = torch.randint(0, (1 << 63) - 1, (8,), generator=random)
    positions = torch.randint(0, 1 << 20, (8,), generator=random)
    columns = torch.randint(0, 200_000, (500,), generator=random)
    said = f"[{seeds.tolist()}, {positions.tolist()}, {columns.tolist()}]"
    python = REPO / ".cache" / "sglang" / "venv" / "bin" / "python"
    run = subprocess.run(
        [python, "-c", HASHES, said],
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        check=True,
    )
    ours = [
        murmur_hash(seed, torch.tensor([position]), 200_000)[0, columns].tolist()
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert json.loads(run.stdout.splitlines()[-1]) == ours


@pytest.mark.parametrize(
    "sampling",
    [WHOLE, Sampling(0.7), Sampling(1.3, 0.8), Sampling(top_k=40), Sampling(1.2, 0.95, 50)],
    ids=str,
)
async def test_a_server_draws_the_tokens_of_its_seeds(
    engine: SglangEngine, policy: InferencePolicy, sampling: Sampling
) -> None:
    request = replace(REQUEST, sampling=sampling)
    answers = await answers_of(engine, request)
    assert farthest(policy, request, answers) < FAR
    found = scored(policy, request, answers[0], SEEDS[1])
    assert found.distances is not None
    assert (found.distances > 1).sum() > TOKENS // 3


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, 0.5)], ids=str)
async def test_a_server_draws_ranks_beside_another_kind_of_request(
    engine: SglangEngine, policy: InferencePolicy, sampling: Sampling
) -> None:
    """One greedy request, or one with top_p, changes what all others of the batch get."""
    alone = await answers_of(engine, REQUEST)
    other = replace(REQUEST, request_id="o", max_new_tokens=2 * TOKENS, sampling=sampling)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answers_of(engine, other))
        beside = tasks.create_task(answers_of(engine, REQUEST))
    answers = beside.result()
    assert answers != alone
    assert farthest(policy, REQUEST, answers) < FAR


async def test_a_handed_over_sample_draws_the_same_tokens_as_an_uninterrupted_one(
    engine: SglangEngine, policy: InferencePolicy
) -> None:
    answers = await answers_of(engine, REQUEST)
    for index in (0, 5):
        for written in (1, 17, TOKENS - 1):
            first = answers[index][:written]
            rest = replace(
                REQUEST,
                request_id=f"{index} {written}",
                prompt=[*REQUEST.prompt, *first],
                samples=1,
                max_new_tokens=TOKENS - written,
                rng_seeds=(SEEDS[index],),
            )
            assert await answers_of(engine, rest) == [answers[index][written:]]

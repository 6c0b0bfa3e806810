"""How many tokens/s a server makes for a worker, and how many for a client that talks to it directly.

    python -m echo2d_lab.research.worker_rate [--rounds 5] [--seconds 20] [--concurrent 16] [--json]

SmolLM2-135M on a real SGLang server on the CPU, on one thread (`tools/sglang_cpu`). In turns, on the same server: a
client of a few lines keeps the requests running; a worker with as many slots does, for a run whose coordinator, ledger
and task are real. Tokens are counted by the server. The ratio is that of each round.
"""

import argparse
import asyncio
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from echo2d.client import AsyncCoordinator
from echo2d.demo.processes import Programs, start_worker, wait_for
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.engine import SglangLaunch
from echo2d_lab.bench.lab.stub_task import config
from examples.one_machine import CACHE
from examples.smollm2 import model_directory

REPO = Path(__file__).resolve().parents[4]
PYTHON = REPO / "tools" / "sglang_cpu" / "python"
FLAGS = ("--dtype", "float32", "--max-total-tokens", "20000", "--enable-metrics", "--sleep-on-idle")
PROMPT_TOKENS, ANSWER_TOKENS, VOCABULARY = 4, 200, 49_152
SETTLE_S, START_S = 5.0, 300.0


@asynccontextmanager
async def a_server(folder: Path, model: Path) -> AsyncIterator[tuple[ServerProcess, SglangClient]]:
    process = ServerProcess(SglangLaunch(PYTHON, FLAGS, folder, dict(os.environ)))
    await process.start(model, "start")
    client = SglangClient(process.url, process.api_key, process.admin_key)
    try:
        async with asyncio.timeout(START_S):
            while not await client.ready():  # noqa: ASYNC110 - a server sends no event
                await asyncio.sleep(0.5)
        yield process, client
    finally:
        await client.close()
        await process.stop()


async def tokens_made(client: SglangClient) -> float:
    """All that the server has made but the first token of each request. It counts them in each decode step."""
    text = str(await client.call("GET", "/metrics"))
    return sum(
        float(each)
        for each in re.findall(
            r'^sglang:realtime_tokens_total{.*mode="decode".*} (\S+)$', text, re.MULTILINE
        )
    )


async def rate(client: SglangClient, seconds: float) -> float:
    """Tokens/s, once the requests run."""
    await asyncio.sleep(SETTLE_S)
    clock = asyncio.get_running_loop()
    before, began = await tokens_made(client), clock.time()
    await asyncio.sleep(seconds)
    return (await tokens_made(client) - before) / (clock.time() - began)


async def directly(client: SglangClient, concurrent: int, seconds: float) -> float:
    async def ask(number: int) -> None:
        for turn in range(1 << 30):
            body: dict[str, Any] = {
                "rid": f"{number:03}{turn:09}",
                "input_ids": [(number + place) % VOCABULARY for place in range(PROMPT_TOKENS)],
                "sampling_params": {
                    "max_new_tokens": ANSWER_TOKENS,
                    "temperature": 1.0,
                    "ignore_eos": True,
                },
                "return_logprob": True,
                "stream": True,
            }
            async for _ in client.generate(body):
                pass

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ask(number)) for number in range(concurrent)]
        found = await rate(client, seconds)
        for task in running:
            task.cancel()
    await client.abort_all()
    return found


async def main_loop(options: argparse.Namespace, folder: Path) -> list[tuple[float, float]]:
    model, found = model_directory(CACHE), []
    policy = {"trajectories_per_step": 8192, "group_size": 4, "staleness_max": 0}
    task = {"prompt_tokens": PROMPT_TOKENS, "vocab_size": VOCABULARY}
    (folder / "snapshots" / "0").mkdir(parents=True)
    for path in model.iterdir():
        (folder / "snapshots" / "0" / path.name).write_bytes(path.read_bytes())
    (folder / "run.toml").write_text(config(folder, task, ANSWER_TOKENS, policy, {}))
    async with a_server(folder / "server", model) as (process, client):
        keys = folder / "keys"
        keys.write_text(f"{process.api_key}\n{process.admin_key}\n")
        with Programs(folder / "logs") as programs:
            programs.start(
                "coordinator", "-m", "echo2d", "coordinate", f"--config={folder}/run.toml"
            )
            announced = folder / "coordinator" / "coordinator.json"
            url = json.loads(await asyncio.to_thread(wait_for, announced, programs, START_S))["url"]
            token = folder / "coordinator" / "tokens" / "learner.token"
            async with AsyncCoordinator(url, token_file=token) as learner:
                await learner.open_session(0)
                await learner.publish(0, folder / "snapshots" / "0")
                for number in range(options.rounds):
                    straight = await directly(client, options.concurrent, options.seconds)
                    worker = start_worker(
                        programs, f"worker-{number}", folder, url, f"--slots={options.concurrent}",
                        "--engine=sglang", f"--engine-url={process.url}", f"--set=engine_key_file={keys}",
                    )  # fmt: skip
                    while not (await learner.status())["groups"]["tokens_under_way"]:
                        await asyncio.sleep(0.5)
                        programs.check()
                    through = await rate(client, options.seconds)
                    worker.terminate()
                    await asyncio.to_thread(worker.wait, START_S)
                    found.append((straight, through))
                    print(f"straight {straight:.1f}, worker {through:.1f} tokens/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Tokens/s of a server, for a worker and for a client."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (20)")
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rate-") as name:
        found = asyncio.run(main_loop(options, Path(name)))
    ratios = sorted(through / straight for straight, through in found)
    row = {
        "straight": median(straight for straight, _ in found),
        "worker": median(through for _, through in found),
        "ratio": median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
    }
    print(
        json.dumps(row)
        if options.json
        else f"median {row['straight']:.1f} straight, {row['worker']:.1f} through the worker; ratio "
        f"{row['ratio']:.3f} ({row['least']:.3f} to {row['most']:.3f})"
    )


if __name__ == "__main__":
    main()

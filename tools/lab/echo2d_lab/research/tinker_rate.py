"""How many tokens/s a worker makes for a client of the Tinker API, and how many its engine makes alone.

    python -m echo2d_lab.research.tinker_rate [--rounds 5] [--seconds 45] [--open 64] [--json]

SmolLM2-135M with an adapter of rank 8, in float32 on one thread. In turns: the torch engine in this process, with the
requests of a loop of a few lines; a worker with as many slots, for a client that keeps as many calls of asample open,
with a real coordinator and learner. Prompts and lengths are the same. Tokens are counted as the engine makes them,
which the worker's metrics show. The ratio is that of each round. Where other work takes CPU time from both, the tokens
for each CPU second of the process with the engine say more.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Protocol

import aiohttp

from echo2d.adapters import base_digest
from echo2d.demo.processes import Program, Programs, start_worker, wait_for
from echo2d.engines.base import AdapterBase, GenerateRequest
from echo2d.engines.layout import file_tensor_digests
from echo2d.engines.torch_engine import TorchEngine
from echo2d.net.tinker.routes import KEY_PREFIX, PREFIX
from echo2d.runtime.run_dir.tokens import create_token
from echo2d_lab.bench.cpu_seconds import cpu_s
from examples.one_machine import CACHE
from examples.smollm2 import model_directory

NAME = "org/smollm2"
RANK = 8
PROMPT_TOKENS, VOCABULARY = 32, 49_152
# An answer has this many tokens, from and to, so that answers do not all end at once.
ANSWER_TOKENS = 100, 200
SETTLE_S, START_S, RETRY_S = 15.0, 300.0, 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    tokens: int


def asked(number: int) -> Asked:
    rng = Random(number)
    prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
    return Asked(prompt, rng.randint(*ANSWER_TOKENS))


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens for each second, and for each CPU second of the process with the engine."""

    per_s: float
    per_cpu_s: float


class Source(Protocol):
    """What makes tokens. pid: of the process with the engine."""

    pid: int

    async def answer(self, asked: Asked) -> None: ...

    async def made(self) -> float:
        """How many tokens there are so far."""


async def rate(source: Source, opened: int, seconds: float) -> Rate:
    """The rate while this many answers are open."""

    async def keep_asking(place: int) -> None:
        for turn in range(1 << 30):
            await source.answer(asked(turn * opened + place))

    clock = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(keep_asking(place)) for place in range(opened)]
        await asyncio.sleep(SETTLE_S)
        before, began_at, used_s = await source.made(), clock.time(), cpu_s(source.pid)
        await asyncio.sleep(seconds)
        tokens, took_s = await source.made() - before, clock.time() - began_at
        found = Rate(tokens / took_s, tokens / (cpu_s(source.pid) - used_s))
        for task in running:
            task.cancel()
    return found


class Direct:
    """The engine without a worker."""

    def __init__(self, engine: TorchEngine) -> None:
        self.pid, self._engine = os.getpid(), engine
        self._requests = self._tokens = 0

    async def answer(self, asked: Asked) -> None:
        self._requests += 1
        request = GenerateRequest(str(self._requests), asked.prompt, 1, asked.tokens)
        async for delta in self._engine.generate(request):
            self._tokens += len(delta.tokens)

    async def made(self) -> float:
        return float(self._tokens)


class ApiCalls:
    """Calls of the API over HTTP."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self._http, self._url, self._key = http, url, key

    async def wait_until_known(self) -> None:
        """Wait until the coordinator knows the key: it reads the table of tokens again every few seconds."""
        while (await self.post("client/config", {}))[0] == HTTPStatus.UNAUTHORIZED:  # noqa: ASYNC110
            await asyncio.sleep(RETRY_S)

    async def result(self, future: dict[str, Any]) -> Any:
        while True:
            status, found = await self.post("retrieve_future", {"request_id": future["request_id"]})
            if status == HTTPStatus.OK:
                return found
            assert status == HTTPStatus.REQUEST_TIMEOUT, found

    async def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, Any]:
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers = {"X-API-Key": self._key}
        async with self._http.post(
            f"{self._url}{PREFIX}/{path}", headers=headers, **data
        ) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.read())


class Client(ApiCalls):
    """A client of the API, and the metrics of the only worker."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, key: str, worker: Program, metrics_port: int
    ) -> None:
        super().__init__(http, url, key)
        self.pid = worker.pid
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self._sampler, self._number = "", 0

    async def open(self) -> None:
        """Make a model, and a sampler of its weights."""
        await self.wait_until_known()
        _, session = await self.post("create_session", {"sdk_version": "0.38.0"})
        model = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": NAME}
        _, future = await self.post("create_model", model | {"lora_config": {"rank": RANK}})
        made = await self.result(future)
        save = {"model_id": made["model_id"], "seq_id": 1, "sampling_session_seq_id": 0}
        _, future = await self.post("save_weights_for_sampler", save)
        self._sampler = (await self.result(future))["sampling_session_id"]

    async def answer(self, asked: Asked) -> None:
        self._number += 1
        body = {
            "sampling_session_id": self._sampler,
            "seq_id": self._number,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": asked.prompt}]},
            "sampling_params": {"max_tokens": asked.tokens, "temperature": 1.0, "stop": []},
        }
        _, future = await self.post("asample", body)
        try:
            found = await self.result(future)
        except asyncio.CancelledError:
            await self.post("cancel_future", {"request_id": future["request_id"]})
            raise
        # Each token has an int32 and a float32.
        assert isinstance(found, bytes), found
        assert len(found) >= 8 * asked.tokens, len(found)

    async def made(self) -> float:
        async with self._http.get(self._metrics) as answer:
            found = re.search(
                r"^echo2d_tokens_generated_total (\S+)$", await answer.text(), re.MULTILINE
            )
        assert found is not None, "the worker counts no tokens"
        return float(found[1])

    async def wait_until_idle(self) -> None:
        before = -1.0
        while (now := await self.made()) != before:
            before = now
            await asyncio.sleep(RETRY_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def a_client(folder: Path, model: Path, slots: int) -> AsyncIterator[Client]:
    """The client of a run with one worker."""
    config = folder / "run.toml"
    config.write_text(
        f"""
[run]
run_dir = "coordinator"
base_model = "{model}"
[coordinator]
port = 0
[link]
port = 0
[tinker.models]
"{NAME}" = "{model}"
[learner]
threads = 1
"""
    )
    with Programs(folder / "logs") as programs:
        programs.start("coordinator", "-m", "echo2d", "tinker", f"--config={config}")
        announced = folder / "coordinator" / "coordinator.json"
        url = json.loads(await asyncio.to_thread(wait_for, announced, programs, START_S))["url"]
        programs.start("learner", "-m", "echo2d", "learn", f"--config={config}", "--serve")
        port, token = free_port(), folder / "client.token"
        worker = start_worker(
            programs, "worker", folder, url, f"--base-model={model}", f"--slots={slots}", "--threads=1",
            f"--set=metrics_port={port}",
        )  # fmt: skip
        create_token(
            folder / "coordinator", "client", role="tinker", url=url, out=token, max_workers=1,
            expires="1d",
        )  # fmt: skip
        key = KEY_PREFIX + str(json.loads(token.read_text())["secret"])
        limits = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=limits) as http:
            client = Client(http, url, key, worker, port)
            await client.open()
            # So the worker has the model, and serves the sampler's weights.
            await client.answer(asked(0))
            yield client
        programs.check()


@asynccontextmanager
async def an_engine(model: Path, adapter: Path, slots: int) -> AsyncIterator[Direct]:
    engine = TorchEngine(slots_max=slots, threads=1)
    await engine.start()
    with contextlib.suppress(asyncio.CancelledError):
        base = AdapterBase(model, base_digest(model), file_tensor_digests(model))
        await engine.refit(adapter, "1-a", base)
        yield Direct(engine)
    await engine.close()


def saved(folder: Path) -> list[Path]:
    """The directories of the adapters that the learner has saved."""
    return [path.parent for path in folder.glob("learner/tinker/*/*/base.json")]


async def main_loop(options: argparse.Namespace, folder: Path) -> list[tuple[Rate, Rate]]:
    model, found = model_directory(CACHE), []
    async with a_client(folder, model, options.open) as client:
        (adapter,) = await asyncio.to_thread(saved, folder)
        async with an_engine(model, adapter, options.open) as direct:
            for _ in range(options.rounds):
                alone = await rate(direct, options.open, options.seconds)
                through = await rate(client, options.open, options.seconds)
                await client.wait_until_idle()
                found.append((alone, through))
                print(
                    f"engine {alone.per_s:.1f}, API {through.per_s:.1f} tokens/s; for each CPU second "
                    f"{alone.per_cpu_s:.1f} and {through.per_cpu_s:.1f}",
                    flush=True,
                )
    return found


def summary(found: Sequence[tuple[Rate, Rate]]) -> dict[str, float]:
    ratios = sorted(through.per_s / alone.per_s for alone, through in found)
    return {
        "engine": median(alone.per_s for alone, _ in found),
        "api": median(through.per_s for _, through in found),
        "ratio": median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "cpu_ratio": median(through.per_cpu_s / alone.per_cpu_s for alone, through in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens/s of an engine, alone and for the API.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each measurement (45)")
    parser.add_argument("--open", type=int, default=64, help="answers at a time (64)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rate-") as name:
        row = summary(asyncio.run(main_loop(options, Path(name))))
    print(
        json.dumps(row)
        if options.json
        else f"median {row['engine']:.1f} by the engine, {row['api']:.1f} through the API; ratio "
        f"{row['ratio']:.3f} ({row['least']:.3f} to {row['most']:.3f}), for each CPU second {row['cpu_ratio']:.3f}"
    )


if __name__ == "__main__":
    main()

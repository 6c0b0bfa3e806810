"""Twenty clients share one base model, and one of them is hostile."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Self

import aiohttp
import numpy as np
import pytest

from echo2d_lab.bench.coordinator.load_meter import rss_mb
from echo2d_lab.bench.cpu_seconds import cpu_s
from tests.support.paths import REPO
from tests.support.tinker_calls import Row
from tests.support.tinker_http import HttpClient
from tests.support.tinker_recipes import recipe_model
from tests.support.tinker_run import TinkerRun, tinker_run

HONEST = 19
# Short rounds, so that other work on the machine hits both kinds alike.
ROUNDS, ROUND_S, WARM_S = 24, 3.0, 5.0
ROWS, ROW_TOKENS = 8, 32
SLOWER_MAX = 0.10
# The hostile client may have 256 MiB waiting in the coordinator's memory (CALLER_WAITING_BYTES_MAX), and one body more.
GROWTH_MB_MAX = 1.2 * (256 + 4)

log = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerRun]:
    folder = tmp_path_factory.mktemp("many")
    with tinker_run(folder / "served", recipe_model(folder / "model"), workers=0) as found:
        yield found


def rows(seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    made = rng.integers(5, 300, (ROWS, ROW_TOKENS + 1))
    weights = np.ones(ROW_TOKENS, np.float32)
    return [(row[:-1].tolist(), {"target_tokens": row[1:], "weights": weights}) for row in made]


class Honest:
    """Clients that train for as long as the block lasts. Each begins a step when it has the results of the last."""

    def __init__(self, clients: list[HttpClient]) -> None:
        self._clients = clients
        # When each step of a client began; the last one has not ended.
        self._began_at: list[list[float]] = [[] for _ in clients]

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.ensure_future(self._train(place, each))
            for place, each in enumerate(self._clients)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        failed = [each for each in ended if not isinstance(each, asyncio.CancelledError)]
        assert not failed, failed

    async def _train(self, place: int, client: HttpClient) -> None:
        data = rows(place)
        while True:
            self._began_at[place].append(time.monotonic())
            await client.step(data)

    async def rates(self, seconds: float) -> list[float]:
        """Steps per second of each client, by those that began and ended in this time.

        The clients go through their turns together, so their number of steps is too coarse.
        """
        start = time.monotonic()
        await asyncio.sleep(seconds)
        found = []
        for times in self._began_at:
            inside = [at for at in times if at >= start]
            found.append((len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 1 else 0.0)
        return found


@pytest.mark.alone
async def test_a_hostile_client_slows_nineteen_others_by_a_tenth_at_most(run: TinkerRun) -> None:
    """Tokens take turns, one operation each. So a client of twenty that asks for as much as the others gets a
    twentieth of the turns, whatever it means by it, and the others then make 19/20 of the steps that they make without
    it: 5 %. The other 5 % are for what is refused, and for the hostile process itself: it shares two cores with the
    learner, the coordinator and the honest clients.

    A turn counts operations, not seconds. A client whose operations are longer than those of the others takes more of
    the learner's time, which the API allows: the hostile one here sends none that is longer. Its number of calls is
    bounded, because each call that is taken is a commit of the ledger, and the others wait for it.
    """
    keys = run.keys(HONEST + 1)
    ratios, least = [], []
    costs: dict[str, list[float]] = {"quiet": [], "hostile": []}
    memory = {name: [0.0, 0.0] for name in ("first", "quiet", "hostile")}
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits) as http:
        opened = [await HttpClient(http, run.url, key).open() for key in keys[:HONEST]]
        with Attacker(run.url, keys[-1]) as attacker:
            async with Honest(opened) as honest:
                await honest.rates(WARM_S)
                for number in range(ROUNDS):
                    quiet = await measured(run, honest, memory["quiet" if number else "first"])
                    assert quiet.slowest, "a client made less than a step: the machine is too busy"
                    attacker.attack(ROUND_S)
                    attacked = await measured(run, honest, memory["hostile"])
                    statuses = await asyncio.to_thread(attacker.statuses)
                    ratios.append(attacked.steps / quiet.steps)
                    least.append(attacked.slowest / (quiet.steps / HONEST))
                    costs["quiet"].append(quiet.cpu_s)
                    costs["hostile"].append(attacked.cpu_s)
                    log.info(
                        "round %d: %.1f and %.1f steps/s, ratio %.3f, of the slowest client %.3f; hostile: %s",
                        number, quiet.steps, attacked.steps, ratios[-1], least[-1], statuses,
                    )  # fmt: skip
                    assert {name for name in statuses if "1 GB" in name} == {"1 GB 413"}
                    assert {name for name in statuses if "no proto" in name} == {"no protobuf 400"}
    log.info(
        "median ratio %.3f (%.3f to %.3f), of the slowest client %.3f (%.3f to %.3f)",
        median(ratios), min(ratios), max(ratios), median(least), min(least), max(least),
    )  # fmt: skip
    for kind, each in costs.items():
        log.info("CPU ms of coordinator and learner for a step, %s: %.2f", kind, 1e3 * median(each))
    log.info("most MB of coordinator and learner: %s", memory)
    run.programs.check()
    assert median(ratios) > 1.0 - SLOWER_MAX
    assert median(least) > 1.0 - SLOWER_MAX
    for quiet_mb, hostile_mb in zip(memory["first"], memory["hostile"], strict=True):
        assert hostile_mb < quiet_mb + GROWTH_MB_MAX


class Attacker:
    """A hostile client, which is ready when the block begins."""

    def __init__(self, url: str, key: str) -> None:
        words = [sys.executable, "-m", "tests.support.tinker_hostile", url, key]
        self._process = subprocess.Popen(
            words, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._reports = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        assert self._reports.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def attack(self, seconds: float) -> None:
        self._orders.write(f"{seconds}\n")
        self._orders.flush()

    def statuses(self) -> dict[str, int]:
        """How often each kind of call had each status, when the attack is over."""
        found: dict[str, int] = json.loads(self._reports.readline())
        return found


@dataclass(frozen=True, slots=True)
class Round:
    """steps: of all honest clients, in a second; slowest: of the slowest one. cpu_s: of coordinator and learner, for a
    step.
    """

    steps: float
    slowest: float
    cpu_s: float


async def measured(run: TinkerRun, honest: Honest, memory: list[float]) -> Round:
    """One round. memory: the most MB of coordinator and learner, which it raises."""
    pids = run.coordinator.pid, run.learner.pid
    before_s, rates = sum(map(cpu_s, pids)), asyncio.ensure_future(honest.rates(ROUND_S))
    while not rates.done():
        memory[:] = map(max, memory, map(rss_mb, pids))
        await asyncio.wait([rates], timeout=0.25)
    took_s, found = sum(map(cpu_s, pids)) - before_s, rates.result()
    return Round(sum(found), min(found), took_s / max(1.0, sum(found) * ROUND_S))

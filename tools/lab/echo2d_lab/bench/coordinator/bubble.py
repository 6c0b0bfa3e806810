"""Measures the bubble at one throughput, in a real run on this machine: only engines and learner are stand-ins.

    this process                                   other processes, as in any run
    a learner that sleeps T_train a step --HTTP--> echo2d coordinate: ledger, task process, seed
                                                     | seed -> relay -> worker -> worker: a chain of lines of UPLINK
                                                   echo2d join --relay-only, echo2d join --engine fake, twice

The learner is an ordinary client: it takes batch n + 1 while step n "trains", commits, publishes random bytes. The
engines make TOKENS tokens per trajectory at a set rate, so mu_pool is known; T_train, T_bcast, how long workers stand
still for a version and the bubble are measured. The relay joins first, and equal lines keep that order in a chain, so
both workers receive a version at the rate of a line. With this many trajectories per step the staleness gate never
closes. A publish period in which this machine stood still for a moment does not count, nor do the next few. Not here:
what the bubble should be (`core.capacity`).
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

import numpy as np

from echo2d.client import Batch, Coordinator
from echo2d.core.capacity.model import Demand, share_of_bcast
from echo2d.core.rules.run import DisseminationMode
from echo2d.demo.processes import Programs, start_worker, wait_for
from echo2d.engines.fake import FAKE_VOCAB_SIZE
from echo2d.errors import Fault
from echo2d_lab.bench.lab.stub_task import config
from echo2d_lab.standins.snapshots import write_model

T_TRAIN_S = 1.0
PER_STEP, STALENESS, KAPPA = 16, 4, 3
PERIODS = 30  # publish periods that count
# Periods that do not count, at the start and after a stall: more than twice S + 1 steps.
WARM_PERIODS = 4
PERIODS_MAX = 8 * PERIODS  # after this many periods, this machine is too busy to measure
WORKERS, SLOTS = 2, 3  # enough slots that an engine always has a sample to write
TOKENS = 8  # of each trajectory: the minimum of the fake engine
VERSION_BYTES = 700_000
# Bits/s: a chain ranks lines by powers of two, so noise in a measurement changes nothing.
UPLINK = 2.0**24
# Seconds to wait for daemons and answers: a shared machine may stand still for minutes.
PATIENCE_S = 900.0
STALL_S_MAX = 0.5  # a thread waits longer than this for a core only if the machine stands still
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Measured:
    """One point. group_size: samples of a prompt. mu_pool: as set, trajectories/s. spoiled: periods that did not count.

    t_bcast_s, pause_s, and still_s, how long workers stood still for a version: medians over the versions.
    """

    mode: DisseminationMode
    group_size: int
    mu_pool: float
    t_train_s: float
    t_bcast_s: float
    still_s: float
    pause_s: float
    bubble: float
    periods: int
    max_staleness: int
    dropped: int
    spoiled: int

    @property
    def demand(self) -> Demand:
        return demand(
            self.mode, self.t_train_s, self.t_bcast_s, self.still_s, self.pause_s, self.mu_pool
        )


def demand(
    mode: DisseminationMode,
    t_train_s: float,
    t_bcast_s: float,
    still_s: float,
    pause_s: float,
    mu_pool: float,
) -> Demand:
    """The demand of this learner. A trajectory takes as long as mu_pool needs for one trajectory per slot."""
    t_gen_s, share = WORKERS * SLOTS / mu_pool, share_of_bcast(still_s, t_bcast_s)
    return Demand(
        t_train_s, PER_STEP, STALENESS, KAPPA, t_bcast_s, mode, pause_s, t_gen_s, still_share=share
    )


def measure(mode: DisseminationMode, group_size: int, mu_pool: float) -> Measured:
    """Measure the point. Fault: this machine stood still again and again."""
    with (
        tempfile.TemporaryDirectory(prefix="echo2d-bubble-") as folder,
        _Run(Path(folder), mode, group_size, mu_pool) as run,
    ):
        return run.measure()


def _config(folder: Path, mode: DisseminationMode, group_size: int) -> str:
    policy = {
        "staleness_max": STALENESS,
        "publish_every": KAPPA,
        "trajectories_per_step": PER_STEP,
        "group_size": group_size,
        "filter_zero_variance": False,
    }
    spread = {"shape": "chain", "mode": mode, "delta": False}
    return config(
        folder, {"prompt_tokens": 4, "vocab_size": FAKE_VOCAB_SIZE}, TOKENS, policy, spread
    )


class _Stalls:
    """A thread that wakes every POLL_S, and notes how much too late it woke."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)
        self._thread.start()

    def take(self) -> float:
        """Seconds of the longest stall since the last call."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = time.monotonic()
        while not self._stopped.wait(POLL_S):
            now = time.monotonic()
            self._worst_s, seen = max(self._worst_s, now - seen - POLL_S), now


class _Run:
    """The programs of one point, in a directory of its own."""

    def __init__(
        self, folder: Path, mode: DisseminationMode, group_size: int, mu_pool: float
    ) -> None:
        self._folder, self._mode, self._mu_pool = folder, mode, mu_pool
        self._group_size = group_size
        self._programs = Programs(folder / "logs")
        self._rng = np.random.default_rng(0)
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        (self._folder / "snapshots").mkdir()
        path = self._folder / "run.toml"
        path.write_text(_config(self._folder, self._mode, self._group_size))
        with ExitStack() as cleanup:
            cleanup.callback(self._programs.stop)
            self._programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(path))
            run = self._folder / "coordinator"
            announced = json.loads(wait_for(run / "coordinator.json", self._programs, PATIENCE_S))
            self._url = str(announced["url"])
            token = run / "tokens" / "learner.token"
            self._client = cleanup.enter_context(
                Coordinator(self._url, token_file=token, timeout_s=PATIENCE_S)
            )
            self._join("relay", "--relay-only")
            self._wait_for("relays", 1)
            for number in range(1, WORKERS + 1):
                pace = TOKENS * self._mu_pool / WORKERS
                self._join(
                    f"worker-{number}",
                    "--engine=fake",
                    f"--slots={SLOTS}",
                    f"--set=tokens_per_s_max={pace}",
                )
            self._intake = cleanup.enter_context(ThreadPoolExecutor(1))
            self._wait_for("workers", WORKERS)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def measure(self) -> Measured:
        """Measure whole publish periods, from one publish to the next."""
        self._client.open_session(0)
        self._publish(0)
        learner, stalls = _Learner(self._client, self._intake, self._publish), _Stalls()
        self._cleanup.callback(stalls.stop)
        counted = self._periods(learner, stalls)
        facts = self._client.status()
        waited_s, trained_s = (sum(each) for each in zip(*counted, strict=True))
        return Measured(
            self._mode,
            self._group_size,
            self._mu_pool,
            trained_s / (KAPPA * PERIODS),
            median(facts["t_bcast_s"][-PERIODS:]),
            median(facts["still_s"][-PERIODS:]),
            median(facts["refit_pause_s"][-WORKERS * PERIODS :]),
            waited_s / (waited_s + trained_s),
            PERIODS,
            max(map(int, facts["staleness"])),
            facts["trajectories"]["dropped"],
            learner.steps // KAPPA - WARM_PERIODS - PERIODS,
        )

    def _periods(self, learner: "_Learner", stalls: _Stalls) -> list[tuple[float, float]]:
        """Seconds waited and trained in each period that counts."""
        counted: list[tuple[float, float]] = []
        rest = WARM_PERIODS
        for _ in range(PERIODS_MAX):
            waited_s, trained_s = learner.period()
            self._programs.check()
            if stalls.take() > STALL_S_MAX:
                rest = WARM_PERIODS
            elif rest:
                rest -= 1
            else:
                counted.append((waited_s, trained_s))
            if len(counted) == PERIODS:
                return counted
        raise Fault(f"of {PERIODS_MAX} publish periods this machine stood still in too many")

    def _join(self, name: str, *flags: str) -> None:
        limit = f"--uplink-limit={UPLINK / 1e6:g}mbit"
        start_worker(self._programs, name, self._folder, self._url, limit, *flags)

    def _wait_for(self, kind: str, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while [one["alive"] for one in self._client.status()[kind]] != [True] * count:
            self._programs.check()
            if time.monotonic() > deadline:
                raise Fault(f"the {kind} have not joined within {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)

    def _publish(self, version: int) -> None:
        weights = self._rng.integers(1 << 16, size=VERSION_BYTES // 2, dtype="<u2")
        folder = write_model(self._folder / "snapshots" / f"v{version}", [weights.data])
        self._client.publish(version, folder)


class _Learner:
    """Takes a batch, "trains", commits, publishes. _mark: when the last step was ready."""

    def __init__(
        self, client: Coordinator, intake: ThreadPoolExecutor, publish: Callable[[int], None]
    ) -> None:
        self._client, self._intake, self._publish = client, intake, publish
        self.steps = 0
        self._coming: Future[Batch] = intake.submit(client.take_batch, 1)
        self._mark = time.monotonic()

    def period(self) -> tuple[float, float]:
        """Run from one publish to the next. Returns the seconds waited, and trained."""
        steps = [self._step() for _ in range(KAPPA)]
        self._publish(self.steps)
        self._client.checkpoint(self.steps)
        return sum(waited_s for waited_s, _ in steps), sum(trained_s for _, trained_s in steps)

    def _step(self) -> tuple[float, float]:
        """One step. Commits and publishes take part of T_train, as in a learner whose steps have a minimum."""
        asked = time.monotonic()
        batch = self._coming.result()
        waited_s = time.monotonic() - asked
        self.steps += 1
        self._coming = self._intake.submit(self._client.take_batch, self.steps + 1)
        time.sleep(max(0.0, self._mark + waited_s + T_TRAIN_S - time.monotonic()))
        now = time.monotonic()
        trained_s, self._mark = now - self._mark - waited_s, now
        self._client.commit(batch, t_train_s=trained_s)
        return waited_s, trained_s

"""A run in a laboratory: a real coordinator with its seed in node 0, a real worker in every other node, and a scripted
learner.

Workers have the fake engine; a step is one trajectory, S = 0, so nothing is generated while a version spreads. Each
version consists of new random bytes in the layout of a model, or is a version of a real run, which spreads as a delta.
It is published through the public API (`echo2d.client`).
Not here: what is measured, and the faults (`broadcast/run`).
"""

import json
import os
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from echo2d.client import Coordinator
from echo2d.demo.processes import Program, wait_for
from echo2d.engines.fake import FAKE_VOCAB_SIZE
from echo2d.errors import Fault
from echo2d.plan.kernel.scenario import Scenario
from echo2d.runtime.run_dir.tokens import create_token
from echo2d_lab.bench.cpu_seconds import cpu_s
from echo2d_lab.bench.delta.cost import DeltaCosts, delta_costs
from echo2d_lab.bench.lab.cpu import CpuMeter
from echo2d_lab.bench.lab.netlab import Lab
from echo2d_lab.bench.lab.real_versions import RealVersions
from echo2d_lab.standins.snapshots import write_model

PORT = 7700
METRICS_PORT = 7701
START_S = 120.0  # sixty daemons may take this long to start on a busy machine
POLL_S = 0.1
SHARDS = 2
REPAIRED = re.compile(r'^echo2d_events_total\{kind="RepairVerified"\} ([0-9.e+]+)$', re.MULTILINE)

COORDINATOR = """\
[run]
run_dir = "{run}/coordinator"
snapshot_root = "{run}/snapshots"
[coordinator]
host = "0.0.0.0"
port = {port}
tls = "{tls}"
[link]
host = "{host}"
[policy]
staleness_max = 0
publish_every = 1
trajectories_per_step = 1
group_size = 1
filter_zero_variance = false
[sampling]
max_new_tokens = 4
vocab_size = {vocab_size}
[task]
kind = "sort_digits"
processes = 1
[dissemination]
shape = "{shape}"
chains = {chains}
delta = {delta}
"""

WORKER = """\
[worker]
url = "{url}"
token_file = "{run}/{name}.token"
state_dir = "{run}/{name}"
name = "{name}"
engine = "fake"
slots = 1
listen_host = "{host}"
no_tls = true
metrics_port = {metrics}
"""


@dataclass(frozen=True, slots=True)
class PreparedVersion:
    """A version that can be published. wire_bytes: of its form, as far as known. costs: if it is a delta."""

    directory: Path
    wire_bytes: int
    costs: DeltaCosts | None = None


class Swarm:
    """See the module docstring. Its files are under `run`. corrupt: the share of frames that a spoiling worker
    corrupts.

    versions: of a real run, instead of random bytes.
    """

    def __init__(
        self,
        lab: Lab,
        scenario: Scenario,
        run: Path,
        *,
        corrupt: float | None = None,
        tls: bool = False,
        versions: RealVersions | None = None,
    ) -> None:
        self._tls, self._versions = tls, versions
        self._lab, self._scenario, self._run, self._corrupt = lab, scenario, run, corrupt
        self._programs = lab.programs(run / "logs")
        self._peers: dict[int, Program] = {}
        self._version = -1

    def __enter__(self) -> Self:
        (self._run / "snapshots").mkdir(parents=True)
        with ExitStack() as cleanup:
            cleanup.callback(self._programs.stop)
            with self._lab.inside(0):
                self._coordinator = cleanup.enter_context(self._start_coordinator())
            for node, spec in enumerate(self._scenario.peers[1:], start=1):
                if spec.joins_at_s == 0:
                    self.join(node)
            self._wait(
                "all workers have joined", lambda facts: len(alive(facts)) == len(self._peers)
            )
            self._coordinator.open_session(resume_step=0)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    # --- peers

    def join(self, node: int) -> None:
        """Start the worker of this node, for the first time or again."""
        name = f"peer-{node}"
        config = self._run / f"{name}.toml"
        if not config.exists():
            scheme = "https" if self._tls else "http"
            token, url = self._run / f"{name}.token", f"{scheme}://{self._lab.address(0)}:{PORT}"
            create_token(
                self._run / "coordinator",
                name,
                role="worker",
                url=url,
                out=token,
                max_workers=None,
                expires="1d",
            )
            config.write_text(
                WORKER.format(
                    url=url,
                    run=self._run,
                    name=name,
                    host=self._lab.address(node),
                    metrics=METRICS_PORT,
                )
            )
        module = (
            ["echo2d"]
            if self._corrupt is None
            else ["echo2d_lab.bench.lab.corrupting_relay", str(self._corrupt)]
        )
        with self._lab.inside(node):
            self._peers[node] = self._programs.start(
                name, "-m", *module, "join", "--config", str(config)
            )

    def kill(self, node: int) -> None:
        """Kill the worker of this node with SIGKILL."""
        self._programs.kill(self._peers.pop(node))

    def replace(self, node: int) -> None:
        """Replace the worker of this node by a new box, which the run does not know."""
        name = f"peer-{node}"
        self.kill(node)
        self._wait(f"{name} is gone", lambda facts: name not in names(alive(facts)))
        shutil.rmtree(self._run / name)
        self.join(node)

    def spoil(self, node: int) -> None:
        """Let the worker of this node corrupt some of the frames that it passes on."""
        assert self._corrupt is not None
        os.kill(self._peers[node].pid, signal.SIGUSR2)

    def runs(self, node: int) -> bool:
        return node in self._peers

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds of each running peer so far, user and system."""
        return {node: cpu_s(program.pid) for node, program in self._peers.items()}

    def cpu_meter(self) -> CpuMeter:
        """A meter of the whole run from now on: coordinator, seed and workers."""
        return CpuMeter(self._lab, self._programs)

    def repaired(self) -> dict[int, int]:
        """Frames that each running peer has so far received on a repair stream instead of its tree."""
        return {node: self._repaired(node) for node in self._peers}

    def _repaired(self, node: int) -> int:
        with self._lab.inside(node):
            text = (
                urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics").read().decode()
            )
        found = REPAIRED.search(text)
        return 0 if found is None else int(float(found[1]))

    # --- versions

    def prepare(self) -> PreparedVersion:
        """Make the next version's snapshot: random bytes, so that its full form has the scenario's size, or real
        weights.
        """
        version, size = self._version + 1, self._scenario.wire_bytes
        directory = self._directory(version)
        if self._versions is None:
            write_random_snapshot(directory, size, self._scenario.rng_seed * 1000 + version)
            return PreparedVersion(directory, size)
        weights = self._versions.weights(version, size // 2)
        write_model(directory, (part.data for part in np.array_split(weights, SHARDS)))
        if version == 0:
            return PreparedVersion(directory, size)
        costs = delta_costs(self._directory(self._version), directory, self._run / "rebuilt")
        shutil.rmtree(self._directory(self._version))
        return PreparedVersion(directory, costs.wire_bytes, costs)

    def train(self) -> None:
        """Take and commit the batch of the train step that the next version needs. Version 0 needs none."""
        if self._version >= 0:
            batch = self._coordinator.take_batch(self._version + 1)
            self._coordinator.commit(batch, t_train_s=0.0)

    def publish(self, prepared: PreparedVersion) -> int:
        """Publish the version; return its number when the publish was accepted."""
        self._version += 1
        self._coordinator.publish(self._version, prepared.directory)
        if (
            self._versions is None
        ):  # a real version is kept, because the next one is compared with it
            shutil.rmtree(prepared.directory)
        return self._version

    def status(self) -> dict[str, Any]:
        self._programs.check()
        return self._coordinator.status()

    def settle(self) -> None:
        """Wait until every running worker serves the last published version."""
        self._wait(f"all workers serve version {self._version}", self._settled)

    # --- inside

    def _directory(self, version: int) -> Path:
        return self._run / "snapshots" / str(version)

    def _start_coordinator(self) -> Coordinator:
        config = self._run / "run.toml"
        config.write_text(
            COORDINATOR.format(
                run=self._run,
                port=PORT,
                tls="on" if self._tls else "off",
                host=self._lab.address(0),
                vocab_size=FAKE_VOCAB_SIZE,
                shape=self._scenario.shape,
                chains=self._scenario.chains,
                delta=json.dumps(self._versions is not None),
            )
        )
        self._programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
        announced = wait_for(
            self._run / "coordinator" / "coordinator.json", self._programs, START_S
        )
        token = self._run / "coordinator" / "tokens" / "learner.token"
        return Coordinator(json.loads(announced)["url"], token_file=token)

    def _settled(self, facts: Mapping[str, Any]) -> bool:
        serving = [worker["serving"] for worker in alive(facts)]
        return len(serving) == len(self._peers) and all(
            each is not None and each["version"] == self._version for each in serving
        )

    def _wait(self, what: str, is_so: Callable[[Mapping[str, Any]], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not is_so(self.status()):
            if time.monotonic() > deadline:
                raise Fault(
                    f"waited {START_S:.0f} s in vain until {what}; logs are in {self._run / 'logs'}"
                )
            time.sleep(POLL_S)


def alive(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The workers of a status that are alive."""
    return [worker for worker in facts["workers"] if worker["alive"]]


def names(workers: Iterable[Mapping[str, Any]]) -> set[str]:
    return {worker["name"] for worker in workers}


def write_random_snapshot(directory: Path, data_bytes: int, rng_seed: int) -> None:
    """Write a snapshot with this many random bytes of weights."""
    rng = np.random.default_rng(rng_seed)
    words = data_bytes // 2
    counts = (words // SHARDS + (words % SHARDS if shard == 0 else 0) for shard in range(SHARDS))
    write_model(directory, (rng.bytes(2 * count) for count in counts))

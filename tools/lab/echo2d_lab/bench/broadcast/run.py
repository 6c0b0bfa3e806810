"""`echo2d bench broadcast`: how long versions take to spread, with real daemons on emulated links.

Round 0 is cold: peers have just joined, there are no links and no rates. A few rounds follow that do not count, because
the first versions also make the files that later ones reuse. Then come the warm rounds; if each has a fault, a round
that does not count comes between two of them.
Not here: the faults of a round (`faults`), the statistics of the figures (`result`).
T_verify is the coordinator's own figure; bytes are counted at the emulator. Seconds count from the accepted publish.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from echo2d.core.base.ids import FormId, PeerId, PlanId
from echo2d.core.protocol.control_messages import Address
from echo2d.core.topology.plan import Job, PeerFacts, Plan
from echo2d.core.topology.shapes import plan_shape
from echo2d.core.weights.form import frame_bytes_for
from echo2d.errors import Fault, OperatorFault
from echo2d.plan.broadcast.world import World
from echo2d.plan.kernel.scenario import Scenario
from echo2d_lab.bench.broadcast.baselines import (
    Rival,
    RivalRound,
    RivalSwarm,
    check_rivals,
    interpreter_of,
)
from echo2d_lab.bench.broadcast.faults import RoundFaults, come_bytes
from echo2d_lab.bench.broadcast.kinds import RoundKind
from echo2d_lab.bench.broadcast.result import (
    BroadcastResult,
    DeltaTarget,
    Round,
    RoundStatistics,
    exit_code,
    line_of,
    print_result,
)
from echo2d_lab.bench.lab.cpu import CpuShares
from echo2d_lab.bench.lab.daemons import Swarm, alive, names
from echo2d_lab.bench.lab.netlab import QUEUE_S, Lab, TrafficCounts
from echo2d_lab.bench.lab.real_versions import RealVersions

LOOK_S = 0.02  # seconds between two looks at the emulator's counters, which show when half of the bytes have arrived
# Seconds between two looks at the status. Times of single peers are no more precise than this.
STATUS_S = 0.1
ROUND_S_MIN = 60.0  # a round that takes longer than this ...
ROUND_BOUNDS_MAX = 40.0  # ... and than this many times the bound is stuck; a star of 8 takes 9
# Disk space of each peer, in copies of a version: the forms and snapshots that it keeps.
COPIES_ON_DISK = 8
COPIES_OF_DELTAS = 4  # the same with deltas, which take little space beside the snapshots
# Files are in memory: in a run every peer has a disk of its own; here one real disk for all would be the bottleneck.
MEMORY_DISK = Path("/dev/shm")
DIRECTORY = "echo2d-broadcast-"  # the id of the process that made it follows
ROUNDS_MAX = 100  # the coordinator keeps the figures of more versions


@dataclass(frozen=True, slots=True)
class BroadcastBench:
    """The options. The culprit of a round is, of the peers with the fastest uplink, the one that passes on most.

    kill, partition: when the median peer has this share of a version, the culprit is killed (SIGKILL) or cut off, until
    the round is over. corrupt: the share of its frames that the culprit corrupts, from soon after the start. None of
    these happens in rounds that warm up. swing: every 2 s each uplink becomes slower or faster by this share. against:
    rivals, each with a round of the same kind after each round. versions: a run of
    `tools/lab/echo2d_lab/research/rl_updates.py` whose versions are sent, the first in full, the others as deltas; each
    has the scenario's bytes.
    """

    scenario: Scenario
    rounds: int = 5
    warm_up: int = 4
    queue_s: float = QUEUE_S
    kill: float | None = None
    partition: float | None = None
    corrupt: float | None = None
    swing: float = 0.0
    against: tuple[str, ...] = ()
    versions: Path | None = None
    tls: bool = False
    as_json: bool = False
    run_dir: Path | None = None

    def __post_init__(self) -> None:
        for name, count in (("--rounds", self.rounds), ("--warm-up", self.warm_up)):
            if not 0 <= count <= ROUNDS_MAX:
                raise OperatorFault(f"{name}: expected 0 to {ROUNDS_MAX}; found {count}")
        if any(
            share is not None and not 0 < share <= 1
            for share in (self.kill, self.partition, self.corrupt)
        ):
            raise OperatorFault(
                "--kill, --partition, --corrupt: expected shares above 0, at most 1"
            )
        if any(trouble.peer == 0 for trouble in self.scenario.faults):
            raise OperatorFault(
                "faults: the laboratory lets the seed live; expected peers from 1 on"
            )
        check_rivals(self.against)

    @property
    def makes_trouble(self) -> bool:
        return bool(self.scenario.faults) or (self.kill, self.partition, self.corrupt) != (
            None,
            None,
            None,
        )

    @property
    def lost(self) -> frozenset[int]:
        """The peers that do not finish a round. Any of the fastest may be the culprit; the first ones are assumed."""
        peers = range(1, len(self.scenario.peers))
        fastest = sorted(peers, key=lambda node: -self.scenario.peers[node].uplink)
        culprits = [share for share in (self.kill, self.partition) if share is not None]
        faults = (fault.peer for fault in self.scenario.faults if fault.back_s is None)
        return frozenset([*fastest[: len(culprits)], *faults])


def with_undialable(scenario: Scenario, share: float) -> Scenario:
    """The scenario with this share of the peers behind NAT, evenly spread."""
    count = len(scenario.peers) - 1
    closed = {
        1 + int((index + 0.999) * count / max(1, round(share * count)))
        for index in range(round(share * count))
    }
    peers = [
        replace(spec, reachable=node not in closed) for node, spec in enumerate(scenario.peers)
    ]
    return replace(scenario, peers=tuple(peers))


def with_rates(scenario: Scenario, times: float) -> Scenario:
    """The scenario with all rates multiplied; round trips stay the same."""
    peers = [
        replace(spec, uplink=times * spec.uplink, downlink=times * spec.downlink)
        for spec in scenario.peers
    ]
    return replace(scenario, peers=tuple(peers))


def run_broadcast(wanted: BroadcastBench) -> int:
    """Measure and print. Returns the exit code: 0 if every survivor of every round has verified its version."""
    result = measure(wanted)
    if wanted.as_json:
        print(json.dumps(asdict(result)))
    else:
        print_result(result)
    return exit_code(result)


def measure(wanted: BroadcastBench) -> BroadcastResult:
    """Measure. OperatorFault: this machine cannot have a laboratory. Fault: a round got stuck, or a daemon ended."""
    # SIGTERM ends it like Ctrl-C, so that no program and no file is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _directory(wanted) as run:
        return _measure(wanted, run, Console(stderr=True))


def _measure(wanted: BroadcastBench, run: Path, console: Console) -> BroadcastResult:
    load = os.getloadavg()[0]
    scenario = wanted.scenario
    rounds: list[Round] = []
    rng = random.Random(scenario.rng_seed)
    against: dict[str, list[RivalRound]] = {rival: [] for rival in wanted.against}
    for name in wanted.against:
        interpreter_of(name)
    lab = Lab(scenario.peers, run, queue_s=wanted.queue_s)
    versions = (
        None if wanted.versions is None else RealVersions(wanted.versions, len([*_kinds(wanted)]))
    )
    with (
        lab,
        Swarm(
            lab, scenario, run, corrupt=wanted.corrupt, tls=wanted.tls, versions=versions
        ) as swarm,
        ExitStack() as cleanup,
    ):
        rivals = {
            name: cleanup.enter_context(RivalSwarm(name, index, lab, scenario, run))
            for index, name in enumerate(wanted.against)
        }
        with _progress(console) as progress:
            for kind in _kinds(wanted):
                done = _Round(wanted, lab, swarm, progress, kind, rng=rng).run()
                if not console.is_terminal:
                    console.print(line_of(done), highlight=False)
                if kind != "warming up":
                    rounds.append(done)
                for name, rival in rivals.items():
                    rival_done = rival.round(kind, limit_s=_limit_s(scenario))
                    if not console.is_terminal:
                        text = f"{name} ({kind}): {rival_done.seconds:.2f} s"
                        console.print(text, highlight=False)
                    if kind != "warming up":
                        against[name].append(rival_done)
        faults = [f"{fault['kind']}: {fault['text']}" for fault in swarm.status()["faults"]]
    return result_of(wanted, rounds, faults, (load, os.getloadavg()[0]), against)


def result_of(
    wanted: BroadcastBench,
    rounds: Sequence[Round],
    faults: Sequence[str],
    load: tuple[float, float],
    against: Mapping[str, Sequence[RivalRound]],
) -> BroadcastResult:
    """The result of the warm rounds; without any, of the cold one."""
    warm, peers, cores = (
        rounds[1:] or rounds,
        len(wanted.scenario.peers) - 1,
        len(os.sched_getaffinity(0)),
    )
    wire_bytes = round(median(each.wire_bytes for each in warm))
    plan, cold = (_plan_for(wanted, size) for size in (wire_bytes, rounds[0].wire_bytes))
    times = RoundStatistics.of([each.t_verify_s for each in warm])
    return BroadcastResult(
        peers=peers,
        wire_bytes=wire_bytes,
        bound_s=plan.bound_s,
        predicted_s=plan.predicted_s,
        t_verify_s=times,
        ratio=times.median / plan.bound_s,
        ratio_cold=rounds[0].t_verify_s / cold.bound_s,
        median_peer_s=median(each.median_peer_s for each in warm),
        seed_copies=median(each.seed_copies for each in warm),
        relay_cpu_s_per_gb=median(each.relay_cpu_s_per_gb for each in warm),
        frames_refetched=round(median(each.frames_refetched for each in warm)),
        verified_peers=min(each.verified for each in rounds),
        cpu=CpuShares.of([each.cpu for each in warm]),
        rounds=tuple(rounds),
        faults=tuple(faults),
        load=load,
        against={
            name: Rival.of(
                each,
                bound_s=plan.bound_s,
                cold_bound_s=cold.bound_s,
                ours_s=times.median,
                ours_cold_s=rounds[0].t_verify_s,
            )
            for name, each in against.items()
        },
        delta=DeltaTarget.of(warm, peers, wanted.scenario.peers[0].uplink, cores),
        simulated_s=None if wanted.makes_trouble else simulated_s(wanted.scenario, wire_bytes),
    )


def simulated_s(scenario: Scenario, wire_bytes: int) -> float:
    """T_verify of the same relays in virtual time, with a planner that knows every rate."""
    played = replace(scenario, wire_bytes=wire_bytes, frame_bytes=frame_bytes_for(wire_bytes))
    return World(played).run().t_verify_s


def _kinds(wanted: BroadcastBench) -> Iterator[RoundKind]:
    yield "cold"
    yield from repeat("warming up", wanted.warm_up)
    for index in range(wanted.rounds):
        if index and wanted.makes_trouble:
            yield "warming up"  # after it, peers that have come back have links again
        yield "warm"


def best_plan(scenario: Scenario, lost: frozenset[int] = frozenset()) -> Plan:
    """The plan of a coordinator that knows every rate, without the peers that are lost."""
    job = Job(FormId("0" * 32), scenario.wire_bytes, frame_bytes_for(scenario.wire_bytes))
    seed, *peers = (
        PeerFacts(
            PeerId(f"{node:032x}"),
            spec.uplink,
            spec.downlink,
            Address(Lab.address(node), 1) if spec.reachable else None,
            latency_s=spec.latency_s,
        )
        for node, spec in enumerate(scenario.peers)
        if node not in lost
    )
    return plan_shape(scenario.shape, PlanId(0), job, seed, peers, chains=scenario.chains)


def _plan_for(wanted: BroadcastBench, wire_bytes: int) -> Plan:
    return best_plan(replace(wanted.scenario, wire_bytes=wire_bytes), lost=wanted.lost)


def _limit_s(scenario: Scenario) -> float:
    """A round that takes longer than these seconds is stuck."""
    return max(ROUND_S_MIN, ROUND_BOUNDS_MAX * best_plan(scenario).bound_s)


class _Round:
    """One round: publish a version, make the requested faults, and wait until the version has arrived."""

    def __init__(
        self,
        wanted: BroadcastBench,
        lab: Lab,
        swarm: Swarm,
        progress: Progress,
        kind: RoundKind,
        *,
        rng: random.Random,
    ) -> None:
        self._wanted, self._lab, self._swarm, self._progress = wanted, lab, swarm, progress
        self._kind = kind
        self._task = progress.add_task(kind, total=None)
        self._bytes = wanted.scenario.wire_bytes  # of the form, as far as they are known
        self._verified: dict[str, float] = {}
        self._late_s = 0.0
        self._troubles = RoundFaults(wanted.scenario, lab, swarm, swing=wanted.swing, rng=rng)
        if kind != "warming up":
            spoil = wanted.corrupt is not None
            self._troubles.plan(kill=wanted.kill, partition=wanted.partition, spoil=spoil)
        if kind == "cold":
            self._troubles.plan_newcomers()

    def run(self) -> Round:
        prepared = self._swarm.prepare()
        self._bytes = prepared.wire_bytes
        self._swarm.train()
        at_first = self._swarm.status()
        known, there = len(at_first["t_verify_s"]), names(alive(at_first))
        before, cpu, repaired = self._count(), self._swarm.cpu_s(), self._swarm.repaired()
        meter = self._swarm.cpu_meter()
        version = self._swarm.publish(prepared)
        facts = self._look_on(known, before)
        shares = meter.shares()
        gone = {f"peer-{node}" for node in self._troubles.gone}
        # The coordinator does not wait for a quarantined culprit. A good peer in quarantine still counts.
        culprits = {f"peer-{node}" for node in self._troubles.culprits}
        gone |= culprits & names(each for each in alive(facts) if each["quarantined"])
        if self._wanted.versions is not None:
            self._bytes = facts["version_bytes"][str(version)]["wire_bytes"]
        after, survivors = self._count(), (there & names(alive(facts))) - gone
        self._troubles.mend()
        self._swarm.settle()
        used, repaired_since = self._swarm.cpu_s(), self._swarm.repaired()
        broadcast = facts["broadcast"] or {}
        stayed = cpu.keys() - set(self._troubles.culprits)
        return Round(
            version=version,
            kind=self._kind,
            shape=broadcast.get("shape"),
            t_verify_s=facts["t_verify_s"][-1],
            median_peer_s=median(self._verified.values() or facts["t_verify_s"][-1:]),
            plan_predicted_s=broadcast.get("predicted_s"),
            survivors=len(survivors),
            verified=len(survivors & self._verified.keys()),
            seed_copies=(after.nodes[0].up.link_bytes - before.nodes[0].up.link_bytes)
            / self._bytes,
            relay_cpu_s_per_gb=median(used[node] - cpu[node] for node in stayed)
            / (self._bytes / 1e9),
            frames_refetched=sum(repaired_since[node] - repaired[node] for node in stayed),
            late_s=self._late_s,
            wire_bytes=self._bytes,
            cpu=shares,
            culprits=tuple(f"peer-{node}" for node in self._troubles.culprits),
            missing=tuple(sorted(survivors - self._verified.keys())),
            costs=None if broadcast.get("base_version") is None else prepared.costs,
        )

    def _count(self) -> TrafficCounts:
        counts = self._lab.counts()
        self._late_s = max(self._late_s, counts.late_s_max)
        return counts

    def _look_on(self, known: int, before: TrafficCounts) -> Mapping[str, Any]:
        """Wait until the coordinator has this version's T_verify, so all peers that are still present hold it."""
        started_at = time.monotonic()
        limit_s = _limit_s(self._wanted.scenario)
        status_at = started_at
        while True:
            elapsed_s, counts = time.monotonic() - started_at, self._count()
            self._troubles.make_due(elapsed_s, self._bytes, before, counts)
            if time.monotonic() >= status_at:
                facts = self._swarm.status()
                self._note_arrivals(facts, elapsed_s)
                self._show(before, counts)
                if len(facts["t_verify_s"]) > known:
                    return facts
                status_at = time.monotonic() + STATUS_S
            if elapsed_s > limit_s:
                raise Fault(
                    f"a version has not arrived everywhere after {elapsed_s:.0f} s; see --run-dir"
                )
            time.sleep(LOOK_S)

    def _note_arrivals(self, facts: Mapping[str, Any], elapsed_s: float) -> None:
        for peer in (facts["broadcast"] or {"peers": []})["peers"]:
            if peer["verified"]:
                self._verified.setdefault(peer["name"], elapsed_s)

    def _show(self, before: TrafficCounts, counts: TrafficCounts) -> None:
        peers = range(1, len(counts.nodes))
        come = sum(min(self._bytes, come_bytes(node, before, counts)) for node in peers)
        self._progress.update(self._task, completed=come, total=len(peers) * self._bytes)


# --- files and pictures ----------------------------------------


@contextmanager
def _directory(wanted: BroadcastBench) -> Iterator[Path]:
    """The directory of all files: the requested one, or one for the time of the measurement."""
    if wanted.run_dir is not None:
        run = wanted.run_dir.absolute()
        if run.exists() and any(run.iterdir()):
            raise OperatorFault(f"{run} is not empty; choose another --run-dir")
        run.mkdir(parents=True, exist_ok=True)
        yield run
        return
    _sweep()
    copies = COPIES_ON_DISK if wanted.versions is None else COPIES_OF_DELTAS
    copies += len(wanted.against)  # a rival keeps one copy
    needed = copies * wanted.scenario.wire_bytes * len(wanted.scenario.peers)
    in_memory = MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > 2 * needed
    parent = MEMORY_DISK if in_memory else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=f"{DIRECTORY}{os.getpid()}-", dir=parent) as run_text:
        yield Path(run_text)


def _sweep() -> None:
    """Delete the directories of measurements that were killed."""
    for parent in (MEMORY_DISK, Path(tempfile.gettempdir())):
        for left in parent.glob(f"{DIRECTORY}*"):
            if not Path("/proc", left.name.removeprefix(DIRECTORY).partition("-")[0]).exists():
                shutil.rmtree(left, ignore_errors=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())

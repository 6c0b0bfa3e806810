"""`echo2d bench broadcast`: how long versions take to spread. Real daemons (`swarm`) on emulated links (`netlab`).

Round 0 is cold: peers have just joined, there are no links and no rates. A few follow that do not count, for the first
versions also make the files that later ones reuse. Then come as many warm rounds as asked for.
T_verify is the coordinator's own figure; bytes are counted at the emulator. Seconds, from the accepted publish.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from echo2d.bench.against import RIVALS, Rival, interpreter_of, rival_round
from echo2d.bench.netlab import QUEUE_S, Counts, Lab
from echo2d.bench.swarm import Swarm, alive, names
from echo2d.core.forms import frame_bytes_for
from echo2d.core.ids import FormId, PeerId, PlanId
from echo2d.core.messages import Address
from echo2d.core.shapes import plan_auto, plan_chains, plan_star
from echo2d.core.topology import Job, PeerFacts, Plan
from echo2d.errors import Fault, OperatorFault
from echo2d.sim.scenario import Fault as Trouble
from echo2d.sim.scenario import Scenario

LOOK_S = 0.02  # between two looks at the emulator's counters: when half of the bytes have come
STATUS_S = 0.1  # between two looks at the status: as exact as the times of single peers are
ROUND_S_MIN = 60.0  # a round that takes longer than this ...
ROUND_BOUNDS_MAX = 40.0  # ... and so many times the bound is stuck; a star of 8 takes 9
COPIES_ON_DISK = 8  # of a version at each peer: the forms and snapshots it keeps
MEMORY_DISK = Path("/dev/shm")  # every peer has a disk of its own; one real disk for all would be the bottleneck
DIRECTORY = "echo2d-broadcast-"  # then the process that made it
SPOIL_FROM = 0.1  # when so much of a version has come, it shows who passes on most
ROUNDS_MAX = 100  # the coordinator keeps the figures of more


Kind = Literal["cold", "warming up", "warm"]  # of a round


@dataclass(frozen=True, slots=True)
class Broadcast:
    """What was asked for. The culprit of a round is, of the peers with the fastest uplink, the one that passes on most.

    kill, partition: when the median peer has this share of a version, the culprit is gone (SIGKILL), or silent, until
    the round is over. corrupt: the share of its frames that it spoils, soon after the start; nothing of this while
    warming up. against: what else is measured, after each warm round once.
    """

    scenario: Scenario
    rounds: int = 5
    warm_up: int = 4
    queue_s: float = QUEUE_S
    kill: float | None = None
    partition: float | None = None
    corrupt: float | None = None
    against: tuple[str, ...] = ()
    tls: bool = False
    as_json: bool = False
    run_dir: Path | None = None

    def __post_init__(self) -> None:
        for name, count in (("--rounds", self.rounds), ("--warm-up", self.warm_up)):
            if not 0 <= count <= ROUNDS_MAX:
                raise OperatorFault(f"{name}: expected 0 to {ROUNDS_MAX}; found {count}")
        if any(share is not None and not 0 < share <= 1 for share in (self.kill, self.partition, self.corrupt)):
            raise OperatorFault("--kill, --partition, --corrupt: expected shares above 0, at most 1")
        if any(trouble.peer == 0 for trouble in self.scenario.faults):
            raise OperatorFault("faults: the laboratory lets the seed live; expected peers from 1 on")
        if not set(self.against) <= set(RIVALS):
            raise OperatorFault(f"--against: expected some of {', '.join(RIVALS)}; found {', '.join(self.against)}")

    @property
    def fastest(self) -> int:
        """A peer of the fastest uplink."""
        return max(range(1, len(self.scenario.peers)), key=lambda node: (self.scenario.peers[node].uplink, -node))


def with_undialable(scenario: Scenario, share: float) -> Scenario:
    """The same with so many of the peers behind NAT, evenly spread."""
    count = len(scenario.peers) - 1
    closed = {1 + int((index + 0.999) * count / max(1, round(share * count))) for index in range(round(share * count))}
    peers = [replace(spec, reachable=node not in closed) for node, spec in enumerate(scenario.peers)]
    return replace(scenario, peers=tuple(peers))


@dataclass(frozen=True, slots=True)
class Round:
    """One version. plan_predicted_s: by the coordinator, from the rates it has measured.

    survivors: peers that were there at the publish and stayed. verified: how many of these have.
    seed_copies: bytes on the seed's uplink, with all headers and control messages, per byte of the version.
    late_s: by how much the emulator was late at worst; beyond a few ms the machine was too busy to be believed.
    culprits: the peers with whom trouble was made.
    """

    version: int
    shape: str | None
    t_verify_s: float
    median_peer_s: float
    plan_predicted_s: float | None
    survivors: int
    verified: int
    seed_copies: float
    relay_cpu_s_per_gb: float
    frames_refetched: int
    late_s: float
    culprits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the same in several rounds."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """What `--json` prints. Medians over the warm rounds; without any, of the cold one.

    bound_s: no algorithm is faster; the survivors' if one was killed or cut off. predicted_s: by the planner's cost
    model if it knew every rate. ratio, ratio_cold: T_verify over bound_s, warm and in round 0.
    verified_peers: the fewest of any round. load: of the machine, before and after.
    """

    peers: int
    wire_bytes: int
    bound_s: float
    predicted_s: float
    t_verify_s: Spread
    ratio: float
    ratio_cold: float
    median_peer_s: float
    seed_copies: float
    relay_cpu_s_per_gb: float
    frames_refetched: int
    verified_peers: int
    rounds: tuple[Round, ...]
    faults: tuple[str, ...]
    load: tuple[float, float]
    against: Mapping[str, Rival]

    @staticmethod
    def of(
        wanted: Broadcast,
        rounds: Sequence[Round],
        faults: Sequence[str],
        load: tuple[float, float],
        against: Mapping[str, Sequence[tuple[float, float]]],
    ) -> "BroadcastResult":
        plan = best_plan(wanted.scenario, lost=_lost(wanted))
        warm = rounds[1:] or rounds
        times = Spread.of([each.t_verify_s for each in warm])
        return BroadcastResult(
            peers=len(wanted.scenario.peers) - 1,
            wire_bytes=wanted.scenario.wire_bytes,
            bound_s=plan.bound_s,
            predicted_s=plan.predicted_s,
            t_verify_s=times,
            ratio=times.median / plan.bound_s,
            ratio_cold=rounds[0].t_verify_s / plan.bound_s,
            median_peer_s=median(each.median_peer_s for each in warm),
            seed_copies=median(each.seed_copies for each in warm),
            relay_cpu_s_per_gb=median(each.relay_cpu_s_per_gb for each in warm),
            frames_refetched=round(median(each.frames_refetched for each in warm)),
            verified_peers=min(each.verified for each in rounds),
            rounds=tuple(rounds),
            faults=tuple(faults),
            load=load,
            against={rival: Rival.of(each, plan.bound_s) for rival, each in against.items() if each},
        )


def run_broadcast(wanted: Broadcast) -> int:
    """Measure and print. The exit code: 0 when every survivor of every round has verified its version."""
    result = measure(wanted)
    if wanted.as_json:
        print(json.dumps(asdict(result)))
    else:
        print_result(result)
    return exit_code(result)


def exit_code(result: BroadcastResult) -> int:
    return 0 if all(each.verified == each.survivors for each in result.rounds) else 1


def measure(wanted: Broadcast) -> BroadcastResult:
    """OperatorFault: there can be no laboratory here. Fault: a round got stuck, or a daemon ended."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left running, and no files
    with _directory(wanted) as run:
        return _measure(wanted, run, Console(stderr=True))


def _measure(wanted: Broadcast, run: Path, console: Console) -> BroadcastResult:
    load = os.getloadavg()[0]
    scenario = wanted.scenario
    rounds: list[Round] = []
    against: dict[str, list[tuple[float, float]]] = {rival: [] for rival in wanted.against}
    for rival in wanted.against:
        interpreter_of(rival)
    lab = Lab(scenario.peers, run, queue_s=wanted.queue_s)
    with lab, Swarm(lab, scenario, run, corrupt=wanted.corrupt, tls=wanted.tls) as swarm:
        with _progress(console) as progress:
            for kind in _kinds(wanted):
                done = _Round(wanted, lab, swarm, progress, kind).run()
                if not console.is_terminal:
                    console.print(_line(done, kind), highlight=False)
                if kind != "warming up":
                    rounds.append(done)
                for rival in wanted.against if kind == "warm" else ():
                    against[rival].append(rival_round(rival, lab, scenario, run, limit_s=_limit_s(scenario)))
        faults = [f"{fault['kind']}: {fault['text']}" for fault in swarm.status()["faults"]]
    return BroadcastResult.of(wanted, rounds, faults, (load, os.getloadavg()[0]), against)


def _kinds(wanted: Broadcast) -> Iterator[Kind]:
    yield "cold"
    yield from repeat("warming up", wanted.warm_up)
    yield from repeat("warm", wanted.rounds)


def best_plan(scenario: Scenario, lost: frozenset[int] = frozenset()) -> Plan:
    """The plan that a coordinator makes which knows every rate, without the peers that are lost."""
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
    if scenario.shape == "star":
        return plan_star(PlanId(0), job, seed, peers)
    if scenario.shape == "chain":
        return plan_chains(PlanId(0), job, seed, peers, scenario.chains)
    return plan_auto(PlanId(0), job, seed, peers)


def _limit_s(scenario: Scenario) -> float:
    """A round that takes longer is stuck."""
    return max(ROUND_S_MIN, ROUND_BOUNDS_MAX * best_plan(scenario).bound_s)


def _lost(wanted: Broadcast) -> frozenset[int]:
    """Who does not end a round that it began."""
    troubled = {wanted.fastest} if wanted.kill is not None or wanted.partition is not None else set()
    return frozenset(troubled | {trouble.peer for trouble in wanted.scenario.faults if trouble.back_s is None})


@dataclass(frozen=True, slots=True)
class _Planned:
    """Trouble with a peer (None: the busiest one), once both have come: the time and a share of the bytes."""

    strike: Callable[[int], None]
    node: int | None = None
    at_s: float = 0.0
    share: float = 0.0


class _Round:
    """One version on its way: publish, make the trouble that was asked for, look on until it has arrived."""

    def __init__(self, wanted: Broadcast, lab: Lab, swarm: Swarm, progress: Progress, kind: Kind) -> None:
        self._wanted, self._lab, self._swarm, self._progress = wanted, lab, swarm, progress
        self._task = progress.add_task(kind, total=None)
        self._bytes = wanted.scenario.wire_bytes
        self._spoiling: set[int] = set()
        self._culprits: list[int] = []  # with whom trouble was made, in this order
        self._verified: dict[str, float] = {}
        self._late_s = 0.0
        self._troubles = [] if kind == "warming up" else self._planned(cold=kind == "cold")

    def run(self) -> Round:
        directory = self._swarm.prepare()
        self._swarm.train()
        at_first = self._swarm.status()
        known, there = len(at_first["t_verify_s"]), names(alive(at_first))
        before, cpu, repaired = self._count(), self._swarm.cpu_s(), self._swarm.repaired()
        version = self._swarm.publish(directory)
        facts = self._look_on(known, before)
        gone = {f"peer-{node}" for node in self._culprits if node not in self._spoiling}
        after, survivors = self._count(), (there & names(alive(facts))) - gone
        self._mend()
        self._swarm.settle()
        used, repaired_since = self._swarm.cpu_s(), self._swarm.repaired()
        broadcast = facts["broadcast"] or {}
        stayed = cpu.keys() - self._culprits
        return Round(
            version=version,
            shape=broadcast.get("shape"),
            t_verify_s=facts["t_verify_s"][-1],
            median_peer_s=median(self._verified.values() or facts["t_verify_s"][-1:]),
            plan_predicted_s=broadcast.get("predicted_s"),
            survivors=len(survivors),
            verified=len(survivors & self._verified.keys()),
            seed_copies=(after.nodes[0].up.link_bytes - before.nodes[0].up.link_bytes) / self._bytes,
            relay_cpu_s_per_gb=median(used[node] - cpu[node] for node in stayed) / (self._bytes / 1e9),
            frames_refetched=sum(repaired_since[node] - repaired[node] for node in stayed),
            late_s=self._late_s,
            culprits=tuple(f"peer-{node}" for node in self._culprits),
        )

    def _count(self) -> Counts:
        counts = self._lab.counts()
        self._late_s = max(self._late_s, counts.late_s_max)
        return counts

    def _look_on(self, known: int, before: Counts) -> Mapping[str, Any]:
        """Until the coordinator has this version's T_verify, and so has seen everybody arrive who is still there."""
        started_at = time.monotonic()
        limit_s = _limit_s(self._wanted.scenario)
        status_at = started_at
        while True:
            elapsed_s, counts = time.monotonic() - started_at, self._count()
            self._make_trouble(elapsed_s, before, counts)
            if time.monotonic() >= status_at:
                facts = self._swarm.status()
                self._note_arrivals(facts, elapsed_s)
                self._show(before, counts)
                if len(facts["t_verify_s"]) > known:
                    return facts
                status_at = time.monotonic() + STATUS_S
            if elapsed_s > limit_s:
                raise Fault(f"a version has not arrived everywhere after {elapsed_s:.0f} s; see --run-dir")
            time.sleep(LOOK_S)

    def _note_arrivals(self, facts: Mapping[str, Any], elapsed_s: float) -> None:
        for peer in (facts["broadcast"] or {"peers": []})["peers"]:
            if peer["verified"]:
                self._verified.setdefault(peer["name"], elapsed_s)

    def _show(self, before: Counts, counts: Counts) -> None:
        peers = range(1, len(counts.nodes))
        come = sum(min(self._bytes, self._come(node, before, counts)) for node in peers)
        self._progress.update(self._task, completed=come, total=len(peers) * self._bytes)

    # --- trouble

    def _planned(self, *, cold: bool) -> list[_Planned]:
        """The scenario's troubles and newcomers by the clock, the others by how much the median peer has got."""
        planned = [each for trouble in self._wanted.scenario.faults for each in self._scripted(trouble)]
        for share, strike in (
            (self._wanted.kill, self._kill),
            (self._wanted.partition, self._cut_off),
            (None if self._wanted.corrupt is None else SPOIL_FROM, self._spoil),
        ):
            if share is not None:
                planned.append(_Planned(strike, share=share))
        if cold:
            peers = enumerate(self._wanted.scenario.peers)
            planned += [_Planned(self._swarm.join, node, spec.joins_at_s) for node, spec in peers if spec.joins_at_s]
        return planned

    def _scripted(self, trouble: Trouble) -> Iterator[_Planned]:
        yield _Planned(self._cut_off if trouble.silent else self._kill, trouble.peer, trouble.at_s)
        if trouble.back_s is not None:
            yield _Planned(self._bring_back, trouble.peer, trouble.back_s)

    def _make_trouble(self, elapsed_s: float, before: Counts, counts: Counts) -> None:
        come = median(self._come(node, before, counts) for node in range(1, len(counts.nodes))) / self._bytes
        due = [each for each in self._troubles if elapsed_s >= each.at_s and come >= each.share]
        for each in due:
            self._troubles.remove(each)
            each.strike(self._busiest(before, counts) if each.node is None else each.node)

    def _busiest(self, before: Counts, counts: Counts) -> int:
        """Of the peers with the fastest uplink, the one that has passed on most in this round."""
        uplinks = {node: self._wanted.scenario.peers[node].uplink for node in range(1, len(counts.nodes))}
        fastest = [node for node, uplink in uplinks.items() if uplink == max(uplinks.values())]
        return max(fastest, key=lambda node: counts.nodes[node].up.link_bytes - before.nodes[node].up.link_bytes)

    @staticmethod
    def _come(node: int, before: Counts, counts: Counts) -> int:
        return counts.nodes[node].down.payload_bytes - before.nodes[node].down.payload_bytes

    def _kill(self, node: int) -> None:
        self._swarm.kill(node)
        self._culprits.append(node)

    def _cut_off(self, node: int) -> None:
        self._lab.isolate(node)
        self._culprits.append(node)

    def _spoil(self, node: int) -> None:
        self._swarm.spoil(node)
        self._spoiling.add(node)
        self._culprits.append(node)

    def _bring_back(self, node: int) -> None:
        self._lab.isolate(node, on=False)
        if not self._swarm.runs(node):
            self._swarm.join(node)

    def _mend(self) -> None:
        """For the next round everybody is there, and honest."""
        for node in range(1, len(self._wanted.scenario.peers)):
            self._bring_back(node)
        for node in self._spoiling:
            self._swarm.spoil(node)


# --- files and pictures ----------------------------------------


@contextmanager
def _directory(wanted: Broadcast) -> Iterator[Path]:
    """Where everything is kept: as asked for, else for the time of the measurement."""
    if wanted.run_dir is not None:
        run = wanted.run_dir.absolute()
        if run.exists() and any(run.iterdir()):
            raise OperatorFault(f"{run} is not empty; choose another --run-dir")
        run.mkdir(parents=True, exist_ok=True)
        yield run
        return
    _sweep()
    needed = COPIES_ON_DISK * wanted.scenario.wire_bytes * len(wanted.scenario.peers)
    in_memory = MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > 2 * needed
    parent = MEMORY_DISK if in_memory else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=f"{DIRECTORY}{os.getpid()}-", dir=parent) as run_text:
        yield Path(run_text)


def _sweep() -> None:
    """Delete what measurements left that were killed."""
    for parent in (MEMORY_DISK, Path(tempfile.gettempdir())):
        for left in parent.glob(f"{DIRECTORY}*"):
            if not Path("/proc", left.name.removeprefix(DIRECTORY).partition("-")[0]).exists():
                shutil.rmtree(left, ignore_errors=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def _line(done: Round, kind: Kind) -> str:
    return f"version {done.version} ({kind}): T_verify {done.t_verify_s:.2f} s, {done.verified} peers, {done.shape}"


def print_result(result: BroadcastResult) -> None:
    """A table for people."""
    times = result.t_verify_s
    table = Table("what", "measured", box=None)
    for name, text in (
        ("peers, bytes", f"{result.peers}, {result.wire_bytes:,}"),
        ("bound, predicted", f"{result.bound_s:.2f} s, {result.predicted_s:.2f} s"),
        ("T_verify median (min-max)", f"{times.median:.2f} s ({times.min:.2f}-{times.max:.2f})"),
        ("ratio to the bound, cold", f"{result.ratio:.2f}, {result.ratio_cold:.2f}"),
        ("the median peer after", f"{result.median_peer_s:.2f} s"),
        ("seed copies, all bytes", f"{result.seed_copies:.3f}"),
        ("a relay's CPU per GB", f"{result.relay_cpu_s_per_gb:.2f} s"),
        ("frames fetched again", f"{result.frames_refetched}"),
        ("peers that verified", f"{result.verified_peers}"),
        ("emulator late by at most", f"{max(each.late_s for each in result.rounds) * 1000:.1f} ms"),
        ("load before, after", f"{result.load[0]:.1f}, {result.load[1]:.1f}"),
    ):
        table.add_row(name, text)
    for name, rival in result.against.items():
        text = f"{rival.median_s:.2f} s ({rival.min_s:.2f}-{rival.max_s:.2f}), ratio {rival.ratio:.2f}"
        table.add_row(name, f"{text}, seed copies {rival.seed_copies:.2f}")
    console = Console()
    console.print(table)
    for fault in result.faults[-3:]:
        console.print(f"fault: {fault}", highlight=False, markup=False)

"""The result of `echo2d bench broadcast`, and its table. Not here: measuring."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from echo2d_lab.bench.broadcast.baselines import Rival, RivalRound
from echo2d_lab.bench.broadcast.kinds import RoundKind
from echo2d_lab.bench.delta.cost import DeltaCosts
from echo2d_lab.bench.lab.cpu import CpuShares

# A delta may take this many times its wire bytes at the seed's uplink, for the relays' start-up and the losses of a
# short version ...
WIRE_TIMES_MAX = 2.5
FIXED_S = 1.0  # ... and this for everything that does not depend on the version


@dataclass(frozen=True, slots=True)
class Round:
    """One version. plan_predicted_s: the coordinator's prediction, from the rates that it has measured.

    survivors: peers that were present at the publish and stayed. verified: the number of survivors that have verified.
    seed_copies: bytes on the seed's uplink, with all headers and control messages, per byte of the version.
    late_s: the emulator's largest delay; above a few ms the machine was too busy, and the figures are not reliable.
    cpu: use from the publish until all had verified.
    culprits: the peers that a fault struck. missing: survivors that had not verified at the end; a culprit
    that was killed, cut off or quarantined is no survivor. wire_bytes: of the form that spread; costs: of encoding it
    and of applying it, if it was a delta.
    """

    version: int
    kind: RoundKind
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
    wire_bytes: int
    cpu: CpuShares
    culprits: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    costs: DeltaCosts | None = None


@dataclass(frozen=True, slots=True)
class RoundStatistics:
    """Statistics of one figure over several rounds."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> "RoundStatistics":
        return RoundStatistics(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class DeltaTarget:
    """How long the broadcast of a delta may take: medians over the warm rounds. encode_s, decode_cpu_s: as in
    DeltaCosts.

    target_s: 2.5 times the wire bytes at the seed's uplink, plus encoding, decoding at all peers on the shared cores of
    the machine, and a second. reached: whether the median T_verify is at most that.
    """

    changed_fraction: float
    wire_fraction: float
    encode_s: float
    decode_cpu_s: float
    cores: int
    target_s: float
    reached: bool

    @staticmethod
    def of(rounds: Sequence[Round], peers: int, uplink: float, cores: int) -> "DeltaTarget | None":
        """None: not all of these versions were sent as deltas. uplink: of the seed, bytes/s."""
        costs = [each.costs for each in rounds if each.costs is not None]
        if len(costs) < len(rounds):
            return None
        encode_s, decode_cpu_s = (
            median(each.encode_s for each in costs),
            median(each.decode_cpu_s for each in costs),
        )
        wire_s = median(each.wire_bytes for each in rounds) / uplink
        target_s = WIRE_TIMES_MAX * wire_s + encode_s + peers * decode_cpu_s / cores + FIXED_S
        return DeltaTarget(
            changed_fraction=median(each.changed_fraction for each in costs),
            wire_fraction=median(each.wire_fraction for each in costs),
            encode_s=encode_s,
            decode_cpu_s=decode_cpu_s,
            cores=cores,
            target_s=target_s,
            reached=median(each.t_verify_s for each in rounds) <= target_s,
        )


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """The object that `--json` prints. Figures are medians over the warm rounds; without any, of the cold one.

    bound_s: no algorithm is faster; if a peer was killed or cut off, the bound for the survivors. predicted_s: by the
    planner's cost model with every rate known. simulated_s: T_verify in virtual time, with every rate known; None: the
    rounds have faults. Neither counts headers. ratio, ratio_cold: T_verify over bound_s, warm and in round 0 (which has
    other wire bytes if deltas follow it). verified_peers: the smallest number of any round. load: of the machine,
    before and after. against: the rivals, in the same rounds.
    """

    peers: int
    wire_bytes: int
    bound_s: float
    predicted_s: float
    t_verify_s: RoundStatistics
    ratio: float
    ratio_cold: float
    median_peer_s: float
    seed_copies: float
    relay_cpu_s_per_gb: float
    frames_refetched: int
    verified_peers: int
    cpu: CpuShares
    rounds: tuple[Round, ...]
    faults: tuple[str, ...]
    load: tuple[float, float]
    against: Mapping[str, Rival]
    delta: DeltaTarget | None = None
    simulated_s: float | None = None


def exit_code(result: BroadcastResult) -> int:
    return 0 if all(each.verified == each.survivors for each in result.rounds) else 1


def line_of(done: Round) -> str:
    what = f"T_verify {done.t_verify_s:.2f} s, {done.verified} peers, {done.shape}"
    return f"version {done.version} ({done.kind}): {what}"


def print_result(result: BroadcastResult) -> None:
    """Print a table for people."""
    times = result.t_verify_s
    table = Table("what", "measured", box=None)
    for name, text in (
        ("peers, bytes", f"{result.peers}, {result.wire_bytes:,}"),
        ("bound, predicted", f"{result.bound_s:.2f} s, {result.predicted_s:.2f} s"),
        ("simulated", "-" if result.simulated_s is None else f"{result.simulated_s:.2f} s"),
        ("rounds that count", _kinds_of(result.rounds)),
        ("T_verify, warm (min-max)", f"{times.median:.2f} s ({times.min:.2f}-{times.max:.2f})"),
        ("T_verify, cold", f"{result.rounds[0].t_verify_s:.2f} s"),
        ("ratio to the bound", f"warm {result.ratio:.2f}, cold {result.ratio_cold:.2f}"),
        ("the median peer after", f"{result.median_peer_s:.2f} s"),
        ("seed copies, all bytes", f"{result.seed_copies:.3f}"),
        ("cores in use", str(result.cpu)),
        ("a relay's CPU per GB", f"{result.relay_cpu_s_per_gb:.2f} s"),
        ("frames fetched again", f"{result.frames_refetched}"),
        ("peers that verified", f"{result.verified_peers}"),
        ("emulator late by at most", f"{max(each.late_s for each in result.rounds) * 1000:.1f} ms"),
        ("load before, after", f"{result.load[0]:.1f}, {result.load[1]:.1f}"),
        *_delta_rows(result.delta),
    ):
        table.add_row(name, text)
    for name, rival in result.against.items():
        for kind, text in _rival_rows(rival):
            table.add_row(f"{name}, {kind}", text)
    console = Console()
    console.print(table)
    for fault in result.faults[-3:]:
        console.print(f"fault: {fault}", highlight=False, markup=False)


def _kinds_of(rounds: Sequence[Round | RivalRound]) -> str:
    """The number of rounds of each kind."""
    counts = Counter(each.kind for each in rounds)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _rival_rows(rival: Rival) -> list[tuple[str, str]]:
    """Rows of a rival: warm over warm, cold over cold."""
    times = f"{rival.median_s:.2f} s ({rival.min_s:.2f}-{rival.max_s:.2f}), ratio {rival.ratio:.2f}"
    warm = f"{times}, {rival.over_ours:.2f} x ours warm, seed copies {rival.seed_copies:.2f}"
    cold = f"{rival.cold_s:.2f} s, ratio {rival.ratio_cold:.2f}"
    return [
        ("warm", f"{warm}, {rival.cpu}"),
        ("cold", f"{cold}, {rival.over_ours_cold:.2f} x ours cold"),
    ]


def _delta_rows(delta: DeltaTarget | None) -> list[tuple[str, str]]:
    if delta is None:
        return []
    verdict = "reached" if delta.reached else "MISSED"
    return [
        (
            "deltas: words changed, on the wire",
            f"{delta.changed_fraction:.2%}, {delta.wire_fraction:.3%}",
        ),
        ("encoding; decoding, CPU", f"{delta.encode_s:.2f} s; {delta.decode_cpu_s:.2f} s"),
        (f"target on {delta.cores} cores", f"{delta.target_s:.2f} s: {verdict}"),
    ]

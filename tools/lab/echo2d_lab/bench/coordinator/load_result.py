"""The result of `echo2d bench coordinator`, as an object and as a table."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from echo2d.core.capacity.estimators import quantile
from echo2d.errors import Fault
from echo2d_lab.bench.coordinator.bombers import Bomber, StatusProbe
from echo2d_lab.bench.coordinator.load import GROUP_SIZE, Load
from echo2d_lab.bench.coordinator.load_meter import LoadMeter

# A slot that has been empty for this long at the end was forgotten, and is not just slow.
STALE_SLOT_S = 1.0
SUSTAINED = 0.95  # share of --rate that must be accepted


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The object that `--json` prints. Milliseconds, seconds, 10^6 bytes; shares are of one core.

    lease_*: lease latency, see `run`; *_parts: [smallest, largest] over fifths of the measured time. answer_*: until a
    result was acknowledged, and so durable. load_cpu_share: of this process. other_cpu_share: of everything else on
    this machine, with the coordinator's seed and task process. slots_empty: empty for STALE_SLOT_S or longer at the
    end. enrol_s, connect_s: until all workers were enrolled, and welcomed. steps: train steps in the measured time.
    status_*: until the status was answered. leases_lapsed: of the scripted workers. bombs: sent. bombers_refused:
    refused dials of the attackers.
    """

    lease_p50_ms: float
    lease_p99_ms: float
    lease_max_ms: float
    lease_p99_ms_parts: tuple[float, float]
    answer_p50_ms: float
    answer_p99_ms: float
    cpu_share: float
    cpu_share_parts: tuple[float, float]
    cpu_ms_per_trajectory: float
    rss_mb: float
    trajectories_per_s: float
    leases_measured: int
    slots_empty: int
    results_refused: dict[str, int]
    links_lost: int
    steps: int
    status_p50_ms: float
    status_p99_ms: float
    status_max_ms: float
    leases_lapsed: int
    bombs: int
    bombers_refused: int
    enrol_s: float
    connect_s: float
    load_cpu_share: float
    other_cpu_share: float
    cores: int
    settings: dict[str, Any]

    @staticmethod
    def of(
        load: Load,
        meter: LoadMeter,
        *,
        slots_empty: int,
        steps: int,
        took: Mapping[str, float],
        memory_mb: float,
        probe: StatusProbe,
        bombers: Sequence[Bomber],
    ) -> "LoadResult":
        """The meter's figures. took: seconds of each step before the measurement."""
        if not meter.lease_s or not meter.answer_s:
            raise Fault("no slot was filled while it was measured")
        share, parts, cpu = (
            meter.share(),
            meter.parts_p99_s(),
            [part.coordinator for part in meter.shares()],
        )
        return LoadResult(
            lease_p50_ms=_ms(quantile(meter.lease_s, 0.5)),
            lease_p99_ms=_ms(quantile(meter.lease_s, 0.99)),
            lease_max_ms=_ms(max(meter.lease_s)),
            lease_p99_ms_parts=(_ms(min(parts)), _ms(max(parts))),
            answer_p50_ms=_ms(quantile(meter.answer_s, 0.5)),
            answer_p99_ms=_ms(quantile(meter.answer_s, 0.99)),
            cpu_share=round(share.coordinator, 3),
            cpu_share_parts=(round(min(cpu), 3), round(max(cpu), 3)),
            rss_mb=round(memory_mb, 1),
            cpu_ms_per_trajectory=_ms(
                share.coordinator * share.at * load.turns / meter.accepted, 3
            ),
            trajectories_per_s=round(meter.accepted / load.turns / share.at, 1),
            leases_measured=len(meter.lease_s),
            slots_empty=slots_empty,
            results_refused=dict(meter.refused),
            links_lost=meter.lost_links,
            steps=steps,
            status_p50_ms=_ms(quantile(probe.took_s, 0.5)),
            status_p99_ms=_ms(quantile(probe.took_s, 0.99)),
            status_max_ms=_ms(max(probe.took_s, default=0.0)),
            leases_lapsed=probe.lapsed,
            bombs=sum(bomber.sent for bomber in bombers),
            bombers_refused=sum(bomber.refused for bomber in bombers),
            enrol_s=round(took["enrolling"], 2),
            connect_s=round(took["connecting"], 2),
            load_cpu_share=round(share.load, 3),
            other_cpu_share=round(share.machine - share.coordinator - share.load, 3),
            cores=len(os.sched_getaffinity(0)),
            settings={
                **asdict(load),
                "group_size": GROUP_SIZE,
                "trajectories_per_step": load.groups_per_step * GROUP_SIZE,
                "staleness_max": load.staleness_max,
                "generate_s": load.generate_s,
            },
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def shortcomings(self, load: Load) -> list[str]:
        """Why the run did not sustain the requested load; empty: it did."""
        found = {
            f"only {self.trajectories_per_s:.1f} of {load.rate:g} trajectories/s were accepted": (
                self.trajectories_per_s < SUSTAINED * load.rate
            ),
            f"{self.slots_empty} slots stayed empty": self.slots_empty > 0,
            f"results were refused: {self.results_refused}": bool(self.results_refused),
            f"{self.links_lost} control links were lost": self.links_lost > 0,
            f"{self.leases_lapsed} leases lapsed": self.leases_lapsed > 0,
        }
        return [text for text, is_so in found.items() if is_so]

    def verdict(self, load: Load) -> str:
        """What the figures mean, in one sentence."""
        asked = f"{load.workers:,} workers and {load.rate:g} trajectories/s"
        if found := self.shortcomings(load):
            return f"This host does not carry {asked}: {'; '.join(found)}."
        empty = self.lease_p50_ms / (1000 * load.generate_s + self.lease_p50_ms)
        most = max(self.cpu_share_parts)
        return (
            f"This host carries {asked}: the coordinator's one thread is busy {self.cpu_share:.0%} of the "
            f"time (at most {most:.0%}), and a slot is empty for {empty:.1%} of it."
        )


def _ms(seconds: float | None, digits: int = 1) -> float:
    return round(1000 * (seconds or 0.0), digits)


def print_figures(result: LoadResult, load: Load) -> None:
    """Print the table at the end, and its meaning."""
    table = Table("what", "measured", "least - most of five parts", box=None)
    table.add_row("lease latency p50", f"{result.lease_p50_ms} ms", "")
    low, high = result.lease_p99_ms_parts
    table.add_row(
        "lease latency p99, max",
        f"{result.lease_p99_ms} ms, {result.lease_max_ms} ms",
        f"{low} - {high} ms",
    )
    table.add_row(
        "result acknowledged p50, p99", f"{result.answer_p50_ms} ms, {result.answer_p99_ms} ms", ""
    )
    table.add_row(
        "status answered p50, p99, max",
        f"{result.status_p50_ms} ms, {result.status_p99_ms} ms, {result.status_max_ms} ms",
        "",
    )
    if result.settings["bombers"]:
        table.add_row(
            "bombs sent", f"{result.bombs}, then {result.bombers_refused} dials refused", ""
        )
    low, high = result.cpu_share_parts
    table.add_row(
        "coordinator: share of one core", f"{result.cpu_share:.0%}", f"{low:.0%} - {high:.0%}"
    )
    table.add_row("coordinator: CPU of a trajectory", f"{result.cpu_ms_per_trajectory} ms", "")
    table.add_row("coordinator: memory", f"{result.rss_mb} MB", "")
    table.add_row("trajectories accepted", f"{result.trajectories_per_s} /s", "")
    table.add_row("train steps", str(result.steps), "")
    table.add_row("enrolling, connecting", f"{result.enrol_s} s, {result.connect_s} s", "")
    table.add_row(
        "this process, everything else",
        f"{result.load_cpu_share:.0%}, {result.other_cpu_share:.0%}",
        "",
    )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\n{result.verdict(load)}", soft_wrap=True)

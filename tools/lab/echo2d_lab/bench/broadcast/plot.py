"""`echo2d bench broadcast --plot`: the same measurement with more and more peers, and its picture.

The picture has T_verify over the number of peers, for echo2d and its rivals, and the bound that no algorithm can beat.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from echo2d.extras import check_plot
from echo2d_lab.bench.broadcast.result import (
    BroadcastResult,
    RoundStatistics,
    exit_code,
    print_result,
)
from echo2d_lab.bench.broadcast.run import BroadcastBench, measure

Results = Mapping[int, BroadcastResult]


def run_plot(wanted: BroadcastBench, path: Path) -> int:
    """Measure, print and draw. The exit code is that of `run_broadcast`, for all measurements."""
    check_plot(path)
    results = {len(each.scenario.peers) - 1: measure(each) for each in measurements(wanted)}
    draw(results, path)
    last = results[max(results)]
    if wanted.as_json:
        print(
            json.dumps(
                {**asdict(last), "by_peers": {n: asdict(each) for n, each in results.items()}}
            )
        )
    else:
        print_result(last)
    return max(map(exit_code, results.values()))


def measurements(wanted: BroadcastBench) -> Iterator[BroadcastBench]:
    """The measurement with the first 2, 4, 8, ... peers of the scenario, and with all."""
    peers = len(wanted.scenario.peers) - 1
    for count in (*(2**power for power in range(1, peers.bit_length()) if 2**power < peers), peers):
        scenario = replace(wanted.scenario, peers=wanted.scenario.peers[: count + 1])
        run_dir = None if wanted.run_dir is None else wanted.run_dir / f"{count}-peers"
        yield replace(wanted, scenario=scenario, run_dir=run_dir)


def draw(results: Results, path: Path) -> None:
    """Draw a curve for echo2d and for each rival: medians with the smallest and the largest value."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    counts = sorted(results)
    last = results[counts[-1]]
    curves = {"echo2d": [results[n].t_verify_s for n in counts]}
    for rival in last.against:
        rivals = [results[n].against[rival] for n in counts]
        curves[rival] = [RoundStatistics(each.median_s, each.min_s, each.max_s) for each in rivals]
    for name, times in curves.items():
        least, most = (
            [each.median - each.min for each in times],
            [each.max - each.median for each in times],
        )
        axes.errorbar(
            counts,
            [each.median for each in times],
            [least, most],
            marker="o",
            capsize=3,
            label=name,
        )
    axes.plot(counts, [results[n].bound_s for n in counts], "k--", label="lower bound")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="peers",
        ylabel="T_verify, s",
        xticks=counts,
        xticklabels=counts,
    )
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(
        f"{last.wire_bytes / 2**20:.0f} MiB to all peers, median of {len(last.rounds) - 1} (least to most)"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)

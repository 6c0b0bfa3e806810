"""Shows the result of `echo2d simulate` to people: a fleet as in `echo2d plan`, a broadcast in sentences.

The module reads the object that `--json` prints, and decides nothing.
"""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from echo2d.views.status import per_h, plain_console, seconds


def print_simulated(facts: Mapping[str, Any]) -> None:
    """Print the whole picture."""
    console = plain_console()
    console.print(_broadcast(facts) if "t_verify_s" in facts else _fleet(facts))
    console.print(f"took     {seconds(facts['wall_s'])}, {seconds(facts['cpu_s'])} of CPU")


def _fleet(facts: Mapping[str, Any]) -> RenderableType:
    enough = facts["feasible"]
    panel = Panel(
        _fleet_sentences(facts),
        title="the workers are enough" if enough else "the workers are not enough",
        title_align="left",
        border_style="green" if enough else "red",
    )
    return Group(panel, _workers(facts), Text("\n".join(_fleet_lines(facts))))


def _fleet_sentences(facts: Mapping[str, Any]) -> str:
    needed, usd = facts["mu_min"], facts["usd_per_step"]
    active = sum(row["count"] for row in facts["workers"])
    lines = [
        "needed   "
        + ("no throughput is enough" if needed is None else f"{per_h(needed)} trajectories/h"),
        f"active   {active} workers at the end, which make {per_h(facts['mu_pool'])} trajectories/h",
        f"learner  {facts['steps']:,} train steps; it waited {facts['bubble']:.1%} of the time (the bubble)",
        f"cost     {facts['usd']:,.2f} usd"
        + (", and no step is done" if usd is None else f", {usd:.3f} usd a step"),
    ]
    if facts["why_not"]:
        lines.append(f"why not  {facts['why_not']}")
    return "\n".join(lines)


def _workers(facts: Mapping[str, Any]) -> Table:
    table = Table("workers", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("active", "usd per 1,000 trajectories"):
        table.add_column(heading, justify="right")
    for row in facts["workers"]:
        rho = "-" if row["rho"] is None else f"{1000 * row['rho']:.3f}"
        table.add_row(Text(row["name"]), str(row["count"]), rho)
    return table


def _fleet_lines(facts: Mapping[str, Any]) -> list[str]:
    made, histogram, group = (
        facts["trajectories"],
        facts["staleness_histogram"],
        facts["group_s"],
    )
    trained, dropped = made["trained"], made["dropped"]
    share = dropped / (trained + dropped) if trained + dropped else 0.0
    trained_at = sum(histogram.values()) or 1
    ages = ", ".join(f"{age}: {count / trained_at:.0%}" for age, count in histogram.items())
    lines = [
        (
            f"trained  {trained:,} trajectories; {dropped:,} were dropped ({share:.1%}), "
            f"{facts['samples_moved']:,} moved to another worker"
        ),
        f"stale    in train steps, by share: {ages or 'nothing is trained yet'}",
        f"groups   half of them took no longer than {seconds(group['p50'])}, 95% than {seconds(group['p95'])}",
        f"versions T_bcast {seconds(facts['t_bcast_s'])}; the learner's host sent each "
        f"{facts['seed_copies']:.1f} times, {facts['egress_gb']:,.1f} GB in all"
        + (f" for {facts['seed_usd']:,.2f} usd" if facts["seed_usd"] else "")
        + f"; workers passed on {facts['relayed_gb']:,.1f} GB",
        (
            f"changes  the active workers were changed without need {facts['activation_changes']:,} times; "
            f"the learner lost its host {facts['learner_losses']:,} times"
        ),
    ]
    if "slots_busy" in facts:
        lines.append(
            f"tools    {facts['episodes_parked']:,.1f} episodes waited for one on average; slots were busy "
            f"{facts['slots_busy']:.1%} of the time; {facts['stayed']:.1%} of the turns that could stay at their "
            f"worker did; workers read {facts['prefill_ratio']:.2f} times the tokens needed"
        )
    return lines


def _broadcast(facts: Mapping[str, Any]) -> str:
    return "\n".join(
        (
            (
                f"verified {_peers(facts['verified_peers'])} hold the version; the last had it after "
                f"{seconds(facts['t_verify_s'])}"
            ),
            (
                f"planned  {seconds(facts['predicted_s'])}; no plan can be faster than {seconds(facts['bound_s'])}, "
                f"and it took {facts['ratio']:.2f} times that"
            ),
            f"seed     sent it {facts['seed_copies']:.2f} times",
            (
                f"repairs  the plan was changed {_times(facts['generations'])}; {_peers(facts['left'])} died; "
                f"{facts['refetched']:,} frames came twice"
            ),
            f"events   {facts['events']:,}",
        )
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count:,} peers"

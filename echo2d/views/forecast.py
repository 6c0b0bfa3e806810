"""Draws the forecast of `echo2d plan`: the throughput needed, the workers chosen, and the cost.

A table shows the same for other S and kappa. It reads a `Forecast` (`sim/fleet/forecast.py`) and
decides nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from echo2d.core.capacity.model import bubble, step_s, usable
from echo2d.core.capacity.worker_cost import by_rho
from echo2d.plan.fleet.break_even import BreakEven
from echo2d.plan.fleet.forecast import Forecast, WhatIf
from echo2d.views.break_even import break_even_sentence
from echo2d.views.status import per_h, plain_console, seconds


def print_provision(
    found: Forecast, cells: Sequence[WhatIf], compared: BreakEven | None = None
) -> None:
    """Print the whole picture. cells: the table over S and kappa."""
    plain_console().print(provision_picture(found, cells, compared))


def provision_picture(
    found: Forecast, cells: Sequence[WhatIf], compared: BreakEven | None = None
) -> RenderableType:
    """The sentences, the workers, the broadcast, and the table over S and kappa."""
    colour = "green" if found.feasible else "red"
    title = "the learner stays busy" if found.feasible else "not feasible"
    parts: list[RenderableType] = [
        Panel(_sentences(found), title=title, title_align="left", border_style=colour),
        workers_table(found),
        _broadcast_line(found),
        *([] if compared is None else [Text(break_even_sentence(compared))]),
        Text(),
        what_if_table(found, cells),
    ]
    return Group(*parts)


def _sentences(found: Forecast) -> Text:
    demand, text = found.demand, Text()
    text.append(
        f"S = {demand.staleness_max}, kappa = {demand.publish_every}, "
        f"R = {demand.trajectories_per_step}, "
        f"T_train = {demand.t_train_s:,.4g} s, {demand.mode} dissemination\n"
    )
    if found.mu_min is None:
        text.append(
            f"needed   no throughput is enough; {per_h(usable(demand))} trajectories/h are all that "
            "the learner can use\n"
        )
    else:
        text.append(
            f"needed   {per_h(found.mu_min)} trajectories/h, "
            f"with a margin of {demand.gamma:g} times "
            f"{per_h(demand.gamma * found.mu_min)}\n"
        )
    text.append(
        f"chosen   {per_h(found.mu_pool)} trajectories/h from {len(found.choice.offers)} workers, "
        f"bubble {found.bubble:.1%}\n"
    )
    text.append(
        f"cost     {_usd(found.usd_per_step)} a step, "
        f"{_usd(1000 * found.usd_per_step, 0)} for 1,000, "
        f"{_usd(found.usd_per_h)} an hour"
    )
    if found.why_not:
        text.append(f"\nwhy not  {found.why_not}", style="red")
    return text


def workers_table(found: Forecast) -> Table:
    """Each kind of worker: how many are chosen, their throughput and their price."""
    table = Table("workers", box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "chosen",
        "of",
        "trajectories/h each",
        "usd/h each",
        "usd per 1,000 trajectories",
    ):
        table.add_column(heading, justify="right")
    chosen = {row["name"]: row for row in found.workers()}
    for kind in found.kinds:
        row = chosen.get(kind.name)
        rates = (
            ("-", "-")
            if row is None
            else (f"{row['usd_per_h']:.3f}", f"{1000 * (row['rho'] or 0.0):.3f}")
        )
        count = 0 if row is None else row["count"]
        table.add_row(
            Text(kind.name), str(count), str(kind.count), f"{kind.trajectories_per_h:,.4g}", *rates
        )
    return table


def _broadcast_line(found: Forecast) -> Text:
    times = found.broadcast
    # Which workers pass versions on; nothing is said if all of them do.
    only = {
        "all": "",
        "unmetered": "; metered workers only receive",
        "none": "; workers pass nothing on",
    }
    usd = found.seed_usd_per_h
    price = f", for {_usd(usd)} an hour" if usd else ""
    return Text(
        f"a version reaches them in {seconds(times.planned_s)} as planned; "
        f"star {seconds(times.star_s)}, "
        f"a chain {seconds(found.chain_s)}, no way under {seconds(times.bound_s)}; "
        f"T_bcast {seconds(found.demand.t_bcast_s)}"
        f"{only[found.relays]}"
        f"; the learner's host sends it {times.seed_copies:.1f} times{price}"
    )


def what_if_table(found: Forecast, cells: Sequence[WhatIf]) -> Table:
    """Usd per step and number of workers over S and kappa; the configured cell is bold."""
    kappas = sorted({cell.publish_every for cell in cells})
    table = Table(
        "usd a step (workers)",
        *(f"kappa = {kappa}" for kappa in kappas),
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    cheapest = min((cell.usd_per_step for cell in cells if cell.feasible), default=None)
    for bound in sorted({cell.staleness_max for cell in cells}):
        row = {cell.publish_every: cell for cell in cells if cell.staleness_max == bound}
        texts = [_cell(found, row.get(kappa), cheapest) for kappa in kappas]
        table.add_row(f"S = {bound}", *texts)
    return table


def _cell(found: Forecast, cell: WhatIf | None, cheapest: float | None) -> Text:
    if cell is None:
        return Text()
    here = (cell.staleness_max, cell.publish_every) == (
        found.demand.staleness_max,
        found.demand.publish_every,
    )
    style = ("bold " if here else "") + (
        "green" if cell.feasible and cell.usd_per_step == cheapest else ""
    )
    # A cell that is not feasible has no price worth showing, only its bubble.
    if not cell.feasible:
        return Text(f"bubble {cell.bubble:.0%}", style=style + "dim")
    return Text(f"{cell.usd_per_step:.3f} ({cell.workers})", style=style)


def draw_provision(found: Forecast, path: Path) -> None:
    """Plot bubble and usd per step over mu_pool, as the chosen workers are added in order of rho.

    Vertical lines mark mu_min, and mu_min with its margin.
    """
    # Imported here: only this function needs matplotlib, and it is slow to import.
    from matplotlib.figure import Figure

    offers = by_rho(found.choice.offers)
    shares = [
        (count, sum(offer.counts for offer in offers[:count]))
        for count in range(1, len(offers) + 1)
    ]
    learner_usd = found.usd_per_h - found.choice.usd_per_h
    costs = [
        (learner_usd + sum(offer.usd_per_h for offer in offers[:count]))
        / 3600.0
        * step_s(found.demand, mu)
        for count, mu in shares
    ]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    pools = [3600.0 * mu for _, mu in shares]
    axes.plot(
        pools,
        [100.0 * bubble(found.demand, mu) for _, mu in shares],
        color="#b5403c",
        label="bubble, %",
    )
    if found.mu_min is not None:
        axes.axvline(3600.0 * found.mu_min, color="#555555", linestyle="--", label="mu_min")
        axes.axvline(
            3600.0 * found.demand.gamma * found.mu_min,
            color="#555555",
            linestyle=":",
            label="with margin",
        )
    axes.set(
        xlabel="mu_pool, trajectories/h, cheapest workers first",
        ylabel="predicted bubble, %",
        ylim=(0, 100),
    )
    right = axes.twinx()
    right.plot(pools, costs, color="#2f6db5", label="usd a step")
    right.set(ylabel="usd a step", ylim=(0, 2 * min(costs)) if costs else (0, 1))
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper right")
    axes.grid(alpha=0.3)
    figure.savefig(path)


def _usd(value: float, digits: int = 3) -> str:
    return f"{value:,.{digits}f} usd" if value < float("inf") else "no end of usd"

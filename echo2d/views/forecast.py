"""Draws the forecast of `echo2d plan`: the throughput needed, the workers chosen, and the cost.

A table shows the cost for other S and kappa. The module reads a `Forecast` (`plan/fleet/forecast.py`)
and decides nothing.
"""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from echo2d.core.capacity.bottleneck import BUSY
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
    colour = "green" if found.feasible else "yellow"
    waits = f"{found.bubble:.0%} of its time"
    title = f"the learner waits for {waits}" if found.bubble > BUSY else "the learner stays busy"
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
    needed = "no throughput" if found.mu_min is None else f"{per_h(found.mu_min)} trajectories/h"
    text.append(f"needed   {needed}, so that the learner never waits\n")
    text.append(
        f"chosen   {per_h(found.mu_pool)} trajectories/h from {len(found.choice.offers)} workers, "
        f"bubble {found.bubble:.1%}\n"
    )
    text.append(
        f"cost     {_usd(found.usd_per_step)} a step, "
        f"{_usd(1000 * found.usd_per_step, 0)} for 1,000, "
        f"{_usd(found.usd_per_h)} an hour\n"
    )
    text.append(f"why      {found.why}")
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
    # The line says which workers pass versions on, unless all of them do.
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
        f"a chain {seconds(found.chain_s)}, at least {seconds(times.bound_s)} in any way; "
        f"T_bcast {seconds(found.demand.t_bcast_s)}"
        f"{only[found.relays]}"
        f"; the learner's host sends it {times.seed_copies:.1f} times{price}"
    )


def what_if_table(found: Forecast, cells: Sequence[WhatIf]) -> Table:
    """Usd per step and number of workers over S and kappa; the configured cell is bold."""
    kappas = sorted({cell.publish_every for cell in cells})
    table = Table(
        "usd a step (workers, bubble)",
        *(f"kappa = {kappa}" for kappa in kappas),
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    cheapest = min((cell.usd_per_step for cell in cells), default=None)
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
    style = ("bold " if here else "") + ("green" if cell.usd_per_step == cheapest else "")
    if cell.usd_per_step == float("inf"):
        return Text("-", style=style)
    waits = f", {cell.bubble:.0%}" if cell.bubble > BUSY else ""
    return Text(f"{cell.usd_per_step:.3f} ({cell.workers}{waits})", style=style)


def _usd(value: float, digits: int = 3) -> str:
    return f"{value:,.{digits}f} usd" if value < float("inf") else "unlimited usd"

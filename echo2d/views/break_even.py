"""Shows when rollouts on far-away workers are cheaper than in a data centre: in a sentence, and as a map."""

from pathlib import Path

from echo2d.plan.fleet.break_even import BreakEven

# ECHO-2 reports a saving of 33.3 to 36.3 %. The share of its rollouts is inferred from its ablation without
# cost-awareness (docs/measurements/capacity.md); the price ratio then follows from the saving.
PAPER_SAVING, PAPER_SHARE = 0.345, 0.66
POINTS = 201  # points of the map in each direction


def break_even_sentence(compared: BreakEven) -> str:
    """Says what a data centre would cost, and up to which prices this run is cheaper."""
    saving, least = compared.saving, compared.rollout_share_min
    turns = compared.synchronous_usd
    first = (
        f"a data centre takes {compared.centralized_usd:,.3f} usd a step"
        f"{'' if turns is None else f' ({turns:,.3f} if it generates and trains by turns)'}: this is {abs(saving):.1%} "
        f"{'cheaper' if saving >= 0 else 'more expensive'}; rollouts are {compared.rollout_share:.0%} of its "
        f"bill, and a trajectory here costs {compared.price_ratio:.2f} times what it costs there"
    )
    if compared.price_ratio_max <= 0:
        return f"{first}; no price would make this cheaper"
    share = "" if least is None else f"; at this price, if rollouts reach {least:.0%} of the bill"
    return (
        f"{first}; at this share, a run here is cheaper if a trajectory costs at most "
        f"{compared.price_ratio_max:.2f} times as much as there{share}"
    )


def draw_map(compared: BreakEven, path: Path) -> None:
    """Draw the saving over the rollouts' share and the price ratio, and mark this run and that of the paper."""
    # matplotlib is imported here because only this function needs it, and its import is slow.
    import numpy as np
    from matplotlib.figure import Figure

    shares, ratios = np.linspace(0.0, 1.0, POINTS), np.linspace(0.0, 1.5, POINTS)
    saving = [[100 * compared.saving_at(c, p) for c in shares] for p in ratios]
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    levels = list(range(-100, 101, 10))
    filled = axes.contourf(100 * shares, ratios, saving, levels, cmap="RdYlGn", extend="both")
    even = axes.contour(100 * shares, ratios, saving, [0.0], colors="black", linewidths=2)
    axes.clabel(even, fmt=lambda _: "costs as much as a data centre")
    lines = axes.contour(
        100 * shares, ratios, saving, [20, 40, 60, 80], colors="#444444", linewidths=0.6
    )
    axes.clabel(lines, fmt=lambda level: f"{level:.0f} %")
    axes.plot(
        100 * compared.rollout_share, compared.price_ratio, "o", color="#1f4e99", markersize=9,
        label=f"this run: {compared.saving:.0%}",
    )  # fmt: skip
    spent_longer = compared.longer * (1.0 - PAPER_SHARE)
    paper_ratio = (1.0 - (PAPER_SAVING + spent_longer) / PAPER_SHARE) / compared.margin
    axes.plot(
        100 * PAPER_SHARE, paper_ratio, "*", color="#1f4e99", markersize=13,
        label=f"ECHO-2's {PAPER_SAVING:.0%}; its place is inferred",
    )  # fmt: skip
    axes.set(
        xlabel="rollouts' share of the data centre's bill, %",
        ylabel="usd of a trajectory here, over that in the data centre",
    )
    axes.legend(loc="upper left")
    figure.colorbar(filled, label="saved of a step's bill, %")
    figure.savefig(path)

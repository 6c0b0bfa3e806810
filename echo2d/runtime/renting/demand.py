"""What the status of a run says about renting: what is short, who works, who still holds something. Decides nothing."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from echo2d.core.renting.budget import HOUR_S


def works(worker: Mapping[str, Any]) -> bool:
    """Or would, if it were asked."""
    return worker["alive"] and worker["serving"] is not None and not worker["leaving"]


def holds(worker: Mapping[str, Any]) -> bool:
    """Leases, or it would get some. What it says it runs are calls of the gateway, too."""
    return works(worker) or bool(worker["leased"]) or (worker["alive"] and worker["running"] > 0)


def shortfall_of(facts: Mapping[str, Any]) -> float | None:
    """Trajectories/s that all workers here lack of the target, as the activation loop has it; None: not known."""
    found: float | None = facts["provision"]["shortfall"]
    return found


def margin_of(facts: Mapping[str, Any]) -> float:
    """Trajectories/s that are there for noise: gamma's share of the target, as far as that can be short."""
    provision, short = facts["provision"], shortfall_of(facts)
    return (
        0.0 if short is None else (short + provision["mu_available"]) * (1 - 1 / provision["gamma"])
    )


def gb_per_h(facts: Mapping[str, Any]) -> float:
    """Of versions, to each worker; 0 until a few are known."""
    sizes, steps = (
        [each["wire_bytes"] for each in facts["version_bytes"].values()],
        facts["t_train_s"],
    )
    if not sizes or not steps or median(steps) <= 0:
        return 0.0
    period_s: float = facts["publish_every"] * median(steps)
    return float(median(sizes)) / 1e9 * HOUR_S / period_s

"""The fleet of a running coordinator, by its status: what `echo2d plan --live` plans with.

Measured: T_train, T_bcast (which takes the place of a prediction), for how much of it workers stop, the pause of a
refit, a trajectory's time, bytes on the wire, mu_i, uplinks. As the run's config says: S, kappa, R, prices,
availability. Downlinks are not measured; as T_bcast is, nothing depends on them but the shapes shown beside it.
"""

from collections.abc import Mapping
from typing import Any

from echo2d.core.capacity.model import share_of_bcast
from echo2d.errors import OperatorFault
from echo2d.sim.fleet.spec import FleetSpec, read_fleet
from echo2d.sim.kernel.scenario import MBIT

UPLINK_MBPS = 100.0  # of who has not sent enough to be measured


def fleet_of(status: Mapping[str, Any]) -> FleetSpec:
    """OperatorFault: it has not measured what a plan needs."""
    measured = status["provision"]["estimates"]
    missing = [name for name in ("t_train_s", "t_bcast_s", "wire_bytes") if measured[name] is None]
    workers = [worker for worker in status["workers"] if _counts(worker)]
    if missing or not workers:
        lacks = ", ".join(missing or ["mu of any worker"])
        raise OperatorFault(
            f"this run has not measured {lacks} yet: a plan needs a few train steps and publishes"
        )
    provision = status["provision"]
    return read_fleet(
        {
            "learner": {
                "t_train_s": _value(measured, "t_train_s"),
                "trajectories_per_step": status["trajectories_per_step"],
                "staleness_max": status["staleness_max"],
                "publish_every": status["publish_every"],
                "uplink_mbps": _mbps(status["seed_uplink"]),
                "usd_per_h": provision["learner_usd_per_h"],
            },
            "model": {"params": _value(measured, "wire_bytes"), "bytes_per_param": 1},
            "fleet": [_kind(worker) for worker in workers],
            "policy": {
                "gamma": provision["gamma"],
                "mode": provision["mode"],
                "pause_s": _value(measured, "refit_pause_s"),
                "t_gen_s": _value(measured, "t_gen_s"),
                "t_bcast_s": _value(measured, "t_bcast_s"),
                "still_share": share_of_bcast(
                    _seconds(measured, "still_s"), _value(measured, "t_bcast_s")
                ),
            },
            "simulate": {"group_size": status["group_size"]},
        }
    )


def _counts(worker: Mapping[str, Any]) -> bool:
    """It is here to stay, and serves a version."""
    return (
        worker["state"] == "joined"
        and not worker["leaving"]
        and worker["serving"] is not None
        and bool(worker["mu"])
    )


def _kind(worker: Mapping[str, Any]) -> dict[str, Any]:
    """Each worker is a kind of its own; two may bear the same name."""
    priced = ("usd_per_h", "usd_per_gb_down", "usd_per_gb_up", "availability")
    return {
        "name": f"{worker['name']} {worker['id'][:8]}",
        "trajectories_per_h": 3600.0 * worker["mu"],
        "uplink_mbps": _mbps(worker["uplink"]),
        **{key: worker[key] for key in priced},
    }


def _value(measured: Mapping[str, Any], name: str) -> float:
    return _seconds(measured, name) or 0.0


def _seconds(measured: Mapping[str, Any], name: str) -> float | None:
    return None if measured[name] is None else float(measured[name]["value"])


def _mbps(uplink: float | None) -> float:
    return UPLINK_MBPS if not uplink else uplink / MBIT

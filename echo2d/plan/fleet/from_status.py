"""Makes a fleet from a running coordinator's status: `echo2d plan --live` plans with it.

The run has measured T_train, T_bcast (which replaces the prediction), the share of T_bcast for which workers stop, the
pause of a refit, a trajectory's time, bytes on the wire, mu of each worker, uplinks, and the spread of lengths. Its
configuration gives S, kappa, R and prices. Downlinks are not measured. They matter only for the times of the broadcast
shapes that are shown beside the measured T_bcast.
"""

from typing import Any

from echo2d.core.capacity.model import share_of_bcast
from echo2d.core.status.schema import EstimateStatus, Status, WorkerStatus
from echo2d.errors import OperatorFault
from echo2d.plan.fleet.spec import GEN_SIGMA_MAX, FleetSpec, read_fleet
from echo2d.plan.kernel.scenario import MBIT


def fleet_of(status: Status) -> FleetSpec:
    """The fleet of this status. OperatorFault: the run has not measured what a plan needs."""
    provision, measured = status.provision, status.provision.estimates
    needed = {
        "t_train_s": measured.t_train_s,
        "t_bcast_s": measured.t_bcast_s,
        "wire_bytes": measured.wire_bytes,
    }
    missing = [name for name, estimate in needed.items() if estimate is None]
    workers = [worker for worker in status.workers if _counts(worker)]
    if missing or not workers:
        lacks = ", ".join(missing or ["mu of any worker"])
        raise OperatorFault(
            f"this run has not measured {lacks} yet: a plan needs a few train steps and publishes"
        )
    still_s = None if measured.still_s is None else measured.still_s.value
    return read_fleet(
        {
            "learner": {
                "t_train_s": _value(measured.t_train_s),
                "trajectories_per_step": status.trajectories_per_step,
                "staleness_max": status.staleness_max,
                "publish_every": status.publish_every,
                "uplink_mbps": _mbps(status.seed_uplink),
                "usd_per_h": provision.learner_usd_per_h,
                "usd_per_gb_up": status.seed_usd_per_gb_up,
            },
            "model": {"params": _value(measured.wire_bytes), "bytes_per_param": 1},
            "fleet": [_kind(worker) for worker in workers],
            "policy": {
                "gamma": provision.gamma,
                "mode": provision.mode,
                "pause_s": _value(measured.refit_pause_s),
                "recompute_s": _value(measured.recompute_s),
                "t_gen_s": _value(measured.t_gen_s),
                "t_bcast_s": _value(measured.t_bcast_s),
                "still_share": share_of_bcast(still_s, _value(measured.t_bcast_s)),
            },
            "simulate": {"group_size": status.group_size, **_sigma(provision.gen_sigma)},
        }
    )


def _counts(worker: WorkerStatus) -> bool:
    """Whether the worker has joined, is not leaving, serves a version, and has a rate."""
    return (
        worker.state == "joined"
        and not worker.leaving
        and worker.serving is not None
        and bool(worker.mu)
    )


def _kind(worker: WorkerStatus) -> dict[str, Any]:
    """A kind that has only this worker. The kind's name contains the worker's id, because two workers may have the
    same name.
    """
    return {
        "name": f"{worker.name} {worker.id[:8]}",
        "trajectories_per_h": 3600.0 * (worker.mu or 0.0),
        "slots": worker.slots,
        "uplink_mbps": _mbps(worker.uplink),
        "usd_per_h": worker.usd_per_h,
        "usd_per_gb_down": worker.usd_per_gb_down,
        "usd_per_gb_up": worker.usd_per_gb_up,
    }


def _sigma(measured: float | None) -> dict[str, float]:
    return {} if measured is None else {"gen_sigma": min(measured, GEN_SIGMA_MAX)}


def _value(estimate: EstimateStatus | None) -> float:
    return 0.0 if estimate is None else estimate.value


def _mbps(uplink: float | None) -> float:
    # A peer that has not sent enough to be measured is assumed to have 100 Mbit/s.
    return 100.0 if not uplink else uplink / MBIT

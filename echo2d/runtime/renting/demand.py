"""What a run's status says about its need for boxes: what is short, and which workers are in use.

It reads a `Status` and decides nothing.
"""

from statistics import median

from echo2d.core.renting.budget import HOUR_S
from echo2d.core.status.schema import ProvisionStatus, Status, WorkerStatus


def works(worker: WorkerStatus) -> bool:
    """The worker generates, or would if it got leases."""
    return (
        worker.alive and worker.serving is not None and not worker.leaving and not worker.cordoned
    )


def holds(worker: WorkerStatus) -> bool:
    """The worker has something to finish, or would get it. `running` also counts gateway calls."""
    return works(worker) or bool(worker.leased) or (worker.alive and worker.running > 0)


def margin_of(provision: ProvisionStatus) -> float:
    """The part of the target in trajectories/s that gamma adds for noise.

    The target is what all workers make and what they lack of it, so where the shortfall is cut off
    (`CapacityPlanner.shortfall`) the margin is smaller, too.
    """
    if provision.shortfall is None:
        return 0.0
    return (provision.shortfall + provision.mu_available) * (1 - 1 / provision.gamma)


def gb_per_h(status: Status) -> float:
    """The versions that each worker receives, in GB/h; 0 before steps and versions are known."""
    sizes = [each.wire_bytes for each in status.version_bytes.values()]
    steps = status.t_train_s
    if not sizes or not steps or median(steps) <= 0:
        return 0.0
    period_s = status.publish_every * median(steps)
    return median(sizes) / 1e9 * HOUR_S / period_s

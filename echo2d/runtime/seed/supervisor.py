"""What the seed, a child process of the coordinator, is told; and keeping one seed running."""

import random
from dataclasses import dataclass

from echo2d.config.limits import DISK_BYTES_MAX
from echo2d.runtime.process.child import Handover, supervise

SEED_MODULE = "echo2d.runtime.seed.main"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedHandover(Handover):
    """What the coordinator tells its seed.

    link_host, link_port: where it listens for peers. uplink_limit: bytes/s that it sends to them at
    most, all together; None: no limit.
    """

    link_host: str
    link_port: int
    disk_bytes_max: int = DISK_BYTES_MAX
    uplink_limit: int | None = None


async def supervise_seed(handover: SeedHandover, *, rng: random.Random) -> None:
    """Keep one seed running until cancelled."""
    await supervise(SEED_MODULE, handover, rng=rng, mistakes_end=False)

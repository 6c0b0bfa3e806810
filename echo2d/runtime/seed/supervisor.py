"""Keeps one seed running, a child process of the coordinator, and gives it its settings."""

import random
from dataclasses import dataclass

from echo2d.config.limits import DISK_BYTES_MAX
from echo2d.runtime.process.child import Handover, supervise

SEED_MODULE = "echo2d.runtime.seed.main"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedHandover(Handover):
    """The settings that the coordinator gives its seed."""

    link_host: str  # the seed listens for peers at this address and port
    link_port: int
    disk_bytes_max: int = DISK_BYTES_MAX
    # The most bytes/s that it sends to all peers together. None: no limit.
    uplink_limit: int | None = None


async def supervise_seed(handover: SeedHandover, *, rng: random.Random) -> None:
    """Keep one seed running until cancelled."""
    await supervise(SEED_MODULE, handover, rng=rng, mistakes_end=False)

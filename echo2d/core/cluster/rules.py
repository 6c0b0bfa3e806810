"""The numbers that the operator chose for a run, as the core reads them."""

from dataclasses import dataclass
from typing import Literal

from echo2d.core.base.ids import RunId
from echo2d.core.capacity.model import GAMMA, DisseminationMode
from echo2d.core.capacity.prices import NamedPrice


@dataclass(frozen=True, slots=True)
class GatewayRules:
    """share: of all slots, at most (one in any case). wait_s: for a slot; who waited longer is refused."""

    share: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class RunRules:
    """The numbers the operator chose. R = trajectories_per_step, kappa = publish_every, S = staleness_max."""

    run_id: RunId
    staleness_max: int
    publish_every: int | None  # None: "auto"
    trajectories_per_step: int
    group_size: int
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    over_stale: str  # "drop" | "mask"
    filter_zero_variance: bool
    shape: str  # a name in `registry.SHAPES`
    chains: int
    mode: DisseminationMode = (
        "background"  # "exclusive": a worker generates nothing while a version is on its way to it
    )
    p2p: bool = True  # workers pass versions on
    activation: Literal["all", "auto"] = (
        "all"  # who gets leases: everybody, or the cheapest that are enough
    )
    by_cost: bool = True  # or in any order
    gamma: float = GAMMA  # throughput that is provided, over what is needed
    prices: tuple[NamedPrice, ...] = ()
    learner_usd_per_h: float = 0.0  # shown, decides nothing
    delta: bool = True  # versions spread as differences from one that most workers have
    disk_bytes_max: int = 1 << 62  # that copies of versions may take; past it bases go
    lease_silence_s: float = 15.0
    heartbeat_s: float = 2.0
    gateway: GatewayRules | None = None  # None: it is off

"""Fleets from TOML files: one learner, its model, the workers that are available, and how the run uses them.

    [learner]                    # R, S and kappa; the host's uplink, and what an hour of it costs
    t_train_s = 100
    trajectories_per_step = 256
    staleness_max = 4
    publish_every = "auto"       # or a number
    uplink_mbps = 1000
    usd_per_h = 12               # also usd_per_gb_up: what the host's traffic costs
    [model]
    params = 8e9
    bytes_per_param = 2
    wire_fraction = 0.02         # bytes on the wire over bytes of the snapshot; 1: no deltas
    [[fleet]]                    # `count` equal workers; rates are those of one
    name = "4090"
    count = 20
    trajectories_per_h = 360
    usd_per_h = 0.4
    uplink_mbps = 100
    downlink_mbps = 400
    rtt_ms = 60                  # to a worker of the same kind
    usd_per_gb_down = 0.0        # also usd_per_gb_up, availability (share of the time that a worker is present)
    [policy]
    gamma = 1.1
    mode = "background"          # or "exclusive", in which workers stop for still_share of T_bcast
    pause_s = 5                  # of a refit; recompute_s: to compute KV caches again after it
    t_gen_s = 60                 # seconds that one trajectory takes
    [centralized]                # optional, to compare: the same training with its rollouts in one data centre
    step_s = 200
    usd_per_h = 24
    [simulate]                   # only for `echo2d simulate`, as are stay_h, notice_s, ... of a fleet
    hours = 24
    gen_sigma = 0.5

Anything wrong is an OperatorFault that names the key.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from echo2d.config.coordinator import LinkTable
from echo2d.config.tables import read_table, read_toml, table_of, with_settings
from echo2d.core.capacity.pipeline import lengths_of
from echo2d.core.cluster.membership import SLOTS_MAX
from echo2d.core.rules.prices import USD_MAX, PriceTable
from echo2d.core.rules.run import (
    ActivationTable,
    DisseminationMode,
    DisseminationTable,
    PolicyTable,
)
from echo2d.core.rules.table import Table, key, same_key
from echo2d.errors import OperatorFault

# In all fleets together. A coordinator keeps the rates of at most this many workers.
_WORKERS_MAX = 4096
MBPS_MAX = 1e7  # 10 Tbit/s: practically no limit
GEN_SIGMA_MAX = 2.0
_SECONDS_MAX = 1e6  # 11 days: a longer train step is a mistake in the unit


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTable(Table):
    TABLE: ClassVar[str] = "learner"

    t_train_s: float = key("seconds of a train step, net of waiting", above=0.0, high=_SECONDS_MAX)
    trajectories_per_step: int = same_key(PolicyTable, "trajectories_per_step", default=MISSING)
    staleness_max: int = same_key(PolicyTable, "staleness_max", default=MISSING)
    publish_every: int | Literal["auto"] = same_key(PolicyTable, "publish_every")
    uplink_mbps: float = key("uplink of the learner's host, Mbit/s", above=0.0, high=MBPS_MAX)
    usd_per_h: float = same_key(ActivationTable, "learner_usd_per_h")
    usd_per_gb_up: float = same_key(LinkTable, "usd_per_gb_up")
    stay_h: float = key(
        "hours until the learner's host is taken away, on average; 0: never", 0.0, low=0.0
    )
    notice_s: float = key(
        "seconds of notice before the host is taken; 0: no notice", 0.0, low=0.0, high=_SECONDS_MAX
    )
    restart_s: float = key(
        "seconds until the learner trains again on another host", 0.0, low=0.0, high=_SECONDS_MAX
    )
    checkpoint_every: int = key("train steps", 1, low=1, high=1 << 20)
    checkpoint_s: float = key(
        "seconds for which a checkpoint holds up training", 0.0, low=0.0, high=_SECONDS_MAX
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable(Table):
    TABLE: ClassVar[str] = "model"

    params: float = key("parameters", above=0.0, high=1e14)
    bytes_per_param: float = key("bytes of one parameter in a snapshot", 2.0, above=0.0, high=8.0)
    wire_fraction: float = key(
        "bytes on the wire over bytes of the snapshot", 1.0, above=0.0, high=1.0
    )
    trajectory_bytes: float = key(
        "bytes that a worker sends for a trajectory: 8 for each token, and the bytes of its columns",
        0.0,
        low=0.0,
        high=1e9,
    )

    def wire_bytes(self, *, delta: bool = True) -> int:
        return max(
            1, round(self.params * self.bytes_per_param * (self.wire_fraction if delta else 1.0))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersTable(Table):
    TABLE: ClassVar[str] = "fleet"

    name: str = key("name of this kind of worker")
    count: int = key("workers of this kind", 1, low=1, high=_WORKERS_MAX)
    # A larger number is a mistake of the operator.
    trajectories_per_h: float = key(
        "accepted trajectories per hour of one worker", low=0.0, high=1e9
    )
    slots: int = key(
        "samples that one worker generates at once; 0: as many as make trajectories_per_h at t_gen_s each",
        0,
        low=0,
        high=SLOTS_MAX,
    )
    usd_per_h: float = same_key(PriceTable, "usd_per_h")
    uplink_mbps: float = key("Mbit/s", 100.0, above=0.0, high=MBPS_MAX)
    downlink_mbps: float = key("Mbit/s", 1000.0, above=0.0, high=MBPS_MAX)
    rtt_ms: float = key("round-trip milliseconds to an equal worker", 50.0, low=0.0, high=10_000.0)
    usd_per_gb_down: float = same_key(PriceTable, "usd_per_gb_down")
    usd_per_gb_up: float = same_key(PriceTable, "usd_per_gb_up")
    availability: float = key("share of the time a worker is present", 1.0, above=0.0, high=1.0)
    stay_h: float = key(
        "hours that a worker stays on average; then it is away as long as availability says; 0: it always stays",
        0.0,
        low=0.0,
    )
    notice_s: float = key(
        "seconds of notice before a worker leaves; 0: it falls silent",
        0.0,
        low=0.0,
        high=_SECONDS_MAX,
    )
    speed_sigma: float = key("spread of worker speeds (of the logarithm)", 0.0, low=0.0, high=2.0)
    price_sigma: float = key(
        "spread of the change of the price in an hour (of the logarithm)", 0.0, low=0.0, high=1.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicyTable(Table):
    TABLE: ClassVar[str] = "policy"

    gamma: float = same_key(ActivationTable, "gamma")
    mode: DisseminationMode = same_key(DisseminationTable, "mode")
    pause_s: float = key(
        "seconds of a refit in which a worker generates nothing", 0.0, low=0.0, high=_SECONDS_MAX
    )
    recompute_s: float = key(
        "seconds in which KV caches are computed again after a refit",
        0.0,
        low=0.0,
        high=_SECONDS_MAX,
    )
    t_gen_s: float = key(
        "seconds that a trajectory takes, from lease to result", 0.0, low=0.0, high=_SECONDS_MAX
    )
    move_stragglers: bool = same_key(PolicyTable, "move_stragglers")
    group_patience: float = same_key(PolicyTable, "group_patience")
    # The limit is 0.8 because a run drops at most four of five groups (`core/work/training/contrast`).
    no_variance: float = key(
        "share of the groups that are dropped because all their rewards are the same",
        0.0,
        low=0.0,
        high=0.8,
    )
    t_bcast_s: float = key(
        "measured seconds from a publish until all workers serve it; 0: predict it",
        0.0,
        low=0.0,
        high=_SECONDS_MAX,
    )
    still_share: float = key(
        "share of T_bcast for which a worker stops in exclusive mode", 1.0, low=0.0, high=1.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralizedTable(Table):
    """The data centre with which the fleet is compared."""

    TABLE: ClassVar[str] = "centralized"

    step_s: float = key("seconds of a train step, rollouts included", above=0.0, high=_SECONDS_MAX)
    usd_per_h: float = key("usd per hour of all machines, learner included", low=0.0, high=USD_MAX)
    learner_usd_per_h: float | None = key(
        "usd per hour of the learner's machines among them; without this key: as much as here",
        None,
        low=0.0,
        high=USD_MAX,
    )
    synchronous_step_s: float | None = key(
        "seconds of a step if the same machines generate and train by turns",
        None,
        above=0.0,
        high=_SECONDS_MAX,
    )

    @property
    def usd_per_step(self) -> float:
        return self.usd_per_h * self.step_s / 3600.0

    @property
    def synchronous_usd_per_step(self) -> float | None:
        """Usd of a step if the same machines generate and train by turns; None: the file gives no time for it."""
        step_s = self.synchronous_step_s
        return None if step_s is None else self.usd_per_h * step_s / 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateTable(Table):
    """What only `simulate` needs."""

    TABLE: ClassVar[str] = "simulate"

    # At most a year.
    hours: float = key("hours of virtual time", 24.0, above=0.0, high=24.0 * 365)
    group_size: int = same_key(PolicyTable, "group_size")
    gen_sigma: float = key(
        "long tail of generation times (of the logarithm)", 0.5, low=0.0, high=GEN_SIGMA_MAX
    )
    prompt_share: float = key(
        "share of that variance that belongs to the prompt, whose samples are all long or all short",
        0.0,
        low=0.0,
        high=1.0,
    )
    turns: int = key("turns of an episode; 1: there is no environment", 1, low=1, high=1024)
    tool_s: float = key(
        "mean seconds between two turns, in which an episode holds no slot",
        0.0,
        low=0.0,
        high=_SECONDS_MAX,
    )
    tool_sigma: float = key("long tail of these times (of the logarithm)", 1.0, low=0.0, high=2.0)
    migrate: bool = key(
        "another worker continues the unfinished samples of a lost worker, as in a run", True
    )
    train_sigma: float = key("spread of train steps (of the logarithm)", 0.05, low=0.0, high=1.0)
    rng_seed: int = key("seed of all random numbers", 0, low=0)


TABLES: tuple[type[Table], ...] = (
    LearnerTable, ModelTable, WorkersTable, FleetPolicyTable, CentralizedTable, SimulateTable,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """One file."""

    learner: LearnerTable
    model: ModelTable
    workers: tuple[WorkersTable, ...]
    policy: FleetPolicyTable
    simulate: SimulateTable
    centralized: CentralizedTable | None = None

    def __post_init__(self) -> None:
        kappa, kappa_max = self.learner.publish_every, self.learner.staleness_max + 1
        if kappa != "auto" and kappa > kappa_max:
            raise OperatorFault(
                f"learner.publish_every: expected 1 to {kappa_max} (staleness_max + 1; a larger value deadlocks); "
                f"found {kappa}"
            )
        if self.learner.trajectories_per_step % self.simulate.group_size:
            raise OperatorFault(
                f"simulate.group_size: expected a divisor of trajectories_per_step = "
                f"{self.learner.trajectories_per_step}; found {self.simulate.group_size}"
            )
        names = [kind.name for kind in self.workers]
        if not names:
            raise OperatorFault("[[fleet]]: expected at least one")
        if len(set(names)) < len(names):
            raise OperatorFault(f"fleet.name: expected different ones; found {', '.join(names)}")
        if sum(kind.count for kind in self.workers) > _WORKERS_MAX:
            raise OperatorFault(f"fleet.count: expected at most {_WORKERS_MAX} workers in all")
        for kind in self.workers:
            sent_mbps = kind.trajectories_per_h * self.model.trajectory_bytes * 8 / 3.6e9
            if sent_mbps > kind.uplink_mbps:
                raise OperatorFault(
                    f"model.trajectory_bytes: the trajectories of one {kind.name} take {sent_mbps:.3g} Mbit/s; its "
                    f"uplink has {kind.uplink_mbps:g}"
                )

    def usd_per_h(self, kind: WorkersTable) -> float:
        """Usd per hour for one worker, with what it pays to send its trajectories."""
        sent_gb = kind.trajectories_per_h * self.model.trajectory_bytes / 1e9
        return kind.usd_per_h + sent_gb * kind.usd_per_gb_up

    @property
    def lengths(self) -> tuple[float, ...]:
        """Lengths of samples, over their mean, group after group."""
        table = self.simulate
        return lengths_of(table.gen_sigma, table.group_size, table.prompt_share)

    def slots(self, kind: WorkersTable) -> int:
        """Slots of one worker. Default: as many as make its trajectories per hour, at t_gen_s each."""
        return kind.slots or max(1, round(kind.trajectories_per_h / 3600.0 * self.policy.t_gen_s))


def is_fleet(path: Path) -> bool:
    """Whether the file describes a fleet, and not a broadcast (`scenario_file`)."""
    return "fleet" in read_toml(path)


def load_fleet(path: Path, settings: Iterable[str] = ()) -> FleetSpec:
    """Read a fleet. settings: TABLE.KEY=VALUE, which override the file. OperatorFault: the file is no fleet."""
    try:
        return read_fleet(with_settings(read_toml(path), settings))
    except OperatorFault as fault:
        raise OperatorFault(f"{path}: {fault}") from fault


def read_fleet(document: Mapping[str, Any]) -> FleetSpec:
    """The fleet of a parsed file."""
    tables = [table.TABLE for table in TABLES]
    for name in document:
        if name not in tables:
            raise OperatorFault(f"[{name}]: unknown table; expected {', '.join(tables)}")
    kinds = document.get("fleet", [])
    if not isinstance(kinds, list) or not all(isinstance(kind, dict) for kind in kinds):
        raise OperatorFault("[[fleet]]: expected tables with double brackets")
    return FleetSpec(
        read_table(LearnerTable, table_of(document, "learner")),
        read_table(ModelTable, table_of(document, "model")),
        tuple(read_table(WorkersTable, kind) for kind in kinds),
        read_table(FleetPolicyTable, table_of(document, "policy")),
        read_table(
            SimulateTable, {"group_size": _divisor(document), **table_of(document, "simulate")}
        ),
        read_table(CentralizedTable, table_of(document, "centralized"))
        if "centralized" in document
        else None,
    )


def _divisor(document: Mapping[str, Any]) -> int:
    """The default of group_size: the largest usual size that divides R."""
    per_step = table_of(document, "learner").get("trajectories_per_step", 8)
    return next(
        (size for size in (8, 4, 2) if isinstance(per_step, int) and per_step % size == 0), 1
    )

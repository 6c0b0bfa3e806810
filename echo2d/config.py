"""What the operator chose: TOML tables and a few flags, read into one frozen, checked object per process.

Every key stands in one place here, with its default, unit and sentence; `print_config` shows them all. One file may
serve all programs of a host: each reads its own tables and ignores those of the others.
"""

import ipaddress
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from echo2d.config_renting import ProviderConfig, RentTable, print_providers, read_providers
from echo2d.config_tables import Table, key, print_tables, read_toml, table_of
from echo2d.errors import OperatorFault
from echo2d.quantities import parse_rate
from echo2d.registry import ENGINES, SHAPES
from echo2d.sd_notify import Notifier

STALENESS_MAX = 64  # more is off-policy training by another name, and buffers grow with it
TRAJECTORIES_PER_STEP_MAX = 16384  # what a batch body of 1 GiB holds at 8k tokens
NEW_TOKENS_MAX = 131072  # with logprobs 1 MiB on the control link, well below a message's 4 MiB
PORT_MAX = 65535
DISK_BYTES_MAX = 256 << 30  # frames of four versions and two snapshots of a model of 50 GB
ENGINES_MAX = 16  # GPUs of the largest boxes
USD_MAX = 1e6  # an hour, or 10^9 bytes: a mistake
PRICES_MAX = 256  # kinds of workers; each worker's name is compared with all of them
UPLINK_LIMIT_MIN = 125e3  # bytes/s, 1mbit: with less, a frame takes seconds

OTHER_TABLES = frozenset({"learner", "worker", "provider"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable(Table):
    TABLE: ClassVar[str] = "run"

    run_dir: Path = key("this run's key, tokens, ledger and versions (made with mode 0700)")
    snapshot_root: Path = key("the learner publishes only directories inside this one")
    base_model: Path | None = key(
        "model directory that tells the vocabulary size, and whose adapters are taken", None
    )
    disk_bytes_max: int = key(
        "bytes of versions and uploads here, and as many of frames", DISK_BYTES_MAX, low=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTable(Table):
    TABLE: ClassVar[str] = "coordinator"

    host: str = key("address the API and the control links listen on", "127.0.0.1")
    port: int = key(
        "TCP port of both; 0: any free one (see coordinator.json in run_dir)",
        7700,
        low=0,
        high=PORT_MAX,
    )
    tls: Literal["auto", "on", "off"] = key(
        "on all connections; auto: if host or link.host is not loopback", "auto"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTable(Table):
    TABLE: ClassVar[str] = "policy"

    staleness_max: int = key(
        "S: oldest data allowed in a gradient, in train steps", 2, low=0, high=STALENESS_MAX
    )
    publish_every: int | Literal["auto"] = key(
        'kappa: train steps per publish, 1 to S + 1, or "auto"', "auto", low=1
    )
    trajectories_per_step: int = key(
        "R: trajectories per train step", 64, low=1, high=TRAJECTORIES_PER_STEP_MAX
    )
    group_size: int = key(
        "trajectories per prompt; divides trajectories_per_step", 8, low=1, high=1024
    )
    over_stale: Literal["drop", "mask"] = key("what happens to tokens beyond S", "drop")
    filter_zero_variance: bool = key("replace groups whose rewards are all equal", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTable(Table):
    TABLE: ClassVar[str] = "sampling"

    max_new_tokens: int = key("output tokens per trajectory", 1024, low=1, high=NEW_TOKENS_MAX)
    temperature: float = key("of the sampling distribution", 1.0, above=0.0, high=10.0)
    top_p: float = key("nucleus; 1.0 samples from the full vocabulary", 1.0, above=0.0, high=1.0)
    vocab_size: int = key(
        "token ids are below this; 0: read it from run.base_model", 0, low=0, high=1 << 24
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable(Table):
    TABLE: ClassVar[str] = "task"

    name: str = key("which task: a module of echo2d.tasks, or package.module:Class")
    options: dict[str, Any] = key("keyword arguments of the task", dict)
    processes: int = key("processes that draw prompts and compute rewards", 2, low=1, high=256)
    timeout_s: float = key("seconds one prompt or reward may take", 10.0, above=0.0, high=3600.0)
    network: bool = key(
        "whether the task may use the network (always, unless the coordinator runs as root)", False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DisseminationTable(Table):
    TABLE: ClassVar[str] = "dissemination"

    shape: str = key("how versions spread; auto: relay trees by uplink", "auto", choices=SHAPES)
    chains: int = key("stripes of the chain shape", 1, low=1, high=16)
    mode: Literal["background", "exclusive"] = key(
        "whether workers generate while a version comes (background), or stop for it (exclusive, as in ECHO-2)",
        "background",
    )
    p2p: bool = key(
        "workers pass versions on; false: this host sends every version to every worker, to compare",
        True,
    )
    delta: bool = key(
        "send what differs from a version that most workers have; false: versions in full, always",
        True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTable(Table):
    TABLE: ClassVar[str] = "activation"

    mode: Literal["all", "auto"] = key(
        "who gets leases: all workers, or (auto) the cheapest that keep the learner busy; the others stand by",
        "all",
    )
    by_cost: bool = key(
        "take the cheapest; false: in an order that has nothing to do with prices, to compare", True
    )
    gamma: float = key(
        "throughput that is provided, over what the learner needs", 1.1, low=1.0, high=10.0
    )
    learner_usd_per_h: float = key(
        "of the learner's host, for `echo2d plan --live`", 0.0, low=0.0, high=USD_MAX
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable(Table):
    """One [[price]]: of several, the first whose pattern fits a worker's name counts."""

    TABLE: ClassVar[str] = "price"

    workers: str = key('names that it is of, such as "spot-*"')
    usd_per_h: float = key("of one worker", 0.0, low=0.0, high=USD_MAX)
    usd_per_gb_down: float = key("usd per 10^9 bytes that it receives", 0.0, low=0.0, high=USD_MAX)
    usd_per_gb_up: float = key("usd per 10^9 bytes that it sends", 0.0, low=0.0, high=USD_MAX)
    availability: float = key("share of the time that it is there", 1.0, above=0.0, high=1.0)
    trajectories_per_h: float = key(
        "expected of one until it is measured; 0: as much as the others", 0.0, low=0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable(Table):
    TABLE: ClassVar[str] = "link"

    host: str = key("address the seed's peer listener binds", "127.0.0.1")
    port: int = key(
        "TCP port of the seed's peer listener; 0: any free one", 0, low=0, high=PORT_MAX
    )
    peer_networks: tuple[str, ...] = key(
        "addresses or networks (10.8.0.0/16) that peers may announce besides the one their control link comes from",
        (),
    )

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """Of `peer_networks`. OperatorFault: one is none."""
        try:
            return tuple(map(ipaddress.ip_network, self.peer_networks))
        except ValueError as error:
            raise OperatorFault(
                f"link.peer_networks: expected addresses or networks; {error}"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayTable(Table):
    TABLE: ClassVar[str] = "gateway"

    enabled: bool = key(
        "serve the policy to holders of a gateway token, as OpenAI's API (docs/gateway.md)", False
    )
    share: float = key(
        "of all slots that calls may hold at once; one in any case", 0.1, above=0.0, high=1.0
    )
    wait_s: float = key("seconds that a call may wait for a slot", 60.0, above=0.0, high=3600.0)
    model: str = key("what the policy is called there", "policy")
    max_new_tokens: int = key("output tokens per choice at most", 4096, low=1, high=NEW_TOKENS_MAX)
    chat_template: Path | None = key("jinja file that takes the place of the snapshot's", None)
    record_bytes_max: int = key(
        "bytes of records (run_dir/gateway.jsonl); 0: keep none", 256 << 20, low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(Table):
    """Everything `echo2d join` needs: the [worker] table and flags."""

    TABLE: ClassVar[str] = "worker"

    url: str = key("the coordinator, https://HOST:PORT; http:// means no TLS")
    token_file: Path = key("made by `echo2d token create NAME --role worker`")
    state_dir: Path = key("where this worker keeps its key, frames and snapshots")
    disk_bytes_max: int = key(
        "bytes of frames and snapshots here; older frames make room", DISK_BYTES_MAX, low=1
    )
    base_model: Path | None = key(
        "model directory here; what it holds is not fetched, and adapters need it", None
    )
    name: str = key("shown by status; empty: the host's name", "")
    engine: str = key("what generates", "torch", choices=ENGINES)
    engine_python: Path | None = key(
        "of the environment that SGLang is in; its servers are started here", None
    )
    engine_args: str = key(
        "flags for the SGLang servers that are started, as on a command line", ""
    )
    engine_url: str = key(
        "SGLang servers that run, one per engine, with commas; empty: they are started here", ""
    )
    engine_key_file: Path | None = key(
        "file with the API key of those, then their admin key, a line each", None
    )
    refit_mode: Literal["retract", "abort", "in_place"] = key(
        "how SGLang pauses (docs/sglang.md)", "retract"
    )
    engines: int = key(
        "engines of this worker, one per GPU; they share one download", 1, low=1, high=ENGINES_MAX
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "of the torch engine; auto: by device", "auto"
    )
    device: str = key(
        "of the torch engines: auto, cpu, cuda (several: one each from cuda:0 on) or cuda:N", "auto"
    )
    slots: int = key("samples each engine runs at once", 16, low=1, high=4096)
    tokens_per_s_max: float = key(
        "tokens per second at most, all engines together; 0: no limit", 0.0, low=0.0
    )
    threads: int = key(
        "CPU threads of all torch engines together; 0: torch decides", 0, low=0, high=1024
    )
    relay_only: bool = key("forward versions, generate nothing", False)
    receive_only: bool = key("pass no version on to other workers", False)
    usd_per_h: float = key(
        "what this worker costs, where the run says nothing of it", 0.0, low=0.0, high=USD_MAX
    )
    uplink_limit: str = key(
        "what is sent to other workers at most, such as 50mbit; empty: no limit", ""
    )
    listen_host: str = key("address the peer listener binds", "127.0.0.1")
    listen_port: int = key(
        "TCP port of the peer listener; 0: any free one", 0, low=0, high=PORT_MAX
    )
    advertise: str = key(
        "HOST:PORT where others reach it, in numbers (:PORT: at its public address); empty: there",
        "",
    )
    no_tls: bool = key("allow addresses other than loopback although the URL is http://", False)
    metrics_port: int = key(
        "serve Prometheus metrics on 127.0.0.1; 0: do not", 0, low=0, high=PORT_MAX
    )

    def __post_init__(self) -> None:
        Table.__post_init__(self)
        if self.relay_only and self.receive_only:
            raise OperatorFault(
                "worker.receive_only: of a worker with relay_only nobody would have anything"
            )
        _ = self.uplink_bytes_per_s_max, self.announced  # or a fault

    @property
    def uplink_bytes_per_s_max(self) -> int | None:
        """Of `uplink_limit`; None: no limit."""
        rate = parse_rate(self.uplink_limit) if self.uplink_limit else None
        if rate is not None and rate < UPLINK_LIMIT_MIN:
            raise OperatorFault(
                f"worker.uplink_limit: expected at least 1mbit, or receive_only; found {self.uplink_limit!r}"
            )
        return None if rate is None else int(rate)

    @property
    def announced(self) -> tuple[str, int] | None:
        """Host and port of `advertise`; None: what it listens on."""
        if not self.advertise:
            return None
        host, _, port = self.advertise.rpartition(":")
        with suppress(ValueError):
            found = ipaddress.ip_address(host.strip("[]") or "0.0.0.0")  # noqa: S104 - said, not bound
            if 0 < int(port) <= PORT_MAX:
                return str(found), int(port)
        raise OperatorFault(
            f"worker.advertise: expected HOST:PORT in numbers, or :PORT; found {self.advertise!r}"
        )

    @staticmethod
    def load(path: Path | None, overrides: Mapping[str, Any] | None = None) -> "WorkerConfig":
        """From the file's [worker] table, flags (`{"url": ...}`, in TOML types) winning."""
        document = read_toml(path) if path is not None else {}
        values = table_of(document, WorkerConfig.TABLE)
        return WorkerConfig.read({**values, **(overrides or {})})


_COORDINATOR_TABLES: tuple[type[Table], ...] = (
    RunTable, ServeTable, PolicyTable, SamplingTable, TaskTable, DisseminationTable, ActivationTable, LinkTable,
    GatewayTable, RentTable,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Everything `echo2d coordinate` needs."""

    run: RunTable
    coordinator: ServeTable
    policy: PolicyTable
    sampling: SamplingTable
    task: TaskTable
    dissemination: DisseminationTable
    activation: ActivationTable
    link: LinkTable
    gateway: GatewayTable
    rent: RentTable
    prices: tuple[PriceTable, ...] = ()
    providers: tuple[ProviderConfig, ...] = ()

    def __post_init__(self) -> None:
        _ = self.link.networks  # or a fault
        policy = self.policy
        kappa_max = policy.staleness_max + 1
        if policy.publish_every != "auto" and policy.publish_every > kappa_max:
            raise OperatorFault(
                f"policy.publish_every: expected 1 to {kappa_max} (staleness_max + 1; more would deadlock); "
                f"found {policy.publish_every}"
            )
        if policy.trajectories_per_step % policy.group_size:
            raise OperatorFault(
                f"policy.group_size: expected a divisor of trajectories_per_step = {policy.trajectories_per_step}; "
                f"found {policy.group_size}"
            )
        if self.sampling.vocab_size == 0 and self.run.base_model is None:
            raise OperatorFault(
                "sampling.vocab_size: expected at least 1, or run.base_model; found neither"
            )

    @staticmethod
    def load(path: Path, overrides: Mapping[str, Any] | None = None) -> "CoordinatorConfig":
        """From a TOML file, flags (`{"coordinator.port": 0}`, in TOML types) winning."""
        return CoordinatorConfig.read(read_toml(path), overrides)

    @staticmethod
    def read(
        document: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> "CoordinatorConfig":
        """From a parsed TOML document."""
        tables = {cls.TABLE: dict(table_of(document, cls.TABLE)) for cls in _COORDINATOR_TABLES}
        for name in document:
            if name not in tables and name not in OTHER_TABLES and name != PriceTable.TABLE:
                expected = (*tables, f"[{PriceTable.TABLE}]", *sorted(OTHER_TABLES))
                raise OperatorFault(f"[{name}]: unknown table; expected {', '.join(expected)}")
        for dotted, value in (overrides or {}).items():
            table, _, name = dotted.partition(".")
            tables[table][name] = value
        checked: dict[str, Any] = {
            cls.TABLE: cls.read(tables[cls.TABLE]) for cls in _COORDINATOR_TABLES
        }
        return CoordinatorConfig(
            **checked, prices=_prices(document), providers=read_providers(document)
        )


def _prices(document: Mapping[str, Any]) -> tuple[PriceTable, ...]:
    """Of [[price]]."""
    rows = document.get(PriceTable.TABLE, [])
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, dict) for row in rows)
        or len(rows) > PRICES_MAX
    ):
        raise OperatorFault(
            f"[[{PriceTable.TABLE}]]: expected at most {PRICES_MAX} tables with double brackets"
        )
    return tuple(map(PriceTable.read, rows))


def notifier() -> Notifier:
    """Of whoever started this process and wants to be told how it is doing."""
    return Notifier(os.environ)


def engine_environment() -> dict[str, str]:
    """What servers that a worker starts are given of its own environment."""
    return dict(os.environ)


def command_environment() -> dict[str, str]:
    """What a provider's commands are given of the coordinator's: all but the service manager's."""
    ours = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID")
    return {name: value for name, value in os.environ.items() if name not in ours}


def print_config() -> str:
    """The commented TOML of every key of the coordinator and of a worker."""
    prices = "".join(
        f"# {line}\n" if line else "\n" for line in print_tables(PriceTable).splitlines()
    )
    tables = print_tables(*_COORDINATOR_TABLES, WorkerConfig)
    return f"{tables}\n{prices.replace('[price]', '[[price]]')}\n{print_providers()}"

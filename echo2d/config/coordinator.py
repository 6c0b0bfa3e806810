"""The configuration of the coordinator: TOML tables and a few flags.

Each process has one frozen config object, which is checked when it is read. Every key is declared
once, with its default, unit and meaning; `print_config` prints them. One file may serve all programs of a
host: each program reads its own tables and ignores those of the others.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from echo2d.config.limits import NEW_TOKENS_MAX, PORT_MAX, uplink_bytes_per_s
from echo2d.config.renting import ProviderConfig, RentTable, print_providers, read_providers
from echo2d.config.run import RunTable, flat_folders
from echo2d.config.tables import (
    folder_of,
    meant,
    print_tables,
    read_table,
    read_toml,
    table_of,
    with_settings,
)
from echo2d.config.tasks import EvalTable, SamplingTable, TaskTable
from echo2d.config.worker import WorkerConfig
from echo2d.core.rules.audit import AuditTable
from echo2d.core.rules.prices import USD_MAX, PriceTable
from echo2d.core.rules.run import ActivationTable, DisseminationTable, PolicyTable
from echo2d.core.rules.table import Table, key
from echo2d.errors import OperatorFault

# At a lower temperature, logits / temperature overflows.
_TEMPERATURE_MIN = 0.001
# A task with a smaller share would have one group in hundreds of steps.
WEIGHT_SHARE_MIN = 0.001
# Each task and each evaluation has processes of its own.
TASKS_MAX = 64
EVALS_MAX = 64

OTHER_TABLES = frozenset({"learner", "sft", "worker", "provider"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTable(Table):
    TABLE: ClassVar[str] = "coordinator"

    host: str = key("address on which the API and the control links listen", "127.0.0.1")
    port: int = key(
        "TCP port of the API and the control links; 0: any free port, written to coordinator.json in run_dir",
        7700,
        low=0,
        high=PORT_MAX,
    )
    tls: Literal["auto", "on", "off"] = key(
        "TLS on all connections; auto: on if host or link.host is not loopback", "auto"
    )
    names: tuple[str, ...] = key(
        "host names that a browser's request may have, besides IP addresses, localhost and this machine's"
        " own name",
        (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesTable(Table):
    TABLE: ClassVar[str] = "samples"

    bytes_max: int = key(
        "bytes of prompts, answers and rewards kept as text in run_dir/samples.jsonl for"
        " `echo2d samples`; 0: keep none",
        64 << 20,
        low=0,
    )
    viewers: bool = key("holders of viewer tokens see prompts and answers on the page too", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable(Table):
    TABLE: ClassVar[str] = "link"

    host: str = key(
        "address on which the seed listens for peers, and which workers dial; empty: coordinator.host",
        "",
    )
    port: int | None = key(
        "TCP port on which the seed listens for peers; 0: any free port; not given: coordinator.port"
        " + 1, which is 7701 by default",
        None,
        low=0,
        high=PORT_MAX,
    )
    uplink_limit: str = key(
        "highest rate of the seed to all peers together, such as 50mbit; empty: no limit", ""
    )
    usd_per_gb_up: float = key(
        "usd per 10^9 bytes that the seed sends; above 0, it sends a version as few times as the time"
        " allows",
        0.0,
        low=0.0,
        high=USD_MAX,
    )
    peer_networks: tuple[str, ...] = key(
        "addresses or networks (10.8.0.0/16) that peers may announce, besides the address from"
        " which their control link comes",
        (),
    )

    @property
    def uplink_bytes_per_s_max(self) -> int | None:
        """`uplink_limit` in bytes/s; None: no limit. OperatorFault: below UPLINK_LIMIT_MIN."""
        return uplink_bytes_per_s("link.uplink_limit", self.uplink_limit, "1mbit")

    def beside(self, serve: ServeTable) -> "LinkTable":
        """This table with host and port filled in: those not given follow from the coordinator's."""
        port = self.port if self.port is not None else serve.port + 1 if serve.port else 0
        return replace(self, host=self.host or serve.host, port=port)

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """`peer_networks`, parsed. OperatorFault: one of them is not an address or a network."""
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
        "serve the policy as an OpenAI-compatible API to holders of a gateway token"
        " (docs/guide/gateway.md)",
        False,
    )
    share: float = key(
        "share of all slots that calls may hold at once; at least one slot",
        0.1,
        above=0.0,
        high=1.0,
    )
    wait_s: float = key(
        "seconds that a call may wait for a slot before it is refused", 60.0, above=0.0, high=3600.0
    )
    model: str = key("name of the model in the API", "policy")
    max_new_tokens: int = key("most output tokens per choice", 4096, low=1, high=NEW_TOKENS_MAX)
    chat_template: Path | None = key(
        "jinja file to use instead of the snapshot's chat template", None
    )
    record_bytes_max: int = key(
        "bytes of call records kept in run_dir/gateway.jsonl; 0: keep none", 256 << 20, low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerTable(Table):
    """Instead of [[task]]: clients of the Tinker API decide what is trained."""

    TABLE: ClassVar[str] = "tinker"

    models: dict[str, Any] = key(
        "names by which clients ask for a model, each with its directory: that of run.base_model",
        dict,
    )
    staleness_max: int | None = key(
        "how many optimizer steps older than their model sampled tokens may be; without it: any",
        None,
        low=0,
    )


COORDINATOR_TABLES: tuple[type[Table], ...] = (
    RunTable, ServeTable, PolicyTable, SamplingTable, SamplesTable, DisseminationTable,
    ActivationTable, LinkTable, GatewayTable, AuditTable, RentTable,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """The configuration of `echo2d coordinate`."""

    run: RunTable
    coordinator: ServeTable
    policy: PolicyTable
    sampling: SamplingTable
    tasks: tuple[TaskTable, ...]
    evals: tuple[EvalTable, ...]
    samples: SamplesTable
    dissemination: DisseminationTable
    activation: ActivationTable
    link: LinkTable
    gateway: GatewayTable
    audit: AuditTable
    rent: RentTable
    prices: tuple[PriceTable, ...] = ()
    providers: tuple[ProviderConfig, ...] = ()
    tinker: TinkerTable | None = None
    folder: Path = Path()  # the folder of the config's file
    # The [learner] table as the file has it; empty if there is none.
    learner: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        _ = self.link.networks, self.link.uplink_bytes_per_s_max  # raises if they are wrong
        if is_local(self.link.host) and not is_local(self.coordinator.host):
            raise OperatorFault(
                f"link.host: with coordinator.host = {self.coordinator.host!r}, workers elsewhere would "
                f"dial themselves at {self.link.host!r}; expected an address of this host that they "
                "reach, or leave link.host out: coordinator.host is used then"
            )
        policy = self.policy
        kappa_max = policy.staleness_max + 1
        if policy.publish_every != "auto" and policy.publish_every > kappa_max:
            raise OperatorFault(
                f"policy.publish_every: expected 1 to {kappa_max} (staleness_max + 1; more would "
                f"deadlock); found {policy.publish_every}"
            )
        if policy.trajectories_per_step % policy.group_size:
            raise OperatorFault(
                "policy.group_size: expected a divisor of trajectories_per_step = "
                f"{policy.trajectories_per_step}; found {policy.group_size}"
            )
        if policy.group_min > policy.group_size:
            raise OperatorFault(
                f"policy.group_min: expected at most group_size = {policy.group_size}; "
                f"found {policy.group_min}"
            )
        self._check_tasks()
        if self.tinker is not None:
            self._check_tinker(self.tinker)
        if policy.group_size == 1:
            self._check_single()
        if self.sampling.vocab_size == 0 and self.run.base_model is None:
            raise OperatorFault(
                "sampling.vocab_size: expected at least 1, or run.base_model to read it from; "
                "found neither"
            )

    def _check_single(self) -> None:
        """Refuse settings that compare the answers of a group: a group has one answer only."""
        chosen = [("task.sampler", task.sampler) for task in self.tasks]
        for name, value in [("policy.order", self.policy.order), *chosen]:
            if value in ("priority", "informative", "pairs"):
                raise OperatorFault(
                    f"{name}: {value} compares the answers of a group; expected policy.group_size of "
                    "at least 2; found 1"
                )
        learns = self.learner.get("advantages") or self.learner.get("objective") == "distill"
        if self.learner and not learns:
            raise OperatorFault(
                f"policy.group_size: {self.learner.get('objective', 'grpo')} compares the answers of a "
                "group, and one alone teaches nothing; expected at least 2, or learner.advantages of "
                "your own; found 1"
            )

    def _check_tinker(self, table: TinkerTable) -> None:
        if self.tasks or self.evals:
            raise OperatorFault(
                "tinker: clients decide what is trained; expected no [[task]] and no [[eval]]"
            )
        if self.run.base_model is None:
            raise OperatorFault(
                "run.base_model: expected the directory of the model that [tinker] serves"
            )
        if not table.models:
            raise OperatorFault(
                'tinker.models: expected a name, such as "Qwen/Qwen3-8B" = "models/qwen3-8b"; found none'
            )
        for name, directory in table.models.items():
            if not isinstance(directory, str):
                raise OperatorFault(
                    f"tinker.models: {name}: expected a directory; found {directory!r}"
                )
            path = self.folder / Path(directory)
            if path.resolve() != self.run.base_model.resolve():
                raise OperatorFault(
                    f"tinker.models: {name}: expected run.base_model, {self.run.base_model}, because a learner "
                    f"holds one base model; found {path}"
                )

    def require(self, command: Literal["coordinate", "tinker"]) -> None:
        """OperatorFault: another command starts a run of this config."""
        if (self.tinker is None) != (command == "coordinate"):
            other = "echo2d coordinate" if self.tinker is None else "echo2d tinker"
            lacks = "no [tinker]" if self.tinker is None else "[tinker]"
            raise OperatorFault(f"this config has {lacks}: start it with `{other}`")

    def sampling_of(self, task: TaskTable, *, greedy: bool = False) -> SamplingTable:
        """How this task's answers are drawn. OperatorFault: its own keys are wrong.

        greedy: the temperature may be 0, because nothing is trained on the answers.
        """
        common = {each.name: getattr(self.sampling, each.name) for each in fields(SamplingTable)}
        if "vocab_size" in task.sampling:
            raise OperatorFault("task.sampling.vocab_size: all tasks use the one in [sampling]")
        found = read_table(SamplingTable, {**common, **task.sampling})
        if found.temperature < _TEMPERATURE_MIN and not (greedy and found.temperature == 0):
            raise OperatorFault(
                f"sampling.temperature: expected at least {_TEMPERATURE_MIN}, or 0.0 for [[eval]] "
                f"alone; found {found.temperature}"
            )
        return found

    def task_of(self, table: EvalTable, names: Sequence[str]) -> int:
        """The index of the task that an [[eval]] is about. names: the names of all tasks, in order.

        OperatorFault: there is no such task.
        """
        if not table.task:
            return 0
        if table.task not in names:
            raise OperatorFault(
                f"eval.task: expected one of {', '.join(names)}; found {table.task!r}"
            )
        return names.index(table.task)

    def _check_tasks(self) -> None:
        for task in self.tasks:
            self.sampling_of(task)
        for task in self.tasks:
            if task.options.get("scorer") == "remote" and not task.network:
                raise OperatorFault(
                    "task.network: the scorer remote asks a judge elsewhere; expected true"
                )
        if self.samples.viewers and not self.samples.bytes_max:
            raise OperatorFault(
                "samples.viewers: there are no samples to see; expected samples.bytes_max above 0"
            )
        if self.evals and self.audit.enabled and not self.audit.trusted:
            raise OperatorFault(
                "audit.trusted: with [audit], trusted workers answer the questions of [[eval]]; "
                "expected a token; found none"
            )
        if self.audit.enabled and self.audit.seeds == "sglang":
            for task in self.tasks:
                if self.sampling_of(task).min_p:
                    raise OperatorFault(
                        "sampling.min_p: SGLang with --enable-deterministic-inference, which "
                        'audit.seeds = "sglang" needs, cannot draw with it; expected 0.0'
                    )
        total = sum(task.weight for task in self.tasks)
        for task in self.tasks:
            if task.weight < WEIGHT_SHARE_MIN * total:
                raise OperatorFault(
                    f"task.weight: expected at least {WEIGHT_SHARE_MIN:g} of the sum of all weights, "
                    f"{total:g}; found {task.weight:g}"
                )
        exact = [task.groups_per_step for task in self.tasks]
        groups = self.policy.trajectories_per_step // self.policy.group_size
        if any(exact) and (not all(exact) or sum(exact) != groups):
            raise OperatorFault(
                f"task.groups_per_step: expected numbers of all tasks that add up to {groups} "
                f"(trajectories_per_step / group_size); found {exact}"
            )

    @property
    def module_folders(self) -> tuple[Path, ...]:
        """Folders in which the operator's own modules are looked for, after all installed ones.

        Empty for a config that was not read from a file.
        """
        return flat_folders((self.folder, *self.run.modules))

    @staticmethod
    def load(path: Path, settings: Iterable[str] = ()) -> "CoordinatorConfig":
        """Read a TOML file. settings: TABLE.KEY=VALUE, each of which replaces what the file says."""
        return CoordinatorConfig.read(with_settings(read_toml(path), settings), folder_of(path))

    @staticmethod
    def read(document: Mapping[str, Any], folder: Path = Path()) -> "CoordinatorConfig":
        """Read a parsed TOML document. folder: relative paths count from it."""
        tables = {cls.TABLE: dict(table_of(document, cls.TABLE)) for cls in COORDINATOR_TABLES}
        several = (TaskTable.TABLE, EvalTable.TABLE, PriceTable.TABLE)
        for name in document:
            if name == TinkerTable.TABLE:
                continue
            if name not in tables and name not in OTHER_TABLES and name not in several:
                if not isinstance(document[name], dict | list):
                    raise OperatorFault(
                        f"{name} comes before any table; put it below its table, such as [run]"
                    )
                raise OperatorFault(
                    f"[{name}]: unknown table; {meant(name, [*tables, *several, *sorted(OTHER_TABLES)])}"
                )
        tinker = None
        if TinkerTable.TABLE in document:
            tinker = read_table(TinkerTable, table_of(document, TinkerTable.TABLE))
        tasks = _rows(document, TaskTable.TABLE, TASKS_MAX) or ([] if tinker else [{}])
        checked: dict[str, Any] = {
            cls.TABLE: read_table(cls, tables[cls.TABLE], folder) for cls in COORDINATOR_TABLES
        }
        checked["link"] = checked["link"].beside(checked["coordinator"])
        return CoordinatorConfig(
            **checked,
            tasks=tuple(read_table(TaskTable, task, folder) for task in tasks),
            evals=tuple(
                read_table(EvalTable, row) for row in _rows(document, EvalTable.TABLE, EVALS_MAX)
            ),
            # At most 256 prices: each worker's name is compared with every one of them.
            prices=tuple(
                read_table(PriceTable, row) for row in _rows(document, PriceTable.TABLE, 256)
            ),
            providers=read_providers(document),
            tinker=tinker,
            folder=folder,
            learner=table_of(document, "learner"),
        )


def is_local(host: str) -> bool:
    """Whether only this machine reaches this address or name. Names are not resolved; only localhost is local."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _rows(document: Mapping[str, Any], name: str, most: int) -> list[dict[str, Any]]:
    """All [[name]] tables of a parsed file; a single task may be written as [task]."""
    found = document.get(name, [])
    rows = [found] if isinstance(found, dict) and name == TaskTable.TABLE else found
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, dict) for row in rows)
        or len(rows) > most
    ):
        raise OperatorFault(f"[[{name}]]: expected at most {most} tables, in double brackets")
    return [dict(row) for row in rows]


# --- all keys, for --print-config


def print_config() -> str:
    """All keys of the coordinator and of a worker, as commented TOML with defaults, units and meanings."""
    tables = print_tables(*COORDINATOR_TABLES, TaskTable, WorkerConfig)
    tables = tables.replace("[task]", "[[task]]")
    several = [_optional(each) for each in (EvalTable, PriceTable, TinkerTable)]
    return "\n".join([tables, *several, print_providers()])


def _optional(table: type[Table]) -> str:
    """All keys of an optional table, commented out."""
    text = print_tables(table)
    if table is not TinkerTable:
        text = text.replace(f"[{table.TABLE}]", f"[[{table.TABLE}]]")
    return "".join(f"# {line}\n" if line else "\n" for line in text.splitlines())

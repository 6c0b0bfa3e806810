"""The configuration of a worker: the [worker] table, and a few flags."""

import ipaddress
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from echo2d.config.limits import DISK_BYTES_MAX, PORT_MAX, uplink_bytes_per_s
from echo2d.config.tables import folder_of, read_table, read_toml, table_of, with_settings
from echo2d.core.base.flags import flag_values, quantization_of
from echo2d.core.rules.prices import USD_MAX
from echo2d.core.rules.table import Table, key
from echo2d.errors import OperatorFault
from echo2d.registry import ENGINES

_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_OF_SERVERS = (
    *("engine_python", "engine_args", "engine_url", "engine_key_file", "trust_network"),
    "refit_mode",
)
# Keys that only some engines read.
KEYS_OF_ENGINES = {
    "torch": ("quantization", "dtype", "device"),
    "sglang": _OF_SERVERS,
    "vllm": _OF_SERVERS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(Table):
    """The configuration of `echo2d join`: the [worker] table, which flags override."""

    TABLE: ClassVar[str] = "worker"

    url: str = key(
        "URL of the coordinator, https://HOST:PORT; http:// means no TLS; empty: that of the token file",
        "",
    )
    token_file: Path = key("token file, made by `echo2d token create NAME --role worker`")
    state_dir: Path = key("directory in which this worker keeps its key, frames and snapshots")
    disk_bytes_max: int = key(
        "bytes that frames and snapshots may take; the oldest frames are evicted first",
        DISK_BYTES_MAX,
        low=1,
    )
    base_model: Path | None = key(
        "model directory on this box, whose data need not be fetched; adapters need it", None
    )
    name: str = key("name shown by `echo2d status`; empty: the host's name", "")
    engine: str = key("the inference engine", "torch", choices=ENGINES)
    engine_python: Path | None = key(
        "python of the environment in which SGLang or vLLM is installed; it runs the servers",
        None,
    )
    engine_args: str = key(
        "flags for the servers that this worker starts, written as on a command line", ""
    )
    engine_url: str = key(
        "URLs of running SGLang or vLLM servers, one per engine, separated by commas; unix:PATH is a vLLM server's"
        " socket; empty: this worker starts servers",
        "",
    )
    trust_network: bool = key(
        "allow http:// URLs of engine_url beyond loopback: prompts, answers and keys then travel unencrypted",
        False,
    )
    engine_key_file: Path | None = key(
        "file with the API key of the servers at engine_url, and their admin key on a second line",
        None,
    )
    refit_mode: Literal["retract", "abort", "in_place"] = key(
        "how a server pauses for a new version (docs/guide/sglang.md)", "retract"
    )
    quantization: Literal["none", "int8"] = key(
        "int8: the torch engine multiplies in int8 on a CPU (docs/guide/quantized.md); the run must allow it"
        " (policy.quantized_workers)",
        "none",
    )
    # The largest boxes have 16 GPUs.
    engines: int = key("number of engines, one per GPU; they share one download", 1, low=1, high=16)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "weights of the torch engine; auto: float32 on the CPU, bfloat16 on a GPU", "auto"
    )
    device: str = key(
        "device of the torch engines: auto, cpu, cuda or cuda:N; several engines on cuda take"
        " cuda:0, cuda:1 and so on",
        "auto",
    )
    slots: int = key("samples that each engine runs at once", 16, low=1, high=4096)
    tokens_per_s_max: float = key(
        "most tokens per second, all engines together; 0: no limit", 0.0, low=0.0
    )
    threads: int = key(
        "CPU threads of all torch engines together; 0: torch decides", 0, low=0, high=1024
    )
    relay_only: bool = key("pass versions on and generate nothing", False)
    receive_only: bool = key("receive versions and pass none on to other workers", False)
    hours: str = key(
        "times at which it works, in local time of this box, such as 22:00-07:00,12:00-13:00; empty: always",
        "",
    )
    only_when_idle: bool = key("work only while no other program is on a GPU (nvidia-smi)", False)
    usd_per_h: float = key(
        "usd per hour of this worker, unless the run's config has a price for it",
        0.0,
        low=0.0,
        high=USD_MAX,
    )
    uplink_limit: str = key(
        "highest rate to all other workers together, such as 50mbit; empty: no limit", ""
    )
    listen_host: str = key("address on which this worker listens for peers", "127.0.0.1")
    listen_port: int = key(
        "TCP port on which this worker listens for peers; 0: any free port", 0, low=0, high=PORT_MAX
    )
    advertise: str = key(
        "HOST:PORT at which other peers reach this worker, the host as an IP address"
        " (:PORT alone: its public address); empty: where it listens",
        "",
    )
    no_tls: bool = key(
        "allow addresses beyond loopback without TLS, when the URL is http://", False
    )
    metrics_port: int = key(
        "TCP port on 127.0.0.1 that serves Prometheus metrics; 0: none", 0, low=0, high=PORT_MAX
    )

    def __post_init__(self) -> None:
        Table.__post_init__(self)
        if self.relay_only and self.receive_only:
            raise OperatorFault(
                "worker.receive_only: relay_only and receive_only cannot be combined: "
                "the peer would do nothing"
            )
        self._require_keys_of_engine()
        # Reading these properties raises OperatorFault if a key is wrong.
        _ = self.uplink_bytes_per_s_max, self.announced, self.windows, self.engine_urls

    def _require_keys_of_engine(self) -> None:
        """OperatorFault: a key is set that only other engines read, so it would be ignored.

        The fake engine takes the place of any, and engines of other distributions read what they need.
        """
        if self.engine not in KEYS_OF_ENGINES:
            return
        defaults = {item.name: item.default for item in fields(self)}
        for name in dict.fromkeys(chain(*KEYS_OF_ENGINES.values())):
            if name in KEYS_OF_ENGINES[self.engine] or getattr(self, name) == defaults[name]:
                continue
            readers = [engine for engine, keys in KEYS_OF_ENGINES.items() if name in keys]
            other = f"; for {self.engine}, put --quantization in worker.engine_args"
            read = "engine reads" if len(readers) == 1 else "engines read"
            raise OperatorFault(
                f"worker.{name}: only the {' and '.join(readers)} {read} it, and worker.engine is "
                f"{self.engine}{other if name == 'quantization' else ''}"
            )

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """`engine_url`, one for each engine; none where echo2d starts the servers, or needs none.

        OperatorFault: one is not the address of a server.
        """
        if self.engine not in ("sglang", "vllm") or self.relay_only or not self.engine_url:
            return ()
        found = tuple(each.strip() for each in self.engine_url.split(","))
        sockets = self.engine == "vllm"
        # The message does not repeat a password.
        if any("@" in each and not each.startswith("unix:") for each in found):
            raise OperatorFault(
                "worker.engine_url: a URL cannot have a user and a password; write the server's key into a file and "
                "name it in worker.engine_key_file"
            )
        if len(found) != self.engines or not all(
            _is_server(each, sockets=sockets) for each in found
        ):
            also = " or unix:PATH" if sockets else ""
            raise OperatorFault(
                f"worker.engine_url: expected {self.engines} URLs, http://HOST:PORT{also}, of hosts to which one can "
                f"connect; found {self.engine_url!r}"
            )
        return found

    @property
    def uplink_bytes_per_s_max(self) -> int | None:
        """`uplink_limit` in bytes/s; None: no limit. OperatorFault: below UPLINK_LIMIT_MIN."""
        return uplink_bytes_per_s(
            "worker.uplink_limit", self.uplink_limit, "1mbit, or receive_only"
        )

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """`hours` as pairs of minutes of the day. A window whose end is before its begin spans midnight."""
        found = []
        for each in self.hours.split(",") if self.hours else ():
            matched = _WINDOW.fullmatch(each.strip())
            hour, minute, end_hour, end_minute = map(int, matched.groups() if matched else (0,) * 4)
            begin, end = 60 * hour + minute, 60 * end_hour + end_minute
            if begin == end:
                raise OperatorFault(
                    "worker.hours: expected windows such as 22:00-07:00, separated by commas; "
                    f"found {each.strip()!r}"
                )
            found.append((begin, end))
        return tuple(found)

    @property
    def quantized_as(self) -> str:
        """What the engines quantize weights or KV caches to, such as "int8"; empty: they do not.

        For servers it is what their flags in `engine_args` say.
        """
        if self.engine == "torch":
            return "" if self.quantization == "none" else self.quantization
        try:
            given = flag_values(shlex.split(self.engine_args))
        except ValueError:  # the engine refuses such flags
            return ""
        weights = given.get("quantization", given.get("q", ""))
        # A config may say more, or something else, than the name.
        weights += "+config" if "quantization-config" in given else ""
        return quantization_of(weights, given.get("kv-cache-dtype", ""))

    @property
    def announced(self) -> tuple[str, int] | None:
        """Host and port of `advertise`; None: peers reach this worker where it listens.

        Host 0.0.0.0 means the worker's public address, which the coordinator fills in.
        """
        if not self.advertise:
            return None
        host, _, port = self.advertise.rpartition(":")
        with suppress(ValueError):
            # No socket is bound to this address. It is only sent to the coordinator.
            found = ipaddress.ip_address(host.strip("[]") or "0.0.0.0")  # noqa: S104
            if 0 < int(port) <= PORT_MAX:
                return str(found), int(port)
        raise OperatorFault(
            "worker.advertise: expected HOST:PORT with an IP address in numbers, or :PORT; "
            f"found {self.advertise!r}"
        )

    @staticmethod
    def load(
        path: Path | None, overrides: Mapping[str, Any] | None = None, settings: Iterable[str] = ()
    ) -> "WorkerConfig":
        """Read the file's [worker] table. settings: KEY=VALUE, each of which replaces what the file says.

        `overrides` (`{"url": ...}`) replace both; their paths count from the current directory.
        """
        document = read_toml(path) if path is not None else {}
        with_settings(document, (f"{WorkerConfig.TABLE}.{each}" for each in settings))
        values = table_of(document, WorkerConfig.TABLE)
        given = {
            name: value.absolute() if isinstance(value, Path) else value
            for name, value in (overrides or {}).items()
        }
        folder = Path() if path is None else folder_of(path)
        return read_table(WorkerConfig, {**values, **given}, folder)


def _is_server(address: str, *, sockets: bool) -> bool:
    """Whether a worker can connect to this address."""
    if address.startswith("unix:"):
        return sockets and address.startswith("unix:/")
    try:
        url = urlsplit(address)
        fits = url.port != 0 and bool(url.hostname) and not set(address) & set(" ?#\\")
    except ValueError:  # of the port, or of a bracket
        return False
    with suppress(ValueError):
        # One can listen on 0.0.0.0 and [::], but not connect to them.
        fits = fits and not ipaddress.ip_address(url.hostname or "").is_unspecified
    return fits and address.startswith(("http://", "https://"))

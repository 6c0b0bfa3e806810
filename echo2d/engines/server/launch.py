"""How a server is started, and what the operator's options say of it.

Each kind of server has a subclass of `ServerLaunch`, which builds its command line and environment.
"""

import math
import shlex
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from echo2d.core.base.flags import flag_values
from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.base import EngineOptions
from echo2d.errors import OperatorFault, path_fault

# Exit code of a Python that does not have the server's package; any other code says nothing about it.
_ABSENT = 44
_ASK_S_MAX = 30.0
_HOST = "127.0.0.1"
INSIDE = Path(__file__).parent / "inside"  # our module in a server, for its PYTHONPATH
# The names of the flags for tensor, pipeline and data parallelism.
_PARALLEL = (
    ("tp", "tp-size", "tensor-parallel-size"),
    ("pp", "pp-size", "pipeline-parallel-size"),
    ("dp", "dp-size", "data-parallel-size"),
)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that runs already, for the use of this engine only."""

    url: str
    folder: Path  # the copies of adapters, which the server reads
    api_key: str = ""
    admin_key: str = ""
    private: Path | None = None  # its ECHO2D_MEMORY


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """What a server must have room for: this many adapters of at most this rank, on layers with these last parts of
    their names.
    """

    rank: int = 0
    kinds: Sequence[str] = ()
    count: int = 0

    def grown(self, adapter: AdapterLayout, count: int) -> "AdapterNeeds":
        """Those of this adapter, too, as one of so many."""
        return AdapterNeeds(
            max(self.rank, adapter.rank),
            sorted({*self.kinds, *adapter.kinds}),
            max(self.count, count),
        )


@dataclass(frozen=True, slots=True)
class ServerLaunch(ABC):
    """How to start one server."""

    python: Path  # the interpreter of the environment that has the server
    arguments: Sequence[str]  # the operator's flags
    folder: Path  # folder for the server's log and keys
    environment: Mapping[str, str]  # the variables that the server inherits
    name: ClassVar[str]
    package: ClassVar[str]
    # Flags that only echo2d sets, without the leading dashes.
    ours: ClassVar[frozenset[str]]
    # Flags of which echo2d reads what the operator gives, besides the parallel sizes.
    read: ClassVar[frozenset[str]] = frozenset({
        "q", "quantization", "quantization-config", "kv-cache-dtype", "load-format", "device", "base-gpu-id",
        "enable-dp-attention",
    })  # fmt: skip

    def url(self, _private: Path) -> str:
        """Where it listens: a free port of loopback. A server that finds it taken ends and is started again.

        _private: a folder that only this user can enter, for sockets.
        """
        with socket.socket() as found:
            found.bind((_HOST, 0))
            return f"http://{_HOST}:{found.getsockname()[1]}"

    @abstractmethod
    def settings(self, _api_key: str) -> Mapping[str, str]:
        """Environment variables that the server is started with, besides `environment`."""

    @abstractmethod
    def command(self, model: Path, label: str, *, url: str, keys: Path) -> list[str]:
        """Its argument list. keys: the file with what `keys_text` returned; other users can read arguments."""

    def keys_text(self, _api_key: str, _admin_key: str) -> str:
        """The keys as this server reads them from a file."""
        return ""

    @abstractmethod
    def placed(self, index: int) -> Self:
        """The launch on the GPUs after those of the `index` launches before it, unless the operator chose them."""

    @classmethod
    def refusal(cls, arguments: Sequence[str]) -> str:
        """Why the operator cannot give these flags; empty: they can be given."""
        known = sorted(cls.ours.union(cls.read, *_PARALLEL))
        for name in flag_values(arguments):
            if name in cls.ours:
                return f"--{name} is set by echo2d"
            # argparse takes a flag's beginning for the flag.
            whole = next((each for each in known if each.startswith(name)), name)
            if name and name not in known and whole != name:
                return f"--{name}: a server may take it for --{whole}; write the whole name of the flag"
        return ""

    @property
    def gpus(self) -> int:
        """How many GPUs the server uses: those of a replica, times the pipeline's stages and the replicas."""
        given = flag_values(self.arguments)
        # With this flag SGLang's replicas share the GPUs of one.
        names = _PARALLEL[:2] if "enable-dp-attention" in given else _PARALLEL
        sizes = (next((given[each] for each in kind if each in given), "") for kind in names)
        return math.prod(int(size) for size in sizes if size.isdigit())

    @abstractmethod
    def adapter_flags(self, needs: AdapterNeeds) -> Sequence[str]:
        """The flags for these adapters."""

    def each(self, count: int) -> list[Self]:
        """A launch for each of `count` engines on one box, with a folder and GPUs of its own."""
        return [
            replace(
                self.placed(index) if count > 1 else self, folder=self.folder / f"engine-{index}"
            )
            for index in range(count)
        ]


def servers_of(
    options: EngineOptions, kind: type[ServerLaunch]
) -> Sequence[ServerLaunch | Running]:
    """How each engine's server is started or reached. OperatorFault: an option is missing or unusable."""
    if options.tokens_per_s_max:
        raise OperatorFault(
            f"worker.tokens_per_s_max: {kind.name} cannot limit its rate; limit the requests that it runs at once in "
            "worker.engine_args"
        )
    if options.python is not None and options.url:
        raise OperatorFault("worker.engine_python: set either this or worker.engine_url, not both")
    if options.python is None:
        return _running(options, kind)
    if not options.python.exists():
        raise OperatorFault(f"worker.engine_python: {options.python} does not exist")
    try:
        arguments = shlex.split(options.arguments)
    except ValueError as error:
        raise OperatorFault(f"worker.engine_args: {error}") from error
    if refusal := kind.refusal(arguments):
        raise OperatorFault(f"worker.engine_args: {refusal}")
    python = options.python.absolute()
    launch = kind(python, arguments, options.folder, options.environment)
    require_installed(launch)
    return launch.each(options.count)


def _running(options: EngineOptions, kind: type[ServerLaunch]) -> list[Running]:
    if not options.url:
        raise OperatorFault(
            "worker.engine_python: expected --engine-python VENV/bin/python of the environment in "
            f"which {kind.name} is installed, or --engine-url with the URL of a running server"
        )
    api_key, admin_key = _keys(options.key_file)
    return [
        Running(url, options.folder / f"engine-{index}", api_key, admin_key)
        for index, url in enumerate(map(str.strip, options.url.split(",")))
    ]


def _keys(file: Path | None) -> list[str]:
    """The API key and the admin key; an empty one is missing."""
    if file is None:
        return ["", ""]
    try:
        return [*file.read_text().split(), "", ""][:2]
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorFault(f"worker.engine_key_file: cannot read {file}: {error}") from error


def require_installed(launch: ServerLaunch) -> None:
    """OperatorFault: the Python does not start, or has no such server. Blocking."""
    asked = f"import importlib.util as u; raise SystemExit({_ABSENT} * (u.find_spec({launch.package!r}) is None))"
    try:
        done = subprocess.run(
            [str(launch.python), "-c", asked],
            env=launch.environment,
            capture_output=True,
            timeout=_ASK_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return
    except OSError as error:
        raise path_fault(f"worker.engine_python: cannot start {launch.python}", error) from error
    if done.returncode == _ABSENT:
        raise OperatorFault(
            f"worker.engine_python: {launch.python} has no {launch.package}: "
            f"{launch.python} -m pip install {launch.package}"
        )

"""Builds the command line and environment that start an SGLang server.

It also refuses the operator's flags that would contradict echo2d's own (`_OURS`).
"""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from echo2d.engines.adapter import AdapterLayout
from echo2d.errors import OperatorFault, path_fault

# Flags that only echo2d sets, without the leading dashes.
_OURS = {
    "host", "port", "api-key", "admin-api-key", "model-path", "model", "config", "weight-version",
    "trust-remote-code", "load-format", "skip-tokenizer-init", "incremental-streaming-output",
}  # fmt: skip
# Exit code of a Python that does not have SGLang; any other code says nothing about it.
_ABSENT = 44
_ASK = f"import importlib.util as u; raise SystemExit({_ABSENT} * (u.find_spec('sglang') is None))"
_ASK_S_MAX = 30.0
_TP = ("--tp", "--tp-size", "--tensor-parallel-size")


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one server."""

    python: Path  # the interpreter of the environment that has SGLang
    arguments: Sequence[str]  # the operator's flags
    folder: Path  # folder for the server's log
    environment: Mapping[str, str]  # the variables that the server inherits
    name: ClassVar[str] = "SGLang"

    def settings(self) -> Mapping[str, str]:
        """Variables that echo2d sets for the server."""
        return {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "PYTHONUNBUFFERED": "1",
        }

    def command(self, model: Path, label: str, *, host: str, port: int, keys: Path) -> list[str]:
        """Return the argument list. `keys` is a file, because other users can read arguments."""
        # A chunk has 8 tokens, because each chunk costs both ends a message.
        return [
            str(self.python), "-m", "sglang.launch_server", "--config", str(keys),
            "--model-path", str(model), "--weight-version", label, "--load-format", "auto",
            "--host", host, "--port", str(port),
            "--skip-tokenizer-init", "--skip-server-warmup",
            "--incremental-streaming-output", "--stream-interval", str(8),
            *self.arguments,
        ]  # fmt: skip

    def keys_text(self, api_key: str, admin_key: str) -> str:
        """Return the content of the `keys` file, which SGLang reads as its configuration."""
        return f"api-key: {api_key}\nadmin-api-key: {admin_key}\n"


def adapter_flags(adapter: AdapterLayout, staleness_max: int) -> Sequence[str]:
    """The flags of a server for adapters of this shape: the newest one, those of `staleness_max` versions before it,
    and the one that is loaded next.
    """
    kinds = sorted({name.rpartition(".")[2] for name in adapter.layers})
    count = str(staleness_max + 2)
    return (
        "--enable-lora", "--max-lora-rank", str(adapter.rank), "--lora-target-modules", *kinds,
        "--max-loras-per-batch", count, "--max-loaded-loras", count,
    )  # fmt: skip


def launches(base: Launch, count: int) -> list[Launch]:
    """Make one launch for each of `count` engines on one box.

    Each engine gets its own folder. Unless the operator chose the GPUs, it also gets those that follow the GPUs
    of the engine before it.
    """
    flags = base.arguments
    gpus = next((int(size) for flag, size in pairwise(flags) if flag in _TP and size.isdigit()), 1)
    placed = count > 1 and "cpu" not in flags and "--base-gpu-id" not in flags
    return [
        Launch(
            base.python,
            [*flags, *(("--base-gpu-id", str(index * gpus)) if placed else ())],
            base.folder / f"engine-{index}",
            base.environment,
        )
        for index in range(count)
    ]


def require_arguments(arguments: Sequence[str]) -> None:
    """OperatorFault: the operator set a flag that echo2d sets."""
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        if argument.startswith("--") and name in _OURS:
            raise OperatorFault(f"worker.engine_args: --{name} is set by echo2d")


def require_installed(launch: Launch) -> None:
    """OperatorFault: the Python does not start, or has no SGLang. Blocking."""
    command = [str(launch.python), "-c", _ASK]
    try:
        done = subprocess.run(
            command, env=launch.environment, capture_output=True, timeout=_ASK_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return
    except OSError as error:
        raise path_fault(f"worker.engine_python: cannot start {launch.python}", error) from error
    if done.returncode == _ABSENT:
        raise OperatorFault(
            f"worker.engine_python: {launch.python} has no sglang: {launch.python} -m pip install sglang"
        )

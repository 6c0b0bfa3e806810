"""How an SGLang server is started: its flags, those that are not the operator's to set, and its keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from echo2d.errors import OperatorFault

STREAM_INTERVAL = 8  # tokens per chunk: each one costs both ends a message

OURS = {
    "host", "port", "api-key", "admin-api-key", "model-path", "model", "config", "weight-version", "trust-remote-code",
    "load-format", "skip-tokenizer-init", "incremental-streaming-output",
}  # fmt: skip
_TP = ("--tp", "--tp-size", "--tensor-parallel-size")


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started. python: of the environment that SGLang is in. arguments: the operator's flags.

    folder: for its log. environment: what of this process's the server is given.
    """

    python: Path
    arguments: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    name: ClassVar[str] = "SGLang"

    def settings(self) -> Mapping[str, str]:
        return {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "PYTHONUNBUFFERED": "1",
        }

    def command(self, model: Path, label: str, *, host: str, port: int, keys: Path) -> list[str]:
        return [
            str(self.python), "-m", "sglang.launch_server", "--config", str(keys),
            "--model-path", str(model), "--weight-version", label, "--load-format", "auto",
            "--host", host, "--port", str(port),
            "--skip-tokenizer-init", "--skip-server-warmup",
            "--incremental-streaming-output", "--stream-interval", str(STREAM_INTERVAL),
            *self.arguments,
        ]  # fmt: skip

    def keys_text(self, api_key: str, admin_key: str) -> str:
        return f"api-key: {api_key}\nadmin-api-key: {admin_key}\n"


def launches(base: Launch, count: int) -> list[Launch]:
    """For `count` engines of one box: each has its folder and, on GPUs, those after the ones before it."""
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
    """OperatorFault: a flag that is not the operator's to set."""
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        if argument.startswith("--") and name in OURS:
            raise OperatorFault(f"worker.engine_args: --{name} is set by echo2d")

"""The command line and environment that start an SGLang server."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.server.launch import ServerLaunch

_TP = ("--tp", "--tp-size", "--tensor-parallel-size")


class Launch(ServerLaunch):
    """How to start one SGLang server."""

    __slots__ = ()
    name: ClassVar[str] = "SGLang"
    package: ClassVar[str] = "sglang"
    ours: ClassVar[frozenset[str]] = frozenset({
        "host", "port", "api-key", "admin-api-key", "model-path", "model", "config", "weight-version",
        "trust-remote-code", "load-format", "skip-tokenizer-init", "incremental-streaming-output",
    })  # fmt: skip

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

    def on_gpus_after(self, index: int) -> Sequence[str]:
        if "cpu" in self.arguments or "--base-gpu-id" in self.arguments:
            return ()
        sizes = (
            int(size) for flag, size in pairwise(self.arguments) if flag in _TP and size.isdigit()
        )
        return "--base-gpu-id", str(index * next(sizes, 1))

    def adapter_flags(self, adapter: AdapterLayout, staleness_max: int) -> Sequence[str]:
        kinds = sorted({name.rpartition(".")[2] for name in adapter.layers})
        count = str(staleness_max + 2)
        return (
            "--enable-lora", "--max-lora-rank", str(adapter.rank), "--lora-target-modules", *kinds,
            "--max-loras-per-batch", count, "--max-loaded-loras", count,
        )  # fmt: skip

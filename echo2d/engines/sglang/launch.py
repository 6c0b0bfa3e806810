"""The command line and environment that start an SGLang server."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.server.launch import ServerLaunch


class SglangLaunch(ServerLaunch):
    """How to start one SGLang server."""

    __slots__ = ()
    name: ClassVar[str] = "SGLang"
    package: ClassVar[str] = "sglang"
    ours: ClassVar[frozenset[str]] = frozenset({
        "host", "port", "api-key", "admin-api-key", "model-path", "model", "config", "weight-version",
        "trust-remote-code", "load-format", "skip-tokenizer-init", "incremental-streaming-output",
    })  # fmt: skip

    def settings(self, _api_key: str) -> Mapping[str, str]:
        """Variables that echo2d sets for the server."""
        return {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "PYTHONUNBUFFERED": "1",
        }

    def command(self, model: Path, label: str, *, url: str, keys: Path) -> list[str]:
        """Return the argument list. `keys` is a file, because other users can read arguments."""
        host, _, port = url.rpartition("/")[2].partition(":")
        # A chunk has 8 tokens, because each chunk costs both ends a message.
        return [
            str(self.python), "-m", "sglang.launch_server", "--config", str(keys),
            "--model-path", str(model), "--weight-version", label, "--load-format", "auto",
            "--host", host, "--port", port,
            "--skip-tokenizer-init", "--skip-server-warmup",
            "--incremental-streaming-output", "--stream-interval", str(8),
            *self.arguments,
        ]  # fmt: skip

    def keys_text(self, api_key: str, admin_key: str) -> str:
        """Return the content of the `keys` file, which SGLang reads as its configuration."""
        return f"api-key: {api_key}\nadmin-api-key: {admin_key}\n"

    def placed(self, index: int) -> Self:
        if "cpu" in self.arguments or "--base-gpu-id" in self.arguments:
            return self
        first = str(index * self.gpus)
        return replace(self, arguments=[*self.arguments, "--base-gpu-id", first])

    def adapter_flags(self, adapter: AdapterLayout, staleness_max: int) -> Sequence[str]:
        kinds = sorted({name.rpartition(".")[2] for name in adapter.layers})
        count = str(staleness_max + 2)
        return (
            "--enable-lora", "--max-lora-rank", str(adapter.rank), "--lora-target-modules", *kinds,
            "--max-loras-per-batch", count, "--max-loaded-loras", count,
        )  # fmt: skip

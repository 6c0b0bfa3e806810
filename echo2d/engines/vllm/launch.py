"""The command line and environment that start a vLLM server.

Its development routes (pause, load, label) ask for no key, so the server listens on a socket in a folder that only this
user can enter.
"""

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.server.launch import ServerLaunch
from echo2d.errors import EngineFault

OLDEST, NEWEST = (
    (0, 32, 0),
    (0, 32, 0),
)  # the first that reports spans, and the newest that was tried
SERVED = "base"  # the name of the weights in requests
EXTENSION = Path(__file__).parent / "worker_extension"
# vLLM's compiled kernels know these ranks only.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def tried(version: str) -> bool:
    """Whether echo2d was tried with this release, or with a newer one. EngineFault: it is too old, or none."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found else (0, 0, 0)
    if number < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EngineFault(
            f"vLLM {version or '(unknown version)'} does not report per-token weight versions; "
            f"use {oldest} or newer"
        )
    return number <= NEWEST


class VllmLaunch(ServerLaunch):
    """How to start one vLLM server."""

    __slots__ = ()
    name: ClassVar[str] = "vLLM"
    package: ClassVar[str] = "vllm"
    ours: ClassVar[frozenset[str]] = frozenset({
        "host", "port", "uds", "api-key", "model", "served-model-name", "trust-remote-code", "load-format",
        "skip-tokenizer-init", "logprobs-mode", "stream-interval", "enable-scale-out",
    })  # fmt: skip

    def url(self) -> str:
        return f"unix:{tempfile.mkdtemp(prefix='echo2d-vllm-')}/socket"

    def ended(self, url: str) -> None:
        shutil.rmtree(Path(url.removeprefix("unix:")).parent, ignore_errors=True)

    def settings(self, _api_key: str) -> Mapping[str, str]:
        return {
            "VLLM_API_KEY": _api_key,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONPATH": str(EXTENSION),
            "PYTHONUNBUFFERED": "1",
        }

    def command(self, model: Path, label: str, *, url: str, keys: Path) -> list[str]:  # noqa: ARG002
        return [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", SERVED, "--uds", url.removeprefix("unix:"),
            "--skip-tokenizer-init", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
            "--stream-interval", str(8), "--worker-extension-cls", "echo2d_worker.Echo2dWorker", *self.arguments,
        ]  # fmt: skip

    def placed(self, index: int) -> Self:
        if "CUDA_VISIBLE_DEVICES" in self.environment:
            return self
        gpus = ",".join(str(index * self.gpus + each) for each in range(self.gpus))
        return replace(self, environment={**self.environment, "CUDA_VISIBLE_DEVICES": gpus})

    def adapter_flags(self, adapter: AdapterLayout, staleness_max: int) -> Sequence[str]:
        rank = next((each for each in RANKS if each >= adapter.rank), adapter.rank)
        count = str(staleness_max + 2)
        return (
            "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", count,
            "--max-cpu-loras", count,
        )  # fmt: skip

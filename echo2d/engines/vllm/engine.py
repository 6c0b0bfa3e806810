"""VllmEngine: an engine whose model runs in a vLLM server, and how the server is started.

Its development routes (pause, load, label) ask for no key, so the server listens on a socket in a folder that only this
user can enter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.base import GenerateRequest
from echo2d.engines.server.engine import ServerEngine, ServerKind
from echo2d.engines.server.launch import INSIDE, ServerLaunch
from echo2d.engines.vllm import weight_update
from echo2d.engines.vllm.client import VllmClient
from echo2d.engines.vllm.generate import read_chunk, request_body


class VllmLaunch(ServerLaunch):
    """How to start one vLLM server."""

    __slots__ = ()
    name: ClassVar[str] = "vLLM"
    package: ClassVar[str] = "vllm"
    ours: ClassVar[frozenset[str]] = frozenset({
        "host", "port", "uds", "api-key", "model", "served-model-name", "trust-remote-code", "load-format",
        "skip-tokenizer-init", "logprobs-mode", "stream-interval", "enable-scale-out",
    })  # fmt: skip

    def url(self, _private: Path) -> str:
        return f"unix:{_private}/socket"

    def settings(self, _api_key: str) -> Mapping[str, str]:
        return {
            "VLLM_API_KEY": _api_key,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONPATH": f"{Path(__file__).parent / 'worker_extension'}:{INSIDE}",
            "PYTHONUNBUFFERED": "1",
        }

    def command(self, model: Path, label: str, *, url: str, keys: Path) -> list[str]:  # noqa: ARG002
        return [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "base", "--uds", url.removeprefix("unix:"),
            "--skip-tokenizer-init", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
            "--stream-interval", str(8), "--worker-extension-cls", "echo2d_worker.Echo2dWorker", *self.arguments,
        ]  # fmt: skip

    def placed(self, index: int) -> Self:
        if "CUDA_VISIBLE_DEVICES" in self.environment:
            return self
        gpus = ",".join(str(index * self.gpus + each) for each in range(self.gpus))
        return replace(self, environment={**self.environment, "CUDA_VISIBLE_DEVICES": gpus})

    def adapter_flags(self, adapter: AdapterLayout, staleness_max: int) -> Sequence[str]:
        # vLLM's kernels know these ranks only.
        ranks = (8, 16, 32, 64, 128, 256, 320, 512)
        rank = next((each for each in ranks if each >= adapter.rank), adapter.rank)
        count = str(staleness_max + 2)
        return (
            "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", count,
            "--max-cpu-loras", count,
        )  # fmt: skip


def _refusal(server: Any, request: GenerateRequest) -> str:
    assert isinstance(server, VllmClient)
    if server.extended or not request.sampling.cuts:
        return ""
    return (
        "vLLM gives logprobs after top_p, top_k and min_p only; start its server with "
        "--worker-extension-cls of echo2d, or let the worker start it"
    )


class VllmEngine(ServerEngine):
    """See `ServerEngine`."""

    kind = ServerKind(
        VllmLaunch,
        VllmClient,
        weight_update,
        request_body,
        read_chunk,
        lambda tokens: tokens,
        _refusal,
    )


make_vllm_engines = VllmEngine.make

"""VllmEngine: an engine whose model runs in a vLLM server, and how the server is started.

Its development routes (pause, load, label) ask for no key, so the server listens on a socket in a folder that only this
user can enter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from echo2d.engines.base import GenerateRequest
from echo2d.engines.server.engine import ServerEngine, ServerKind
from echo2d.engines.server.launch import INSIDE, AdapterNeeds, ServerLaunch
from echo2d.engines.vllm import weight_update
from echo2d.engines.vllm.client import VllmClient
from echo2d.engines.vllm.generate import read_chunk, request_body
from echo2d.errors import OperatorFault


class VllmLaunch(ServerLaunch):
    """How to start one vLLM server."""

    __slots__ = ()
    name: ClassVar[str] = "vLLM"
    package: ClassVar[str] = "vllm"
    ours: ClassVar[frozenset[str]] = frozenset({
        "host", "port", "uds", "api-key", "config", "model", "served-model-name", "trust-remote-code", "load-format",
        "skip-tokenizer-init", "logprobs-mode", "stream-interval", "enable-scale-out",
    })  # fmt: skip

    def url(self, _private: Path) -> str:
        return f"unix:{_private}/socket"

    def settings(self, _api_key: str) -> Mapping[str, str]:
        return {
            "VLLM_API_KEY": _api_key,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            # Our extension changes the sampler of this runner.
            "VLLM_USE_V2_MODEL_RUNNER": "0",
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
        name, mine = "CUDA_VISIBLE_DEVICES", range(index * self.gpus, (index + 1) * self.gpus)
        visible = self.environment.get(name)
        if visible == "":
            return self
        every = list(map(str, range(mine.stop))) if visible is None else visible.split(",")
        if len(every) < mine.stop:
            raise OperatorFault(
                f"{name}: expected {mine.stop} GPUs for {index + 1} engines of {self.gpus}; found {visible!r}"
            )
        gpus = ",".join(every[mine.start : mine.stop])
        return replace(self, environment={**self.environment, name: gpus})

    def adapter_flags(self, needs: AdapterNeeds) -> Sequence[str]:
        # vLLM's kernels know these ranks only.
        ranks = (8, 16, 32, 64, 128, 256, 320, 512)
        rank = next((each for each in ranks if each >= needs.rank), needs.rank)
        count = str(needs.count)
        return (
            "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", count,
            "--max-cpu-loras", count,
        )  # fmt: skip


def _refusal(_: object, request: GenerateRequest) -> str:
    # vLLM would draw colder requests at 0.01.
    heat = request.sampling.temperature
    fits = heat == 0 or 0.01 <= heat <= 2
    return "" if fits else f"vLLM draws at temperatures of 0.01 to 2 only; asked was {heat:g}"


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

"""SglangEngine: an engine whose model runs in an SGLang server, and how the server is started."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from echo2d.core.base.flags import flag_values, quantization_of
from echo2d.core.protocol.answer_end import CONTEXT_SPARE
from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.base import GenerateRequest
from echo2d.engines.server.engine import ServerEngine, ServerKind
from echo2d.engines.server.launch import INSIDE, AdapterNeeds, ServerLaunch
from echo2d.engines.sglang import weight_update
from echo2d.engines.sglang.client import FLASH_RL, IN_SCHEDULER, SglangClient
from echo2d.engines.sglang.generate import read_chunk, request_body


class SglangLaunch(ServerLaunch):
    """How to start one SGLang server."""

    __slots__ = ()
    name: ClassVar[str] = "SGLang"
    package: ClassVar[str] = "sglang"
    ours: ClassVar[frozenset[str]] = frozenset({
        "host", "port", "api-key", "admin-api-key", "model-path", "model", "config", "weight-version",
        "trust-remote-code", "skip-tokenizer-init", "incremental-streaming-output", "custom-weight-loader",
    })  # fmt: skip

    @classmethod
    def refusal(cls, arguments: Sequence[str]) -> str:
        """Only with flash_rl are quantized weights loaded again at a refit."""
        given = flag_values(arguments)
        value = given.get("load-format", FLASH_RL)
        if value != FLASH_RL:
            return f"--load-format: expected {FLASH_RL}, or the flag left out; found {value}"
        if "load-format" in given and not quantization_of(given.get("quantization", ""), ""):
            return f"--load-format {FLASH_RL} quantizes to fp8; write --quantization fp8 beside it"
        return super().refusal(arguments)

    def settings(self, _api_key: str) -> Mapping[str, str]:
        """Variables that echo2d sets for the server."""
        return {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "PYTHONPATH": str(INSIDE),
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
            "--custom-weight-loader", IN_SCHEDULER, "--incremental-streaming-output", "--stream-interval", str(8),
            *self.arguments,
        ]  # fmt: skip

    def keys_text(self, api_key: str, admin_key: str) -> str:
        """Return the content of the `keys` file, which SGLang reads as its configuration."""
        return f"api-key: {api_key}\nadmin-api-key: {admin_key}\n"

    def placed(self, index: int) -> Self:
        given = flag_values(self.arguments)
        if given.get("device") == "cpu" or "base-gpu-id" in given:
            return self
        first = str(index * self.gpus)
        return replace(self, arguments=[*self.arguments, "--base-gpu-id", first])

    def adapter_flags(self, needs: AdapterNeeds) -> Sequence[str]:
        count = str(needs.count)
        return (
            "--enable-lora", "--max-lora-rank", str(needs.rank), "--lora-target-modules", *needs.kinds,
            "--max-loras-per-batch", count, "--max-loaded-loras", count,
        )  # fmt: skip


def _refusal(server: SglangClient | None, request: GenerateRequest) -> str:
    if server is not None and server.dialect.deterministic and request.sampling.min_p:
        return "SGLang with --enable-deterministic-inference cannot draw with min_p: the request would end it"
    return ""


def _adapter_refusal(adapter: AdapterLayout) -> str:
    """SGLang computes some layers of a block together, and joins their parts of an adapter where it finds q_proj and
    gate_proj. A part that stays alone ends it at the first request.
    """
    needs = {
        "q_proj": ["v_proj"], "k_proj": ["q_proj", "v_proj"], "v_proj": ["q_proj"], "up_proj": ["gate_proj"],
    }  # fmt: skip
    for name in adapter.layers:
        block, _, kind = name.rpartition(".")
        lacks = (each for each in needs.get(kind, ()) if f"{block}.{each}" not in adapter.layers)
        if missing := " and ".join(lacks):
            return (
                f"SGLang cannot serve this run's adapters, which have {name} without {missing} beside it: "
                f"add {missing} to learner.lora_targets, or use another engine"
            )
    return ""


class SglangEngine(ServerEngine):
    """See `ServerEngine`."""

    kind = ServerKind(
        SglangLaunch,
        SglangClient,
        weight_update,
        request_body,
        read_chunk,
        lambda tokens: tokens - CONTEXT_SPARE,
        _refusal,
        _adapter_refusal,
    )


make_sglang_engines = SglangEngine.make

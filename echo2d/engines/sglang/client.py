"""Calls SGLang's paths over HTTP and reads their answers. It makes no decision."""

import base64
import logging
import pickle
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from echo2d.engines.server.admission import ServerLoad
from echo2d.engines.server.http_client import ServerClient, ServerRefused, error_text
from echo2d.engines.sglang.compat import Dialect, dialect_of
from echo2d.errors import EngineFault

# The function of our module that SGLang calls in the scheduler of each rank, as a loader of weights.
IN_SCHEDULER = "echo2d_memory.in_scheduler"
# Loads a version in bfloat16 into quantized weights.
FLASH_RL = "flash_rl"
# The pickle of no tensors, in base64: all that is sent.
_NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()

log = logging.getLogger("echo2d.engines")


class SglangClient(ServerClient):
    NAME: ClassVar[str] = "SGLang"
    CONTEXT_FLAG: ClassVar[str] = "--context-length"
    dialect: Dialect  # once it was probed
    load_format = "auto"  # of an update
    _ranks = _stages = 1

    async def require_refit(self, tensors: Collection[str], base: Path | None) -> None:
        """Quantized weights in memory do not have the shapes of the files. Experts that can have adapters do not have
        the names that SGLang looks for: it keeps those with which it started, and reports the update as done.
        """
        if self.quantization and self.load_format != FLASH_RL:
            raise EngineFault(
                f"SGLang with --quantization {self.quantization} loads a second version only with --load-format "
                f"{FLASH_RL} (worker.engine_args); otherwise the load would end it"
            )
        if self._keeps_experts and any(".experts." in name for name in tensors):
            started = (await self.model()).get("model_path")
            if started != str(base):
                raise EngineFault(
                    f"SGLang with LoRA on experts keeps the experts of {started}: start it with --model-path "
                    f"{base or 'MODEL'} for adapters of this model, and without --enable-lora for whole models"
                )

    def generate(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Stream the chunks of one request."""
        return self.stream("/generate", body)

    async def ready(self) -> bool:
        """Return whether a starting server takes requests.

        Use it during the start only: a paused server would count the probe as a failed health check.
        """
        try:
            await self.call("GET", "/health")
        except EngineFault:
            return False
        return True

    async def probe(self) -> None:
        """Find out the server's version and paths. EngineFault: echo2d cannot use this server."""
        # /server_info also holds the API keys, so only these two facts leave this method.
        info = await self.facts("/server_info")
        try:
            paths = (await self.call("GET", "/openapi.json"))["paths"].keys()
        except (ServerRefused, KeyError, AttributeError, TypeError):
            # This server does not list its paths, so its version decides alone.
            paths = None
        deterministic = info.get("enable_deterministic_inference") is True
        version = str(info.get("version", ""))
        self.dialect = dialect_of(version, paths, deterministic=deterministic)
        self.tells_experts = info.get("enable_return_routed_experts") is True
        self.kv_dtype = str(info.get("kv_cache_dtype") or "")
        limits = ("context_length", "max_loras_per_batch")
        self.context_max, self.adapters_max = (int(info.get(each) or 0) or None for each in limits)
        self.load_format = FLASH_RL if info.get("load_format") == FLASH_RL else "auto"
        # SGLang's loader of this format chooses fp8 where no kind was given, and the server does not say so.
        unnamed = "fp8" if self.load_format == FLASH_RL else ""
        self.quantization = str(info.get("quantization") or unnamed)
        self._ranks, self._stages = (int(info.get(each) or 1) for each in ("tp_size", "pp_size"))
        # SGLang makes room for adapters on experts if their last layer is a target.
        targets = {each.rpartition(".")[2] for each in info.get("lora_target_modules") or ["all"]}
        self._keeps_experts = bool(info.get("enable_lora") and targets & {"all", "down_proj"})
        if not self.dialect.tried:
            log.warning("SGLang %s is newer than any that echo2d was tried with", version)

    async def weights(self) -> str:
        """The label of its weights."""
        return str((await self.model()).get("weight_version"))

    async def model(self) -> Mapping[str, Any]:
        return await self.facts("/model_info")

    async def load(self) -> ServerLoad:
        """Sum the load of all ranks. EngineFault: there is no answer, or it lacks these numbers."""
        answer = await self.call("GET", "/v1/loads?include=core")
        try:
            ranks = answer["loads"]
            return ServerLoad(
                sum(int(rank["num_running_reqs"]) for rank in ranks),
                sum(int(rank["num_waiting_reqs"]) for rank in ranks),
                max(float(rank["token_usage"]) for rank in ranks),
                sum(int(rank["max_running_requests"]) for rank in ranks),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerRefused(f"SGLang /v1/loads: expected numbers per rank: {error}") from error

    async def pause(self, mode: str) -> None:
        await self.order("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.order("/continue_generation", {"torch_empty_cache": False})

    async def abort_all(self) -> None:
        await self.order("/abort_request", {"rid": "", "abort_all": True})

    async def abort(self, rid: str) -> None:
        """Abort one request.

        All ids must have the same length: SGLang aborts every request whose id begins with `rid`.
        """
        await self.order("/abort_request", {"rid": rid})

    async def flush(self) -> None:
        await self.order("/flush_cache?timeout=5", {})

    async def relabel(self, label: str) -> None:
        """Change the label of the weights, and nothing else."""
        # Without the key `abort_all_requests`, SGLang would abort all requests.
        await self.order(
            "/update_weight_version", {"new_version": label, "abort_all_requests": False}
        )

    async def call_inside(self, body: Mapping[str, Any], *, timeout_s: float) -> int:
        """Have each rank call our module; returns their number. ServerRefused: SGLang refused."""
        asked = {
            "serialized_named_tensors": [_NO_TENSORS] * self._ranks,
            "load_format": IN_SCHEDULER,
            "selector": "target",
            **body,
        }
        await self.order("/begin_weight_update", {"selector": "target"})
        try:
            await self.order("/update_weights_from_tensor", asked, timeout_s=timeout_s)
        finally:
            await self.order("/end_weight_update", {})
        return self._ranks * self._stages

    async def update(self, body: Mapping[str, Any], *, timeout_s: float) -> tuple[bool, str]:
        """Ask for an update from disk; return whether it succeeded, and SGLang's message.

        Lost: no answer came.
        """
        status, answer = await self.ask_admin("POST", "/update_weights_from_disk", body, timeout_s)
        facts = answer if isinstance(answer, dict) else {}
        return status == 200 and facts.get("success") is True, error_text(
            facts.get("message", answer)
        )

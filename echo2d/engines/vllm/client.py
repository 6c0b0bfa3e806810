"""Calls vLLM's paths over HTTP and reads their answers. It makes no decision."""

import logging
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from echo2d.engines.server.admission import ServerLoad
from echo2d.engines.server.http_client import CALL_S_MAX, ServerClient, ServerRefused
from echo2d.errors import EngineFault

_OLDEST, _NEWEST = (
    (0, 32, 0),
    (0, 32, 0),
)  # the first that reports spans, and the newest that was tried
_NEEDED = ("/pause", "/resume", "/collective_rpc", "/weight_info", "/update_weight_version")

log = logging.getLogger("echo2d.engines")


def tried(version: str) -> bool:
    """Whether echo2d was tried with this release, or with a newer one. EngineFault: it is too old, or none."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found else (0, 0, 0)
    if number < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise EngineFault(
            f"vLLM {version or '(unknown version)'} does not report per-token weight versions; "
            f"use {oldest} or newer"
        )
    return number <= _NEWEST


class VllmClient(ServerClient):
    NAME: ClassVar[str] = "vLLM"
    ADAPTERS: ClassVar[str] = "/v1/"
    CONTEXT_FLAG: ClassVar[str] = "--max-model-len"
    # A call that is answered with 500 closes its connection.
    keeps_admin: ClassVar[bool] = False
    model = ""  # the name of its weights, once it was probed
    _running_max = 1

    def __init__(self, url: str, api_key: str = "", _admin_key: str = "") -> None:
        """vLLM has one key."""
        super().__init__(url, api_key)

    def generate(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Stream the chunks of one request."""
        named = {**body, "model": body["model"] or self.model}
        return self.stream("/inference/v1/generate", named)

    async def ready(self) -> bool:
        """Return whether a starting server takes requests."""
        try:
            await self.call("GET", "/health")
        except EngineFault:
            return False
        return True

    async def probe(self) -> None:
        """Find out the server's version, paths and limits. EngineFault: echo2d cannot use this server."""
        version = str((await self.facts("/version")).get("version", ""))
        known = tried(version)
        paths = (await self.facts("/openapi.json")).get("paths", {})
        for path in _NEEDED:
            if path not in paths:
                raise EngineFault(
                    f"vLLM does not serve {path}: start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
                )
        if not known:
            log.warning("vLLM %s is newer than any that echo2d was tried with", version)
        models, state = await self.facts("/v1/models"), await self._state()
        if state is None or state.get("new_runner"):
            raise EngineFault(
                "vLLM's workers lack our extension, or have a model runner that it does not know: start the server "
                "with --worker-extension-cls echo2d_worker.Echo2dWorker and VLLM_USE_V2_MODEL_RUNNER=0"
            )
        if state.get("logprobs") != "processed_logprobs":
            raise EngineFault(
                f"vLLM reports {state.get('logprobs')}, which do not know the temperature: start the server with "
                "--logprobs-mode processed_logprobs"
            )
        if state.get("drafts"):
            raise EngineFault(
                "vLLM reports other logprobs for drafted tokens: start the server without --speculative-config"
            )
        try:
            self.model = str(models["data"][0]["id"])
            self.quantization = str(state["quantization"])
            self.kv_dtype = str(state["kv_dtype"])
            self.context_max, self._running_max = int(state["context"]), int(state["running_max"])
            self.adapters_max = int(state["adapters_max"]) or None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineFault(f"vLLM says of itself what is not understood: {error!r}") from error

    async def weights(self) -> str:
        """The label of its weights."""
        return str((await self.facts("/weight_info")).get("weight_version"))

    async def directory(self) -> str | None:
        """From where its workers loaded their weights; empty: a load failed halfway. None: it is not known."""
        state = await self._state()
        return None if state is None else str(state.get("directory"))

    async def _state(self) -> Mapping[str, Any] | None:
        """What the first worker says of itself; None: it has no extension of ours."""
        try:
            return dict((await self._in_workers("echo2d_state", {}, CALL_S_MAX))[0])
        except (ServerRefused, LookupError, TypeError, ValueError):
            return None

    async def load(self) -> ServerLoad:
        """EngineFault: there is no answer, or it lacks these numbers."""
        text = str(await self.call("GET", "/metrics"))

        def gauges(name: str) -> list[float]:
            """The values of all engines: one of each data-parallel rank."""
            found = re.findall(rf"^vllm:{name}{{.*}} ([\d.e+-]+|nan|inf)$", text, re.MULTILINE)
            values = [float(each) for each in found] or [0.0]
            if not math.isfinite(sum(values)):
                raise ServerRefused(f"vLLM /metrics: {name} is {sum(values)}")
            return values

        running, waiting = gauges("num_requests_running"), gauges("num_requests_waiting")
        usage = max(gauges("kv_cache_usage_perc"))
        return ServerLoad(
            int(sum(running)), int(sum(waiting)), usage, len(running) * self._running_max
        )

    async def pause(self, mode: str, *, clears: bool) -> None:
        await self.order(f"/pause?mode={mode}&clear_cache={str(clears).lower()}", {})

    async def resume(self) -> None:
        await self.order("/resume", {})

    async def abort_all(self) -> None:
        await self.order("/abort_requests", {"request_ids": []})

    async def abort(self, rid: str) -> None:
        # vLLM puts these words before the id of a request.
        await self.order(
            "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{rid}"]}
        )

    async def relabel(self, label: str) -> None:
        """Change the label of the weights, and nothing else."""
        await self.order("/update_weight_version", {"new_version": label})

    async def load_weights(
        self, directory: Path, files: Sequence[str], *, timeout_s: float
    ) -> None:
        """Have all workers load these files."""
        asked = {"directory": str(directory), "files": "\n".join(files)}
        await self._in_workers("echo2d_load", asked, timeout_s)

    async def call_inside(self, *, timeout_s: float) -> int:
        """Have each worker call our module; returns their number."""
        return len(await self._in_workers("echo2d_memory", {}, timeout_s) or ())

    async def _in_workers(self, method: str, kwargs: Mapping[str, str], timeout_s: float) -> Any:
        """The answer of each worker to a call of our extension."""
        body = {"method": method, "kwargs": kwargs, "timeout": timeout_s}
        status, answer = await self.ask_admin("POST", "/collective_rpc", body, timeout_s + 5.0)
        if status != 200:
            raise ServerRefused(f"vLLM /collective_rpc {method}: {status}")
        return answer.get("results") if isinstance(answer, dict) else None

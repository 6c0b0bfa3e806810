"""A server with SGLang's HTTP on a real socket, its shapes and its traps, and the fake engine's policy behind it.

Each fault that a test can order was observed in SGLang, or read in its source (docs/design/sglang.md). Its prefix cache
is real in one respect: a request that reuses KV of other weights gets logprobs that no version gives.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from echo2d.engines.fake import fake_token
from echo2d.engines.layout import file_tensor_digests
from echo2d.errors import EngineFault
from tests.support.engine_harness import VOCAB_SIZE

HOST = "127.0.0.1"
Trap = Literal[
    "refuse",
    "updated_anyway",
    "rolled_back",
    "die",
    "hang",
    "drop_answer",
    "old_label",
    "no_pause",
    "files_change",
]


@dataclass
class _Request:
    rid: str
    prompt: list[int]
    salt: str
    max_new: int
    seed: int
    stop: frozenset[int]
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)  # (old version, tokens by then)
    adapter: str = ""
    kv: str | None = None  # the weights that made its KV; None: it has none yet
    aborted: bool = False
    cached: int = 0

    def spans(self, current: str) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, end in [*self.events, (current, len(self.output))]:
            start = spans[-1]["end"] if spans else 0
            if spans and end <= start:
                continue
            spans.append({"version": version, "start": start, "end": end})
        return spans


class SglangDouble:
    """version: of SGLang, as it reports it. traps: the outcomes of the next updates, in turn."""

    def __init__(
        self,
        *,
        version: str = "0.5.23",
        incremental: bool = True,
        dummy: bool = False,
        deterministic: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.version, self.incremental = version, incremental
        self.deterministic = deterministic
        self.info = info or {}  # facts that it reports
        self.load_format = "dummy" if dummy else "auto"
        self.traps: list[Trap] = []
        self.calls: list[str] = []
        self.updates: list[dict[str, Any]] = []
        # The version's name in the scheduler, and in the process that answers.
        self.label, self.shown = "default", "default"
        self.model_path = "/nowhere"
        self.weights = "none"  # the label of the weights in memory
        self.digests: dict[str, bytes] = {}
        # Adapters: the directory that each name got first, and the tensors of those that are loaded, the newest last.
        self.adapter_paths: dict[str, str] = {}
        self.adapters: dict[str, dict[str, bytes]] = {}
        self.adapters_max = 3
        self.refuses_adapters = False
        self.loses_aborts = 0  # how many of the next aborts do nothing
        self.paused: str | None = None
        self.sick = False
        self.running_max = 4096
        self.token_usage = 0.0
        self.waiting_extra = 0
        # If set, this many tokens of a request are made, and none is sent.
        self.silent_until: int | None = None
        # The next `cuts` streams break off after `cut_after` tokens, as by an error in SGLang.
        self.cuts, self.cut_after = 0, 20
        self.live: dict[str, _Request] = {}
        self.cache: dict[tuple[str, tuple[int, ...]], str] = {}  # salted prompt -> KV's weights
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._runner: web.AppRunner | None = None
        self.asked = asyncio.Event()  # an update was requested
        self._closing = asyncio.Event()
        self.url = ""

    @staticmethod
    @asynccontextmanager
    async def serving(**options: Any) -> AsyncIterator["SglangDouble"]:
        double = SglangDouble(**options)
        await double.open()
        try:
            yield double
        finally:
            await double.die()

    async def open(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._ping)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/openapi.json", self._paths)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/v1/models", self._models)
        for path, handler in {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._relabel,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
        }.items():
            app.router.add_post(path, handler)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, port)
        await site.start()
        assert site._server is not None
        self.url = f"http://{HOST}:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]

    async def die(self) -> None:
        """End the server and every connection."""
        runner, self._runner = self._runner, None
        self._closing.set()
        if runner is not None:
            for protocol in list(runner.server.connections if runner.server else ()):
                if protocol.transport is not None:
                    protocol.transport.abort()
            await runner.cleanup()

    # --- routes that report

    async def _health(self, _: web.Request) -> web.Response:
        self.calls.append("health")
        self.sick |= self.paused is not None
        return web.Response(status=503 if self.sick else 200)

    async def _ping(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.sick else 200)

    async def _server_info(self, _: web.Request) -> web.Response:
        facts: dict[str, Any] = {"version": self.version, "api_key": "secret", **self.info}
        if self.deterministic:
            facts["enable_deterministic_inference"] = True
        return web.json_response(facts)

    async def _paths(self, request: web.Request) -> web.Response:
        paths = {resource.canonical: str(resource) for resource in request.app.router.resources()}
        return web.json_response({"paths": paths})

    async def _model_info(self, _: web.Request) -> web.Response:
        self.calls.append("model_info")
        return web.json_response({"model_path": self.model_path, "weight_version": self.shown})

    async def _loads(self, _: web.Request) -> web.Response:
        rank = {
            "num_running_reqs": len(self.live),
            "num_waiting_reqs": self.waiting_extra,
            "token_usage": self.token_usage,
            "max_running_requests": self.running_max,
        }
        return web.json_response({"loads": [rank]})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ("base", *self.adapters)]})

    # --- generation

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        known = {
            "max_new_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop_token_ids",
            "no_stop_trim",
        }
        for name in (
            body["sampling_params"].keys() - known - {"skip_special_tokens", "sampling_seed"}
        ):
            return web.json_response({"error": f"unknown field `{name}`"}, status=400)
        while self.paused is not None:
            await self._resumed.wait()
        params = body["sampling_params"]
        seed = 0 if params["temperature"] == 0 else params["sampling_seed"]
        stop = frozenset(params["stop_token_ids"])
        request = _Request(
            body["rid"], body["input_ids"], body["cache_salt"], params["max_new_tokens"], seed, stop
        )
        request.adapter = body.get("lora_path", "")
        if request.adapter and not await self._has_adapter(request.adapter):
            return web.json_response({"error": "it has never been loaded"}, status=400)
        self.live[request.rid] = request
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        try:
            with suppress(ConnectionError):
                await self._write(request, response, http)
        finally:
            self.live.pop(request.rid, None)
        return response

    async def _write(
        self, request: _Request, response: web.StreamResponse, http: web.Request
    ) -> None:
        sent = 0
        while True:
            if self.cuts and sent >= self.cut_after:
                self.cuts -= 1
                assert http.transport is not None
                http.transport.abort()
                return
            silent = self.silent_until is not None
            if self.silent_until is not None and len(request.output) >= self.silent_until:
                await asyncio.sleep(0)
                continue
            finish = self._step(request)
            if finish is None and (
                silent or (len(request.output) - sent < 4 and len(request.output) > 1)
            ):
                await asyncio.sleep(0)
                continue
            chunk = self._chunk(request, sent, finish)
            sent = len(request.output)
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if finish is not None:
                await response.write(b"data: [DONE]\n\n")
                return
            while self.paused is not None and not request.aborted:
                await self._resumed.wait()
            await asyncio.sleep(0)

    def _step(self, request: _Request) -> dict[str, Any] | None:
        if request.aborted:
            return {"type": "abort", "message": "Aborted"}
        if self.paused is not None:
            return None
        key = (request.salt, tuple(request.prompt))
        weights = request.adapter or self.weights
        if request.kv is None:
            request.cached = len(request.prompt) - 1 if key in self.cache else 0
            request.kv = self.cache.setdefault(key, weights)
        label = weights if request.kv == weights else f"mixture of {request.kv} and {weights}"
        context = [*request.prompt, *request.output]
        token, logprob = fake_token(
            label, context, sample=0, rng_seed=request.seed, vocab_size=VOCAB_SIZE
        )
        request.output.append(token)
        request.logprobs.append(logprob)
        if token in request.stop:
            return {"type": "stop", "matched": token}
        return (
            {"type": "length", "length": request.max_new}
            if len(request.output) == request.max_new
            else None
        )

    def _chunk(self, request: _Request, sent: int, finish: dict[str, Any] | None) -> dict[str, Any]:
        first = sent if self.incremental else 0
        ids, logprobs = request.output[first:], request.logprobs[first:]
        if (
            finish is not None
            and finish["type"] == "abort"
            and request.aborted
            and self.incremental
            and not ids
        ):
            ids, logprobs = (
                request.output[-1:],
                request.logprobs,
            )  # as SGLang answers for one that waits
        pairs = zip(logprobs, request.output[len(request.output) - len(logprobs) :], strict=True)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": finish,
            "weight_version": self.shown,
            "completion_tokens": len(request.output),
            "cached_tokens": request.cached,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        }
        if finish is not None:
            meta["weight_versions"] = request.spans(self.label)
        return {"output_ids": ids, "meta_info": meta}

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.calls.append("abort_all" if body.get("abort_all") else "abort")
        if self.loses_aborts:
            self.loses_aborts -= 1
            return web.Response()
        if body.get("abort_all") or body["rid"] in self.live:
            for rid, request in self.live.items():
                request.aborted |= bool(body.get("abort_all")) or rid.startswith(body["rid"])
        self._wake()
        return web.Response()

    def _wake(self) -> None:
        self._resumed.set()
        if self.paused is not None:
            self._resumed = asyncio.Event()

    # --- versions

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await http.json())["mode"]
        self.calls.append(f"pause {mode}")
        if self.traps[:1] == ["no_pause"]:
            self.traps.pop(0)
            return web.json_response({"error": {"message": "not now"}}, status=400)
        self._resumed.clear()
        self.paused = mode
        for request in self.live.values():
            request.aborted |= mode == "abort"
            if mode == "retract":
                request.kv = None
        self._wake()
        return web.json_response({"status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self.calls.append("continue")
        self.paused = None
        self._resumed.set()
        return web.json_response({"status": "ok"})

    async def _flush(self, _: web.Request) -> web.Response:
        self.calls.append("flush")
        return web.Response(text="Cache flushed.") if self._flushed() else web.Response(status=400)

    def _flushed(self) -> bool:
        busy = any(request.kv is not None and not request.aborted for request in self.live.values())
        if busy and (self.paused is None or self.paused == "in_place"):
            return False
        self.cache.clear()
        return True

    async def _relabel(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.calls.append("relabel")
        if body.get("abort_all_requests", True):
            for request in self.live.values():
                request.aborted = True
        self.label = self.shown = body["new_version"]
        return web.json_response({"success": True})

    async def _load_adapter(self, http: web.Request) -> web.Response:
        body = await http.json()
        name = body["lora_name"]
        self.calls.append(f"load {name}")
        if name in self.adapters:
            return web.json_response({"error": {"message": "already loaded"}}, status=400)
        if self.refuses_adapters:
            return web.json_response({"error": {"message": "header too large"}}, status=400)
        self.adapter_paths[name] = body["lora_path"]
        if not await self._has_adapter(name):
            return web.json_response({"error": {"message": "header too large"}}, status=400)
        return web.json_response({"success": True, "loaded_adapters": self.adapter_paths})

    async def _has_adapter(self, name: str) -> bool:
        """Load the adapter, again if it was evicted, from the directory that its name got first."""
        if name not in self.adapters:
            try:
                path = Path(self.adapter_paths[name])
                self.adapters[name] = await asyncio.to_thread(file_tensor_digests, path)
            except (KeyError, OSError, EngineFault):
                return False
        self.adapters[name] = self.adapters.pop(name)
        while len(self.adapters) > self.adapters_max:
            self.adapters.pop(next(iter(self.adapters)))
        return True

    async def _unload_adapter(self, http: web.Request) -> web.Response:
        name = (await http.json())["lora_name"]
        self.calls.append(f"unload {name}")
        assert all(request.adapter != name for request in self.live.values())
        self.adapters.pop(name, None)
        return web.json_response({"success": True})

    async def _update(self, http: web.Request) -> web.StreamResponse:  # noqa: C901 - one trap after the other
        body = await http.json()
        self.calls.append("update")
        self.updates.append(body)
        self.asked.set()
        while self.paused is None and self.live:
            await self._resumed.wait()  # for ever, while there are requests
            await asyncio.sleep(0)
        trap = self.traps.pop(0) if self.traps else None
        if (body.get("load_format") or self.load_format) == "dummy":
            return _answer(False, "Failed to get model loader")
        if trap == "refuse":
            self.weights = f"half of {self.weights}"
            return _answer(
                False, "Failed to update weights: device lost. Rolling back to original weights."
            )
        if trap == "die":
            await self.die()
        if trap == "hang":
            await self._closing.wait()
        path, label = body["model_path"], body["weight_version"]
        self.digests = await asyncio.to_thread(file_tensor_digests, Path(path))
        if trap == "files_change":
            (Path(path) / "config.json").touch()
        self.weights, self.model_path = label, path
        if trap == "rolled_back":  # it claims to have its old weights, but has the new ones
            return _answer(
                False, "Failed to update weights: a file. Rolling back to original weights."
            )
        if trap == "old_label":
            return _answer(True, "Succeeded to update model weights.")
        for request in self.live.values():
            if request.output:
                request.events.append((self.label, len(request.output)))
        self.label = label
        if trap == "drop_answer":
            assert http.transport is not None
            http.transport.abort()
        if body["flush_cache"] and (trap == "updated_anyway" or not self._flushed()):
            return _answer(
                False,
                "Weights were updated, but the cache was not flushed because requests are still running",
            )
        self.shown = label
        return _answer(True, "Succeeded to update model weights.")


def _answer(success: bool, message: str) -> web.Response:
    body = {"success": success, "message": message, "num_paused_requests": 0}
    return web.json_response(body, status=200 if success else 400)

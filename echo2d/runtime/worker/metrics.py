"""Exports a worker's metrics to Prometheus: `GET /metrics`, on loopback, `worker.metrics_port`.

The port answers `GET /healthz` and `GET /readyz` too (`net/http/health.py`).
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import Counter, Histogram

from echo2d.core.relay.events import Heard
from echo2d.core.worker.events import (
    EngineRefitFailed,
    EngineRefitted,
    GenerationFailed,
    SampleProgressed,
)
from echo2d.errors import path_fault
from echo2d.net.http.health import Health, add_health_routes
from echo2d.runtime.process.prometheus import PAUSE_BUCKETS_S, Family, LoopMetrics, number

_HOST = "127.0.0.1"

_FAMILIES = (
    Family("echo2d_connected", "1 while connected to the coordinator", number("connected")),
    Family(
        "echo2d_serving_version",
        "Policy version all engines serve; no sample: none",
        number("serving_version"),
    ),
    Family(
        "echo2d_publish_seq",
        "Newest publish accepted; older ones are refused",
        number("publish_seq"),
    ),
    Family("echo2d_slots", "Samples the engines run at once", number("slots")),
    Family("echo2d_running_samples", "Samples now in the engines", number("running")),
    Family("echo2d_links", "Open peer links", number("links")),
)


class WorkerMetrics(LoopMetrics[Mapping[str, Any]]):
    """Counts the events of the worker's loop; `_FAMILIES` are read from its status."""

    def __init__(self) -> None:
        super().__init__(_FAMILIES)
        registry, self._started = self.registry, False
        self._tokens = Counter("echo2d_tokens_generated", "By the engines", registry=registry)
        self._failed = Counter(
            "echo2d_generations_failed", "Leases that an engine gave up", registry=registry
        )
        self._refits_failed = Counter(
            "echo2d_refits_failed", "Refits that failed", registry=registry
        )
        self._pause_s = Histogram(
            "echo2d_refit_pause_seconds",
            "Time in which an engine generated nothing for a refit",
            buckets=PAUSE_BUCKETS_S,
            registry=registry,
        )

        self._recomputed = Counter(
            "echo2d_kv_tokens_dropped",
            "Tokens whose KV caches its refits dropped",
            registry=registry,
        )
        self._recompute_s = Histogram(
            "echo2d_recompute_seconds",
            "Time in which an engine computed KV caches again after a refit",
            buckets=PAUSE_BUCKETS_S,
            registry=registry,
        )

    def handled(self, event: object) -> None:
        """Count one event; the loop calls this for every event it has handled."""
        # `Heard` wraps every peer message, so count the message inside.
        self.count(event.message if isinstance(event, Heard) else event)
        match event:
            case SampleProgressed(tokens=tokens):
                self._tokens.inc(len(tokens))
            case GenerationFailed():
                self._failed.inc()
            case EngineRefitted() if not self._started:
                # The time of a start is no refit pause.
                self._started = True
            case EngineRefitted(pause_s=pause_s, recompute_s=recompute_s):
                self._pause_s.observe(pause_s)
                self._recomputed.inc(event.recomputed_tokens)
                if recompute_s is not None:
                    self._recompute_s.observe(recompute_s)
            case EngineRefitFailed():
                self._refits_failed.inc()
            case _:
                pass


class Watched(Health, Protocol):
    """What metrics and probes need of the worker."""

    def status(self) -> Mapping[str, Any]: ...


async def serve_metrics(
    port: int, metrics: LoopMetrics[Mapping[str, Any]], worker: Watched
) -> None:
    """Serve until cancelled. OperatorFault: cannot listen on the port."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(worker.status()), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/metrics", answer)
    add_health_routes(app, worker)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, _HOST, port).start()
        except OSError as error:
            raise path_fault(f"metrics_port: cannot listen on {_HOST}:{port}", error) from error
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()

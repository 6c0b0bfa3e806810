"""A worker's numbers for Prometheus, on loopback only."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from echo2d.errors import OperatorFault
from echo2d.runtime.metrics import LoopMetrics

HOST = "127.0.0.1"


async def serve_metrics(port: int, metrics: LoopMetrics, status: Callable[[], Mapping[str, Any]]) -> None:
    """GET /metrics, until cancelled. OperatorFault: the port cannot be had."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(status()), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            raise OperatorFault(f"metrics_port: cannot listen on {HOST}:{port}: {error.strerror}") from error
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()

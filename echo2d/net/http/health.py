"""`GET /healthz` and `GET /readyz`: what probes and load balancers ask, without a credential.

    /healthz   the process works; restart it if it does not
    /readyz    it can do its work now; wait, or send callers elsewhere, if it cannot

The answer is one line: "ok", or with status 503 the reason. It names no peer, version or token, so
everybody may read it, and making it takes no longer than refusing a stranger.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from aiohttp import web

from echo2d.net.http.json_fields import Handler


class Health(Protocol):
    """A daemon that says what is wrong with it, in one line; empty: nothing is."""

    def unhealthy(self) -> str: ...

    def unready(self) -> str: ...


def add_health_routes(app: web.Application, health: Health) -> None:
    app.router.add_get("/healthz", _answer(health.unhealthy))
    app.router.add_get("/readyz", _answer(health.unready))


def _answer(wrong: Callable[[], str]) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        reason = wrong()
        status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
        return web.Response(text=(reason or "ok") + "\n", status=status)

    return answer

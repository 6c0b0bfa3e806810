"""Serves an application with limits on connections, and answers what is not HTTP.

Not here: the limits (`admission`) and TLS (`tls_accept`).
"""

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_request import BaseRequest
from aiohttp.web_urldispatcher import MatchInfoError

from echo2d.net.http.admission import DOOR
from echo2d.net.http.tls_accept import TlsSite
from echo2d.net.security.tls import Tls

# After a refusal the rest of the request is still read for this long. Otherwise the caller's sending
# would fail before the caller reads the answer.
LINGERING_S = 1.0


def _callers_mistakes(record: logging.LogRecord) -> bool:
    """A log filter: malformed HTTP is the caller's mistake, so log one line without the stack."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        # The lines after the first are bytes of the request.
        record.msg, record.args = "not HTTP: %s", (error.message.partition("\n")[0],)
        record.exc_info = record.exc_text = None
    return True


def _guard_errors(app: web.Application, server: web.Server) -> None:
    """Let the application also answer what is not HTTP, for which aiohttp finds no route."""
    make, nowhere = server.request_factory, MatchInfoError(web.HTTPBadRequest())
    nowhere.add_app(app)

    def request_factory(*arguments: Any) -> BaseRequest:
        request = make(*arguments)
        if isinstance(request, web.Request):
            # The application replaces this as soon as it finds the route.
            request._match_info = nowhere  # noqa: SLF001
        return request

    server.request_factory = request_factory


class _Runner(web.AppRunner):
    """Limits connections from the moment the server exists."""

    async def setup(self) -> None:
        await super().setup()
        assert self.server is not None
        self.app[DOOR].watch(self.server)
        _guard_errors(self.app, self.server)


def make_runner(app: web.Application, *, shutdown_timeout_s: float) -> web.AppRunner:
    """A runner that serves the application.

    It limits connections of unknown callers, decompresses nothing, and cancels a handler when its
    caller hangs up. Malformed HTTP is answered with 400 and logged as one line.
    """
    logging.getLogger("aiohttp.server").addFilter(_callers_mistakes)
    # Idle connections of authenticated callers are closed after 75 s. Our clients close theirs after 15 s.
    return _Runner(
        app,
        access_log=None,
        keepalive_timeout=75.0,
        auto_decompress=False,
        handler_cancellation=True,
        lingering_time=LINGERING_S,
        shutdown_timeout=shutdown_timeout_s,
    )


def make_site(runner: web.AppRunner, host: str, port: int, tls: Tls | None) -> web.BaseSite:
    """The site where the runner listens after `start`. OSError from `start`: it cannot listen there."""
    if tls is None:
        return web.TCPSite(runner, host, port)
    return TlsSite(runner, host, port, tls.listener)

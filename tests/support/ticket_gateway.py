"""A gateway double that hands out tickets, and records the requests that it gets."""

from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from echo2d.net.security.auth import TokenFile
from echo2d.net.security.tls import Tls

SECRET = "a-secret"
TICKET = {"task": "sums", "seed": 1, "temperature": 1.0, "max_tokens": 8, "silence_s": 60.0}


def token_file(url: str = "") -> TokenFile:
    return TokenFile("app", "gateway", SECRET, "00" * 32, url)


@dataclass
class TicketGateway:
    """tickets: rows still to be handed out. refusals: its first answers, in order."""

    url: str = ""
    tickets: deque[dict[str, Any]] = field(default_factory=deque)
    refusals: deque[tuple[int, dict[str, str]]] = field(default_factory=deque)
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    end_answer: tuple[int, dict[str, Any]] = (200, {"ended": True, "differs": ""})
    calls: list[tuple[Mapping[str, str], dict[str, Any]]] = field(default_factory=list)
    asked: int = 0

    def add(self, *rows: int, **changes: Any) -> None:
        self.tickets += [{**TICKET, "ticket": f"t{row}", "row": row, **changes} for row in rows]

    @asynccontextmanager
    async def serving(
        self, port: int = 0, tls: Tls | None = None
    ) -> AsyncIterator["TicketGateway"]:
        @web.middleware
        async def first(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._first(request, handler)

        app = web.Application(middlewares=[first])
        app.router.add_post("/v1/episodes", self._episode)
        app.router.add_post("/v1/episodes/{ticket}/end", self._end)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            context = None if tls is None else tls.listener
            await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
            scheme = "http" if tls is None else "https"
            self.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    async def _first(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {SECRET}":
            return web.json_response({"error": {"message": "unknown secret"}}, status=401)
        if self.refusals:
            status, headers = self.refusals.popleft()
            return web.json_response({"error": {"message": "no"}}, status=status, headers=headers)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _episode(self, request: web.Request) -> web.Response:
        self.asked += 1
        if not self.tickets:
            return web.json_response({}, status=503, headers={"Retry-After": "0.05"})
        return web.json_response(self.tickets.popleft())

    async def _end(self, request: web.Request) -> web.Response:
        self.ends[request.match_info["ticket"]] = await request.json()
        status, body = self.end_answer
        return web.json_response(body, status=status)

    async def _generate(self, request: web.Request) -> web.Response:
        self.calls.append((request.headers.copy(), await request.json()))
        return web.json_response({"choices": []})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy"}]})

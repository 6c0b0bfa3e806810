"""The endpoint that environments call: it is on loopback, in front of the gateway, and needs no secret.

    an environment's client --X-Session-ID, or the ticket--> here --secret and ticket--> gateway

It passes `generate` on unchanged, and adds the ticket to which a call belongs. Clients of `verifiers`
do not repeat a call, so a call waits here while the gateway restarts. The clients name their rollout
in X-Session-ID, so one client serves all episodes. An episode that makes no call for `silence_s` is
given up, because its ticket has expired then.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Self

from aiohttp import web

from echo2d.net.gateway.episodes import TICKET_HEADER
from echo2d.runtime.envs.gateway_link import GatewayAnswer, GatewayAway, GatewayLink
from echo2d.runtime.envs.tickets import PlayerTicket

_SESSION_HEADER = "X-Session-ID"
GENERATE = "/inference/v1/generate"
MODELS = "/v1/models"
# This is more than the gateway accepts, so that the gateway, not this endpoint, refuses a body that is too large.
_BODY_BYTES_MAX = 16 << 20
MODELS_S_MAX = 60.0


class SilentEpisode(Exception):  # noqa: N818 - an outcome
    """The environment made no call until its ticket expired."""


class PlayingEpisode:
    """One episode that is being played. Calls with its ticket, or with one of its sessions, belong to it."""

    def __init__(self, ticket: PlayerTicket, sessions: dict[str, "PlayingEpisode"]) -> None:
        self.ticket = ticket
        self._sessions, self._bound = sessions, set[str]()
        self._calls, self._silence = 0, asyncio.timeout(ticket.silence_s)

    def bind(self, session: str) -> None:
        """Let calls with this X-Session-ID belong to the episode from now on."""
        self._sessions[session] = self
        self._bound.add(session)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Count a call while it runs: until it ends, the environment is not silent."""
        self._calls += 1
        self._wait(None)
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._wait(asyncio.get_running_loop().time() + self.ticket.silence_s)

    def _wait(self, until: float | None) -> None:
        # A call may outlive its episode.
        if self._bound:
            self._silence.reschedule(until)

    @asynccontextmanager
    async def lasting(self) -> AsyncIterator["PlayingEpisode"]:
        self.bind(self.ticket.ticket)
        try:
            async with self._silence:
                try:
                    yield self
                finally:
                    for session in self._bound:
                        del self._sessions[session]
                    self._bound.clear()
        except TimeoutError:
            if not self._silence.expired():
                raise
            raise SilentEpisode(
                f"the environment made no call for {self.ticket.silence_s:g} s"
            ) from None


class TicketEndpoint:
    """The endpoint of all episodes of this process, as a context."""

    def __init__(self, link: GatewayLink) -> None:
        self._link = link
        self._sessions: dict[str, PlayingEpisode] = {}
        app = web.Application(client_max_size=_BODY_BYTES_MAX)
        app.router.add_post(GENERATE, self._generate)
        app.router.add_get(MODELS, self._models)
        # If a caller hangs up, its call at the gateway ends, too, because its answer would be lost.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        self.url = ""

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def open(self, ticket: PlayerTicket) -> PlayingEpisode:
        return PlayingEpisode(ticket, self._sessions)

    async def _generate(self, request: web.Request) -> web.Response:
        session = request.headers.get(_SESSION_HEADER, "")
        episode = self._sessions.get(request.headers.get(TICKET_HEADER, session))
        if episode is None:
            return _refusal(
                HTTPStatus.BAD_REQUEST,
                "this call belongs to no running episode. An agent that is not trained, such as a "
                "user simulator or a judge, needs a client of its own",
            )
        ticket, body = episode.ticket, await request.read()
        headers = {TICKET_HEADER: ticket.ticket, _SESSION_HEADER: session or ticket.ticket}
        with episode.calling():
            try:
                answer = await self._link.ask(
                    "POST", GENERATE, body, headers, patience_s=ticket.silence_s
                )
            except GatewayAway as away:
                return _refusal(HTTPStatus.BAD_GATEWAY, str(away))
        return _to_response(answer)

    # aiohttp passes the request to every handler, hence the unused argument.
    async def _models(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return _to_response(await self._link.ask("GET", MODELS, patience_s=MODELS_S_MAX))


def _to_response(answer: GatewayAnswer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, content_type=answer.content_type)


def _refusal(status: HTTPStatus, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "ticket"}}, status=status)

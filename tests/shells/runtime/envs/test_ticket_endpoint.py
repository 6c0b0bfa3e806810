import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from echo2d.runtime.envs.gateway_link import GatewayLink
from echo2d.runtime.envs.ticket_endpoint import SilentEpisode, TicketEndpoint
from echo2d.runtime.envs.tickets import PlayerTicket
from tests.support.ticket_gateway import SECRET, TICKET, TicketGateway, token_file


def ticket(name: str = "t1", silence_s: float = 60.0) -> PlayerTicket:
    return PlayerTicket.read({**TICKET, "ticket": name, "row": 1, "silence_s": silence_s})


@pytest.fixture
async def gateway() -> AsyncIterator[TicketGateway]:
    async with TicketGateway().serving() as gateway:
        yield gateway


@pytest.fixture
async def endpoint(gateway: TicketGateway) -> AsyncIterator[TicketEndpoint]:
    async with GatewayLink(gateway.url, token_file()) as link, TicketEndpoint(link) as endpoint:
        yield endpoint


async def called(endpoint: TicketEndpoint, **headers: str) -> tuple[int, str]:
    url = endpoint.url.removesuffix("/v1") + "/inference/v1/generate"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"token_ids": [1]}, headers=headers) as response,
    ):
        return response.status, await response.text()


async def test_calls_of_an_episode_get_its_ticket_and_the_secret(
    gateway: TicketGateway, endpoint: TicketEndpoint
) -> None:
    async with endpoint.open(ticket()).lasting() as episode:
        episode.bind("a-trace")
        assert (await called(endpoint, **{"X-Session-ID": "a-trace"}))[0] == 200
        assert (await called(endpoint, **{"X-Echo2d-Episode": "t1"}))[0] == 200
    assert [body for _, body in gateway.calls] == [{"token_ids": [1]}] * 2
    for headers, _ in gateway.calls:
        assert headers["X-Echo2d-Episode"] == "t1"
        assert headers["Authorization"] == f"Bearer {SECRET}"
    assert [headers["X-Session-ID"] for headers, _ in gateway.calls] == ["a-trace", "t1"]


async def test_a_call_without_a_running_episode_is_refused_locally(
    gateway: TicketGateway, endpoint: TicketEndpoint
) -> None:
    async with endpoint.open(ticket()).lasting() as episode:
        episode.bind("a-trace")
        assert (await called(endpoint, **{"X-Session-ID": "another"}))[0] == 400
    status, text = await called(endpoint, **{"X-Session-ID": "a-trace"})
    assert status == 400
    assert "a client of its own" in text
    assert gateway.calls == []


async def test_a_refusal_of_the_gateway_reaches_the_client(
    gateway: TicketGateway, endpoint: TicketEndpoint
) -> None:
    gateway.refusals += [(503, {"Retry-After": "0.05"}), (410, {})]
    async with endpoint.open(ticket()).lasting():
        status, text = await called(endpoint, **{"X-Echo2d-Episode": "t1"})
    assert (status, "no" in text) == (410, True)


async def test_an_environment_that_makes_no_call_is_given_up(endpoint: TicketEndpoint) -> None:
    with pytest.raises(SilentEpisode, match=r"no call for 0\.05 s"):
        async with endpoint.open(ticket(silence_s=0.05)).lasting():
            await asyncio.get_running_loop().create_future()


async def test_a_timeout_of_the_environment_does_not_count_as_silence(
    endpoint: TicketEndpoint,
) -> None:
    with pytest.raises(TimeoutError, match="a tool"):
        async with endpoint.open(ticket()).lasting():
            raise TimeoutError("a tool")

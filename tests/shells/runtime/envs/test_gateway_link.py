import asyncio
import logging
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.errors import OperatorFault, PeerFault
from echo2d.net.security.tls import Authority
from echo2d.runtime.envs.gateway_link import GatewayAnswer, GatewayAway, GatewayLink
from tests.support.free_port import free_port
from tests.support.ticket_gateway import TicketGateway, token_file

HANG_S = 30.0


async def test_the_link_retries_after_the_time_that_the_gateway_asks_for() -> None:
    async with TicketGateway().serving() as gateway:
        gateway.refusals += [(503, {"Retry-After": "0.1"}), (429, {"Retry-After": "nonsense"})]
        async with GatewayLink(gateway.url, token_file()) as link:
            answer = await link.ask("GET", "/v1/models", patience_s=HANG_S)
    assert answer.fields()["data"] == [{"id": "policy"}]


async def test_a_permanent_refusal_is_given_to_the_caller() -> None:
    async with TicketGateway().serving() as gateway:
        gateway.refusals += [(503, {"Retry-After": "40"})] * 2
        async with GatewayLink(gateway.url, token_file()) as link:
            answer = await link.ask("GET", "/v1/models", patience_s=5.0)
    assert (answer.status, answer.reason()) == (503, "503: no")


async def test_the_link_waits_for_a_dead_gateway_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "echo2d.envs")
    port, gateway = free_port(), TicketGateway()
    async with (
        GatewayLink(f"http://127.0.0.1:{port}", token_file()) as link,
        asyncio.timeout(HANG_S),
        asyncio.TaskGroup() as tasks,
    ):
        asked = [
            tasks.create_task(link.ask("GET", "/v1/models", patience_s=None)) for _ in range(3)
        ]
        while not caplog.messages:  # noqa: ASYNC110 - a log line tells nobody
            await asyncio.sleep(0.01)
        async with gateway.serving(port):
            answers = [await each for each in asked]
    assert [each.status for each in answers] == [200] * 3
    assert [message.split(" url=")[0] for message in caplog.messages] == [
        "the gateway is away",
        "the gateway answers again",
    ]


async def test_a_request_is_given_up_after_its_time() -> None:
    async with GatewayLink(f"http://127.0.0.1:{free_port()}", token_file()) as link:
        with pytest.raises(GatewayAway, match="does not answer"):
            await link.ask("GET", "/v1/models", patience_s=0.0)


async def test_the_link_accepts_tls_only_under_the_authority_of_the_run() -> None:
    ours, other = (Authority(Ed25519PrivateKey.generate()) for _ in range(2))
    tls = await asyncio.to_thread(ours.coordinator)
    async with TicketGateway().serving(tls=tls) as gateway:
        token = replace(token_file(gateway.url), authority=ours.certificate)
        async with GatewayLink(gateway.url, token) as link:
            assert (await link.ask("GET", "/v1/models", patience_s=HANG_S)).status == 200
        wrong = replace(token, authority=other.certificate)
        async with GatewayLink(gateway.url, wrong) as link:
            with pytest.raises(OperatorFault, match="certificate"):
                await link.ask("GET", "/v1/models", patience_s=HANG_S)


def test_an_answer_that_is_no_json_object_is_a_fault() -> None:
    with pytest.raises(PeerFault):
        GatewayAnswer(200, b"[]").fields()
    assert GatewayAnswer(502, b"<html>\nbad gateway").reason() == "502: <html> bad gateway"

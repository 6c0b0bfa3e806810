"""A client of the Tinker API in a few lines over HTTP, which costs less CPU than the official one."""

import asyncio
import itertools
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Self

import aiohttp

from echo2d.net.tinker.routes import PREFIX
from tests.support.tinker_calls import ADAM, Row, forward_backward
from tests.support.tinker_recipes import BASE_MODEL

RANK = 8


class HttpClient:
    """One client with one model. RuntimeError from any call: the server refused it, or the operation failed."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self._http, self._url, self._key = http, url + PREFIX, key
        self._numbers = itertools.count(1)
        self.session = self.model = ""

    async def open(self) -> Self:
        """Open a session, and make a model."""
        opened = await self.post("create_session", {"sdk_version": "0.38.0"})
        self.session = opened["session_id"]
        lora = {"rank": RANK, "seed": 1}
        asked = {"session_id": self.session, "model_seq_id": 0, "base_model": BASE_MODEL}
        self.model = f"{self.session}:train:0"
        await self.result(await self.submit("create_model", asked | {"lora_config": lora}))
        return self

    async def step(self, data: Sequence[Row]) -> None:
        """One forward_backward and one optim_step, sent together as the official client does."""
        futures = [
            await self.submit("forward_backward", self.body(data)),
            await self.submit("optim_step", self.numbered(adam_params=ADAM)),
        ]
        for future in futures:
            await self.result(future)

    def numbered(self, **fields: Any) -> dict[str, Any]:
        return {"model_id": self.model, "seq_id": next(self._numbers), **fields}

    def body(self, data: Sequence[Row]) -> bytes:
        """A forward_backward with the next number."""
        return forward_backward(data, model=self.model, number=next(self._numbers)).body

    async def submit(self, route: str, body: bytes | dict[str, Any]) -> str:
        """Send an operation or a sample, and return the name of its future."""
        return str((await self.post(route, body))["request_id"])

    async def result(self, future: str) -> bytes | dict[str, Any]:
        """Wait for a result: protobuf, or a JSON object."""
        while True:
            body = {"request_id": future, "allow_metadata_only": False}
            async with self._send("retrieve_future", body) as answer:
                if answer.status == HTTPStatus.REQUEST_TIMEOUT:
                    continue
                if answer.status != HTTPStatus.OK:
                    raise RuntimeError(f"{answer.status} {await answer.text()}")
                if answer.content_type != "application/json":
                    return bytes(await answer.read())
                found: dict[str, Any] = await answer.json()
            if "error" in found:
                raise RuntimeError(found["error"])
            return found

    async def post(self, route: str, body: bytes | dict[str, Any]) -> dict[str, Any]:
        while True:
            async with self._send(route, body) as answer:
                if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
                    await asyncio.sleep(1.0)
                    continue
                if answer.status != HTTPStatus.OK:
                    raise RuntimeError(f"{route}: {answer.status} {await answer.text()}")
                found: dict[str, Any] = await answer.json()
                return found

    def _send(self, route: str, body: bytes | dict[str, Any]) -> Any:
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        return self._http.post(f"{self._url}/{route}", headers={"X-API-Key": self._key}, **data)

"""Damaged requests to the public API of a real coordinator, over one connection that survives.

Every answer is a success or a JSON error with a code; no answer is 5xx except "busy"; afterwards the run goes on.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.net.api import routes as api_routes
from echo2d.net.security.auth import read_token_file
from echo2d.runtime.coordinator.main import Opened, core_machine
from tests.support.fuzz import (
    INTERESTING_FLOATS,
    INTERESTING_INTS,
    INTERESTING_TEXTS,
    Fuzz,
    damaged,
)
from tests.support.polling import HANG_S
from tests.support.scripted_core import learner, make_config, make_snapshot, serving

NO_BODY = (204, 304)
METHODS = ("GET", "POST", "PUT", "HEAD", "DELETE", "PATCH", "OPTIONS", "BREW")
HEADERS = (
    ("Authorization", "Bearer"), ("Authorization", "Bearer \xff\xfe"), ("Authorization", "Basic QQ=="),
    ("Content-Encoding", "gzip"), ("Content-Type", "text/plain; charset=nonsense"), ("Content-Type", "\xff"),
    ("Cookie", "a=b; c"), ("Range", "bytes=0-"), ("X-Echo2d-Peer", "f" * 32), ("X-Echo2d-Nonce", "zz"),
    ("Accept", "*/*;q=x"), ("Accept-Encoding", "gzip, br"), ("If-None-Match", '"x"'), ("Origin", "null"),
    ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "x"),
)  # fmt: skip


@dataclass(slots=True)
class Request:
    method: str
    path: str
    body: Any = None
    headers: list[tuple[str, str]] = field(default_factory=list)

    def encode(self) -> bytes:
        body = (
            b""
            if self.body is None
            else self.body
            if isinstance(self.body, bytes)
            else json.dumps(self.body).encode()
        )
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(body)}",
        ]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


class Connection:
    """One keep-alive connection; opened again only after an answer that said so."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.opened = self.closed = 0

    async def ask(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            self.opened += 1
        reader, writer = self._streams
        writer.write(request.encode())
        async with asyncio.timeout(HANG_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split(" ")[1])
            headers = {
                name.lower(): value
                for name, _, value in (line.partition(": ") for line in head[1:-2])
            }
            length = (
                0
                if request.method == "HEAD" or status in NO_BODY
                else int(headers.get("content-length", "0"))
            )
            body = await reader.readexactly(length)
        if headers.get("connection") == "close" or is_from_the_parser(status, headers):
            await self.close()
            self.closed += 1
        return status, headers, body

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            await self._streams[1].wait_closed()
            self._streams = None


def good_requests(bearer: str, out: Path) -> list[Request]:
    digest, key = "ab" * 32, "cd" * 32
    made = [
        Request("POST", "/v1/enrol", {"key": key, "proof": key + key}),
        Request("POST", "/v1/learner/session", {"resume_step": 0}),
        Request("POST", "/v1/versions", {"version": 0, "epoch": 1, "path": str(out / "0")}),
        Request("POST", "/v1/versions", {"version": 0, "epoch": 1, "upload": True}),
        Request("PUT", "/v1/versions/0/files/sub/model.safetensors?epoch=1", b"x" * 40),
        Request("GET", "/v1/batches/1?epoch=1"),
        Request(
            "POST",
            "/v1/batches/1/commit",
            {
                "batch_digest": digest,
                "epoch": 1,
                "t_train_s": 1.0,
                "scores": [[0, 0, 0.1, -1.0], [0, 1, 0.2, 2.0]],
            },
        ),
        Request("POST", "/v1/batches/1/refuse", {"groups": [1], "reasons": ["stale"], "epoch": 1}),
        Request("POST", "/v1/learner/checkpoint", {"step": 0, "epoch": 1}),
        *(Request("GET", path) for path in ("/v1/status", "/metrics", "/", "/v1/worker")),
    ]
    for request in made:
        request.headers = [("Authorization", f"Bearer {bearer}")]
    return made


def a_value(rng: random.Random) -> Any:
    scalars = (
        rng.choice(INTERESTING_INTS),
        rng.choice(INTERESTING_FLOATS),
        rng.choice(INTERESTING_TEXTS),
    )
    return rng.choice(
        (*scalars, None, True, -1, 1 << 80, "\ud800", [], {}, [1, "\ud800"], "ab" * 32, "\x00")
    )


def spoil(rng: random.Random, good: Request) -> Request:
    wrong = Request(good.method, good.path, good.body, list(good.headers))
    for _ in range(rng.randint(1, 2)):
        match rng.randrange(6):
            case 0:
                wrong.method = rng.choice(METHODS)
            case 1:
                wrong.path = spoiled_path(rng, wrong.path)
            case 2:
                wrong.headers = [*wrong.headers[: rng.randrange(2)], rng.choice(HEADERS)]
            case 3 if isinstance(wrong.body, dict) and wrong.body:
                name = rng.choice(sorted(wrong.body))
                wrong.body = {**wrong.body, name: a_value(rng)}
            case 4 if isinstance(wrong.body, dict):
                wrong.body = damaged(
                    rng,
                    json.dumps(wrong.body).encode(),
                    [b"NaN", b'"\\ud800"', b"[" * 64, b"1e999"],
                )
            case _:
                wrong.body = rng.choice(
                    (
                        b"",
                        b"\xff",
                        b"[]",
                        b"{}",
                        b"null",
                        b"9" * 5000,
                        json.dumps(a_value(rng)).encode(),
                    )
                )
    return wrong


def spoiled_path(rng: random.Random, path: str) -> str:
    pieces = (
        "..",
        "%2e%2e",
        "%00",
        "%ff",
        "//",
        "?epoch=",
        "&epoch=2",
        "9" * 30,
        "-1",
        "%E2%80%AE",
        "x" * 300,
        "#",
    )
    at = rng.randrange(1, len(path) + 1)
    return path[:at] + rng.choice(pieces) + path[at + rng.choice((0, 1, 3)) :]


def is_from_the_parser(status: int, headers: dict[str, str]) -> bool:
    """It was not HTTP, and never came as far as the API."""
    return status == 400 and headers.get("content-type", "").startswith("text/plain")


def judge(request: Request, status: int, headers: dict[str, str], body: bytes) -> None:
    told = f"{request.encode()[:600]!r} -> {status} {body[:200]!r}"
    assert status < 500 or status == 503, told
    if status >= 400 and request.method != "HEAD" and not is_from_the_parser(status, headers):
        assert headers["content-type"].startswith("application/json"), told
        answer = json.loads(body)
        if isinstance(answer["error"], dict):  # OpenAI's shape
            assert answer["error"].keys() >= {"message", "type", "param", "code"}, told
            detail = answer["error"]["message"]
        else:
            detail = answer["detail"]
        assert "\n" not in detail, told
        assert "Traceback" not in detail, told


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CoordinatorConfig:
    monkeypatch.setattr(api_routes, "LONG_POLL_S", 0.01)
    return make_config(tmp_path)


@asynccontextmanager
async def attacked(config: CoordinatorConfig) -> AsyncIterator[tuple[Opened, Connection]]:
    async with serving(config, core_machine) as opened:
        connection = Connection(int(opened.url.rpartition(":")[2]))
        yield opened, connection
        await connection.close()


async def test_any_damaged_request_gets_an_answer_and_the_run_goes_on(
    fuzz: Fuzz, config: CoordinatorConfig, tmp_path: Path
) -> None:
    run_dir, rng = config.run.run_dir, fuzz.rng
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with attacked(config) as (opened, connection):
        token = await asyncio.to_thread(read_token_file, run_dir / "tokens" / "learner.token")
        good = good_requests(token.secret, tmp_path / "out")
        for _ in fuzz.share(0.05):
            request = spoil(rng, rng.choice(good))
            status, headers, body = await connection.ask(request)
            judge(request, status, headers, body)
        assert connection.opened <= connection.closed + 1 < len(fuzz.share(0.05)) // 2
        async with learner(run_dir, opened) as client:
            session = await client.open_session((await client.status())["committed_step"])
            assert session.epoch > 0
            await client.publish((await client.status())["committed_step"], snapshot)


def good_calls(bearer: str) -> list[Request]:
    """With every field that is read; "logprobs" is of another kind for each endpoint."""
    common: dict[str, Any] = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["x"],
        "seed": 1,
    }
    sampling = {**common, "stop_token_ids": [3], "skip_special_tokens": False}
    asked = {"model": "policy", "user": "me", "stream_options": {"include_usage": True}, **sampling}
    chat = {
        "messages": [{"role": "user", "content": "12"}],
        "chat_template_kwargs": {"think": True},
        "logprobs": True,
    }
    made = [
        Request("GET", "/v1/models"),
        Request("POST", "/v1/chat/completions", {**asked, **chat, "stream": False}),
        Request(
            "POST", "/v1/completions", {**asked, "prompt": "12>", "logprobs": 0, "stream": True}
        ),
        Request("POST", "/v1/completions", {"model": "policy", "prompt": [2, 3]}),
        Request(
            "POST",
            "/inference/v1/generate",
            {"model": "policy", "token_ids": [2], "sampling_params": sampling},
        ),
    ]
    for request in made:
        request.headers = [
            ("Authorization", f"Bearer {bearer}"),
            ("X-Session-ID", "s"),
            ("X-Echo2d-Min-Version", "0"),
        ]
    return made


async def test_any_damaged_call_of_the_gateway_gets_an_answer(fuzz: Fuzz, tmp_path: Path) -> None:
    """There is no worker: what is in order is told so after a moment."""
    template = tmp_path / "chat.jinja"
    await asyncio.to_thread(
        template.write_text, "{{ messages[0].content + messages[0].name | default('>') }}"
    )
    gateway = {"gateway.enabled": True, "gateway.chat_template": template, "gateway.wait_s": 0.01}
    config, rng = make_config(tmp_path, **gateway), fuzz.rng
    async with attacked(config) as (opened, connection):
        async with learner(config.run.run_dir, opened) as client:
            await client.open_session(0)
            await client.publish(0, await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0"))
        token = await asyncio.to_thread(opened.coordinator._access.create, "app", "gateway")
        good = good_calls(token.secret)
        for request in good:
            status, _, body = await connection.ask(request)
            assert status == (200 if request.method == "GET" else 409), body
        for _ in fuzz.share(0.03):
            request = spoil(rng, rng.choice(good))
            status, headers, body = await connection.ask(request)
            judge(request, status, headers, body)
        facts = opened.coordinator.status()["gateway"]
        assert (facts["waiting"], facts["running"]) == (0, 0)


async def test_a_request_that_is_not_http_ends_its_own_connection_only(
    config: CoordinatorConfig,
) -> None:
    rng = random.Random(3)
    async with attacked(config) as (_, connection):
        whole = Request("POST", "/v1/learner/session", {"resume_step": 0}).encode()
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", connection._port)
            writer.write(
                damaged(
                    rng,
                    whole,
                    [b"Transfer-Encoding: chunked\r\n", b"\x16\x03\x01", b"GET http://x/"],
                )
            )
            writer.write_eof()
            with suppress(ConnectionError):
                async with asyncio.timeout(HANG_S):
                    answer = await reader.read()
                assert not answer.startswith(b"HTTP/1.1 5"), answer
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        status, _, _ = await connection.ask(Request("GET", "/"))
        assert status == 200

"""Checks the fields of API requests. Anything unexpected is an HttpRefusal with status 400."""

import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from echo2d.core.base.codec import INT_MAX

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpRefusal(Exception):  # noqa: N818 - an answer, not an error
    """The request is answered with this status, short code and line."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail


def malformed(detail: str) -> HttpRefusal:
    return HttpRefusal(HTTPStatus.BAD_REQUEST, "malformed", detail)


def overloaded() -> HttpRefusal:
    return HttpRefusal(
        HTTPStatus.SERVICE_UNAVAILABLE, "busy", "the coordinator is overloaded; try again"
    )


def secret_of(request: web.Request) -> str:
    """The secret in the request's Authorization header. HttpRefusal: there is none."""
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret or not secret.isascii():
        raise HttpRefusal(
            HTTPStatus.UNAUTHORIZED, "credential", "expected Authorization: Bearer SECRET"
        )
    return secret.strip()


def integer(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= INT_MAX:
        raise malformed(f"{name}: expected a non-negative integer")
    return value


def integer_text(text: str | None, name: str) -> int:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > len(str(INT_MAX)):
        raise malformed(f"{name}: expected a non-negative integer")
    return integer(int(text), name)


def text(value: Any, name: str) -> str:
    """Text that can be encoded. JSON can also contain half of a character (a lone surrogate)."""
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise malformed(f"{name}: expected text") from error
    return str(value)


def seconds(value: Any, name: str) -> float:
    # The limit is thirty years. Infinity and NaN are refused, too.
    if type(value) not in (int, float) or not 0 <= value <= 1e9:
        raise malformed(f"{name}: expected a number of seconds")
    return float(value)


def from_hex(value: Any, name: str, length: int) -> bytes:
    try:
        data = bytes.fromhex(value)
    except (TypeError, ValueError):
        data = b""
    if len(data) != length:
        raise malformed(f"{name}: expected {length} bytes in hex")
    return data


async def fields(
    request: web.Request, required: set[str], optional: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The JSON object in the body, with exactly these fields."""
    body = await json_object(request)
    for name in sorted(body.keys() - required - optional):
        raise malformed(f"{name[:64]}: unknown field")
    for name in sorted(required - body.keys()):
        raise malformed(f"{name}: missing")
    return body


async def json_object(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body."""
    return json_object_of(await request.read())


def json_object_of(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed("the body is not JSON") from error
    if not isinstance(body, dict):
        raise malformed("expected a JSON object")
    return body

"""The gateway's errors, in the shape that OpenAI's clients understand.

{"error": {"message": one line, "type": ..., "param": the field at fault or null,
           "code": a short word}}
"""

from http import HTTPStatus
from typing import Any

from aiohttp import web

from echo2d.net.http.json_fields import HttpRefusal

# The newest version that wrote a token of the answer; in a 409, the version that is served now.
VERSION_HEADER = "X-Echo2d-Version"
# The oldest version that wrote a token of the answer.
FIRST_VERSION_HEADER = "X-Echo2d-Version-First"

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.CONFLICT: "conflict_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
# A repeat of the call may be served later: when a version is published, a slot is free, or a refit is over.
_RETRYABLE = frozenset(
    {HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
)


class Unread(ConnectionResetError):  # noqa: N818 - an outcome
    """The caller does not read its answer, so the connection is closed without an error."""


class CallRefusal(HttpRefusal):
    """An HttpRefusal that names the field at fault, or the version that is served."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        param: str | None = None,
        version: int | None = None,
    ) -> None:
        super().__init__(status, code, detail)
        self.param, self.version = param, version


def unusable(param: str, detail: str, code: str = "invalid_value") -> CallRefusal:
    """400: this field of the request cannot be served."""
    return CallRefusal(HTTPStatus.BAD_REQUEST, code, f"{param}: {detail}", param=param)


def error_body(
    status: int, code: str, detail: str, *, refusal: HttpRefusal | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(
        HTTPStatus(status), "invalid_request_error" if status < 500 else "server_error"
    )
    body: dict[str, Any] = {"message": detail, "type": kind, "param": None, "code": code}
    if isinstance(refusal, CallRefusal):
        body["param"] = refusal.param
        if code == "version":
            body["current_version"] = refusal.version
    return {"error": body}


def error_response(
    status: int, code: str, detail: str, *, refusal: HttpRefusal | None = None
) -> web.Response:
    headers: dict[str, str] = {}
    if status in _RETRYABLE:
        headers["Retry-After"] = "1"
    elif status < 500:
        headers["X-Should-Retry"] = "false"
    if isinstance(refusal, CallRefusal) and refusal.version is not None:
        headers[VERSION_HEADER] = str(refusal.version)
    return web.json_response(
        error_body(status, code, detail, refusal=refusal), status=status, headers=headers
    )

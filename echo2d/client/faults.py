"""The exceptions that a call of the client raises, and the refusal that leads to each."""

import json
from http import HTTPStatus
from typing import Any

from echo2d.errors import OperatorFault, PeerFault


class Fenced(PeerFault):
    """A newer learner session has taken the run; this one is over."""


class Unreachable(OperatorFault):
    """No coordinator ever answered at this URL."""


class TokenRefused(OperatorFault):
    """A coordinator answers, and does not accept the token."""


class NotResumable(OperatorFault):
    """The run cannot continue at this step.

    The step is before the last durable checkpoint, or beyond the steps of the run.
    """


class PromptsOver(PeerFault):
    """A task's prompts have ended, so this batch can never be filled: the run is over."""


class Unanswered(PeerFault):
    """A call was not answered in time after `hurry`. It may still have had its effect."""


class NoAnswer(Exception):  # noqa: N818 - not an error yet
    """No usable answer; a retry may help."""


class NoRoom(NoAnswer):
    """The coordinator's disk is full; the same call works once there is room again."""


def json_object_of(answer: bytes) -> dict[str, Any]:
    """PeerFault: the answer is not a JSON object."""
    try:
        body = json.loads(answer)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise PeerFault("the coordinator's answer is not a JSON object")
    return body


def refusal_of(status: int, answer: bytes) -> Exception:
    """The fault for an answer with this status, 400 or above."""
    try:
        body = json_object_of(answer)
    except PeerFault:
        body = {}
    code, detail = str(body.get("error", f"http {status}")), str(body.get("detail", ""))
    if status in (
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    ):
        return NoAnswer(f"{code}: {detail}")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return TokenRefused(f"the coordinator does not accept this token: {detail}")
    if code == "full":
        return NoRoom(detail)
    if code == "build":
        return OperatorFault(detail)
    if code == "fenced":
        return Fenced(detail)
    if code == "ended":
        return PromptsOver(detail)
    if code == "resume":
        return NotResumable(f"cannot resume: {detail}")
    if code == "held":
        return OperatorFault(detail)
    return PeerFault(f"{code}: {detail}")

"""Sends a call's tokens to its caller, whole or in pieces, and keeps a record of the call.

A call ends when its caller hangs up, has its secret revoked, or does not read its answer. An error
before the first piece is a plain answer with its status; a later error is sent as the last piece.
Not here: reading requests.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web

from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.work.calls.events import CallAsked, CallId, CallRefused, ChoiceGrew
from echo2d.errors import PeerFault
from echo2d.net.gateway.conversations import Conversation
from echo2d.net.gateway.errors import (
    FIRST_VERSION_HEADER,
    VERSION_HEADER,
    CallRefusal,
    Unread,
    error_body,
)
from echo2d.net.gateway.requests import Ask
from echo2d.net.gateway.responses import ChoiceOutput, OutputStep, usage_of
from echo2d.net.http.json_fields import HttpRefusal
from echo2d.net.security.auth import Caller
from echo2d.texts.model_texts import ModelTexts

# The time to send one piece, or a whole answer. A call is ended if its caller reads more slowly.
SEND_S_MAX = 60.0

STATUSES: Mapping[str, HTTPStatus] = {
    "busy": HTTPStatus.TOO_MANY_REQUESTS,
    "version": HTTPStatus.CONFLICT,
    "revoked": HTTPStatus.CONFLICT,
    "late": HTTPStatus.SERVICE_UNAVAILABLE,
    "stopping": HTTPStatus.SERVICE_UNAVAILABLE,
    "failed": HTTPStatus.BAD_GATEWAY,
}


class OpenCall(Protocol):
    """A call that was asked for."""

    async def next(self) -> ChoiceGrew | CallRefused:
        """The next event of the call, until every choice has finished."""

    async def stop(self, choice: int) -> None:
        """Stop this choice, because the caller wants no more of it."""


class Answering(Protocol):
    """What answering needs from the coordinator's runtime."""

    model: str

    def caller(self, request: web.Request) -> Caller:
        """Denied or Refusal: the request has no valid secret (any more)."""

    def open(self, make: Callable[[CallId], CallAsked]) -> AbstractAsyncContextManager[OpenCall]:
        """Open a call, which ends with the context. Unread: its caller reads too slowly."""

    def record(self, entry: dict[str, Any]) -> None:
        """Keep the record of a call, if records are kept."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How an endpoint spells its answers."""

    kind: str
    object: str
    id_prefix: str
    whole: Callable[[ChoiceOutput], dict[str, Any]]
    chunk: Callable[[ChoiceOutput, OutputStep, bool], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One validated request."""

    ask: Ask
    prompt: bytes  # token ids, int32
    session: str
    texts: ModelTexts
    spelling: Spelling  # the format of its answer
    # The sampling fields that the request sets, for a call under a ticket.
    named: Mapping[str, Any] = field(default_factory=dict)
    conversation: Conversation | None = None  # None: the prompt came in tokens, or as one text

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


class GrowingAnswer:
    """The answer to one request, from its call's first token to its record."""

    def __init__(self, backend: Answering, request: web.Request, question: Question) -> None:
        self._backend = backend
        self._request = request
        self._question = question
        self._caller = backend.caller(request).name
        ask, texts, spelling = question.ask, question.texts, question.spelling
        self._outputs = [
            ChoiceOutput(index, texts, ask.stops, special=ask.special)
            for index in range(ask.choices)
        ]
        identity = spelling.id_prefix + secrets.token_hex(12)
        self._head = {"id": identity, "created": int(time.time()), "model": backend.model}

    async def give(self, make: Callable[[CallId], CallAsked]) -> web.StreamResponse:
        # If the caller hangs up, this task is cancelled, and "gone" stays the outcome.
        began, outcome = time.monotonic(), "gone"
        try:
            response, outcome = await self._give(make)
        except Unread:
            outcome = "slow"
            if self._request.transport is not None:
                # Abort the connection: closing it would wait for the caller to read.
                self._request.transport.abort()
            raise
        except (HttpRefusal, PeerFault) as fault:
            outcome = getattr(fault, "code", "malformed")
            raise
        finally:
            self._backend.record(self._record(outcome, time.monotonic() - began))
        return response

    async def _give(self, make: Callable[[CallId], CallAsked]) -> tuple[web.StreamResponse, str]:
        """Send the answer; returns it, and how it ended."""
        async with self._backend.open(make) as call:
            steps = self._steps(call)
            if self._question.ask.stream and self._question.spelling.chunk is not None:
                chunks = _Chunks(self._head, self._question, self._outputs)
                return await _stream(self._request, steps, chunks)
            async for _ in steps:
                pass
        response = await asyncio.to_thread(_whole, self._head, self._question, self._outputs)
        async with _patience():
            await response.prepare(self._request)
            await response.write_eof()
        return response, "done"

    async def _steps(self, call: OpenCall) -> AsyncIterator[tuple[ChoiceOutput, OutputStep]]:
        """Take the events of the call until every choice has finished.

        Refusal: the call was refused, or its caller no longer has a valid secret.
        """
        while not all(output.finish for output in self._outputs):
            event = await call.next()
            self._backend.caller(self._request)
            if isinstance(event, CallRefused):
                raise CallRefusal(
                    STATUSES[event.code], event.code, event.detail, version=event.version
                )
            output = self._outputs[event.choice]
            if output.finish is None:
                step = output.take(event)
                if step.cut:
                    await call.stop(output.index)
                yield output, step

    def _record(self, outcome: str, seconds: float) -> dict[str, Any]:
        ask = self._question.ask
        return {
            **self._head,
            "kind": self._question.spelling.kind,
            "caller": self._caller,
            "session": self._question.session,
            "outcome": outcome,
            "seconds": round(seconds, 3),
            "sampling": {
                **asdict(ask.sampling),
                "seed": ask.rng_seed,
                "stop": ask.stops,
            },
            "prompt": unpack_tokens(self._question.prompt),
            "choices": [output.record() for output in self._outputs],
        }


def _whole(
    head: Mapping[str, Any], question: Question, outputs: Sequence[ChoiceOutput]
) -> web.Response:
    """The whole answer. Blocking: thousands of tokens are decoded one by one."""
    spelling = question.spelling
    said = {**head, "object": spelling.object}
    if spelling.kind == "generate":
        said = {"request_id": head["id"], "prompt_token_ids": None, "model": head["model"]}
    choices, usage = (
        [spelling.whole(output) for output in outputs],
        usage_of(question.prompt_tokens, outputs),
    )
    versions = [span["version"] for output in outputs for span in output.spans]
    ends = {FIRST_VERSION_HEADER: min(versions), VERSION_HEADER: max(versions)} if versions else {}
    headers = {name: str(version) for name, version in ends.items()}
    return web.json_response({**said, "choices": choices, "usage": usage}, headers=headers)


class _Chunks:
    """An answer in pieces."""

    def __init__(
        self, head: Mapping[str, Any], question: Question, outputs: Sequence[ChoiceOutput]
    ) -> None:
        spelling = question.spelling
        kind = "chat.completion.chunk" if spelling.kind == "chat" else spelling.object
        self._head = {**head, "object": kind}
        self._question, self._outputs = question, outputs
        self._begun: set[int] = set()

    def of(self, output: ChoiceOutput, step: OutputStep) -> dict[str, Any]:
        assert self._question.spelling.chunk is not None
        choice = self._question.spelling.chunk(output, step, output.index not in self._begun)
        self._begun.add(output.index)
        usage = {"usage": None} if self._question.ask.include_usage else {}
        return {**self._head, "choices": [{**choice, **output.versions()}], **usage}

    def last(self) -> dict[str, Any] | None:
        usage = usage_of(self._question.prompt_tokens, self._outputs)
        return (
            {**self._head, "choices": [], "usage": usage}
            if self._question.ask.include_usage
            else None
        )


async def _stream(
    request: web.Request, steps: AsyncIterator[tuple[ChoiceOutput, OutputStep]], chunks: _Chunks
) -> tuple[web.StreamResponse, str]:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    try:
        async for output, step in steps:
            if not response.prepared:
                await response.prepare(request)
            await _send(response, json.dumps(chunks.of(output, step)))
    except (HttpRefusal, PeerFault) as fault:
        if not response.prepared:
            raise
        refusal = fault if isinstance(fault, HttpRefusal) else None
        status, code = getattr(fault, "status", 500), getattr(fault, "code", "malformed")
        await _send(response, json.dumps(error_body(status, code, str(fault), refusal=refusal)))
        return response, code
    last = chunks.last()
    for data in ([json.dumps(last)] if last is not None else []) + ["[DONE]"]:
        await _send(response, data)
    await response.write_eof()
    return response, "done"


async def _send(response: web.StreamResponse, data: str) -> None:
    async with _patience():
        await response.write(f"data: {data}\n\n".encode())


@asynccontextmanager
async def _patience() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(SEND_S_MAX):
            yield
    except TimeoutError as error:
        raise Unread("the caller does not read") from error

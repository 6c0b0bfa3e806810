"""The gateway's endpoints: what OpenAI's clients and verifiers' training client say, as calls on the run's workers.

    GET  /v1/models                 the policy, as one model
    POST /v1/chat/completions       messages through the snapshot's chat template; also streamed
    POST /v1/completions            a text or token ids; also streamed
    POST /inference/v1/generate     token ids in, token ids and logprobs out (vLLM's shape)

A bearer secret of role gateway. X-Session-ID: calls of one session go to one worker. X-Echo2d-Min-Version: 409 with the
version that is served, if none so new can be had. A caller that hangs up, or whose secret is revoked, ends its call.
Not here: slots, versions, which tokens are believed (`core/gateway_calls.py`).
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web
from blake3 import blake3

from echo2d.core.gateway_io import CallAsked, CallId, CallRefused, ChoiceGrew
from echo2d.core.ids import Version
from echo2d.core.trajectory import pack_tokens
from echo2d.errors import PeerFault
from echo2d.net.auth import Caller
from echo2d.net.fields import Refusal, integer_text, json_object
from echo2d.net.gateway.asks import (
    Ask,
    checked_text,
    read_ask,
    read_messages,
    read_tokens,
    wants_legacy_logprobs,
    wants_logprobs,
)
from echo2d.net.gateway.errors import VERSION_HEADER, CallRefusal, error_body, unusable
from echo2d.net.gateway.outputs import Output, Step, usage_of
from echo2d.net.gateway.texts import Texts

GATEWAY_PATHS = frozenset({"/v1/models", "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"})
MIN_VERSION_HEADER = "X-Echo2d-Min-Version"
SESSION_HEADER = "X-Session-ID"
PROMPT_TOKENS_MAX = 1 << 17  # as of a task's prompts: 512 KiB in a lease
COMPLETION_TOKENS = 16  # of a completion that does not say how many, as at OpenAI
PREFIX_TOKENS = 64  # prompts that begin alike belong together, if nothing else says so
SEND_S_MAX = 60.0  # for one chunk: who does not read has gone
TEMPLATE_OPTIONS_MAX = 32
OF_ITS_TEXT = frozenset({"detokenize", "output_kind", "spaces_between_special_tokens"})  # what `generate` means anyway

STATUSES: Mapping[str, HTTPStatus] = {
    "busy": HTTPStatus.TOO_MANY_REQUESTS,
    "version": HTTPStatus.CONFLICT,
    "revoked": HTTPStatus.CONFLICT,
    "late": HTTPStatus.SERVICE_UNAVAILABLE,
    "stopping": HTTPStatus.SERVICE_UNAVAILABLE,
    "failed": HTTPStatus.BAD_GATEWAY,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenCall(Protocol):
    """A call that was asked for."""

    async def next(self) -> ChoiceGrew | CallRefused:
        """What comes next, until every choice has finished."""

    async def stop(self, choice: int) -> None:
        """No more of this one."""


class Backend(Protocol):
    """What the endpoints need from the coordinator's runtime. max_new_tokens: of one choice, at most."""

    model: str
    vocab_size: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]

    def caller(self, request: web.Request) -> Caller:
        """Denied or Refusal: no valid secret (any more)."""

    def open(self, make: Callable[[CallId], CallAsked]) -> AbstractAsyncContextManager[OpenCall]:
        """The call ends with the context."""

    async def texts(self) -> Texts:
        """Of the newest published version. CallRefusal: there is none."""

    def newest(self) -> dict[str, Any] | None:
        """The newest published version, for people."""

    def record(self, entry: dict[str, Any]) -> None:
        """Keep it, if records are kept."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be gone on from. session: whose calls belong together."""

    tokens: tuple[int, ...]
    session: str


@dataclass(frozen=True, slots=True)
class Spelling:
    """How an endpoint says it."""

    kind: str
    object: str
    id_prefix: str
    whole: Callable[[Output], dict[str, Any]]
    chunk: Callable[[Output, Step, bool], dict[str, Any]] | None = None


class Endpoints:
    """The handlers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def models(self, request: web.Request) -> web.Response:  # noqa: ARG002 - aiohttp's signature
        newest = self._backend.newest()
        facts = {"id": self._backend.model, "object": "model", "created": 0, "owned_by": "echo2d", "version": newest}
        if newest is not None:
            facts["max_model_len"] = (await self._backend.texts()).context_max
        return web.json_response({"object": "list", "data": [facts]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        own = frozenset({"messages", "max_completion_tokens", "chat_template_kwargs", "return_token_ids"})
        ask, ids = read_ask(body, own, logprobs=wants_logprobs(body)), body.get("return_token_ids") is True
        messages, options = read_messages(body.get("messages")), _template_options(body.get("chat_template_kwargs"))
        texts = await self._backend.texts()
        tokens = await asyncio.to_thread(lambda: texts.encode(texts.render(messages, options), special=False))
        prompt = Prompt(tuple(tokens), self._session(request, body, messages[:2]))
        spelling = Spelling(
            "chat",
            "chat.completion",
            "chatcmpl-",
            lambda output: {**output.message(logprobs=ask.logprobs), **output.facts(ids=ids)},
            lambda output, step, first: output.delta(step, first=first, logprobs=ask.logprobs),
        )
        return await self._answer(request, ask, prompt, texts, spelling)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        own = frozenset({"prompt", "return_token_ids"})
        ask, ids = read_ask(body, own, logprobs=wants_legacy_logprobs(body)), body.get("return_token_ids") is True
        if ask.max_new_tokens is None:
            ask = replace(ask, max_new_tokens=COMPLETION_TOKENS)
        texts = await self._backend.texts()
        tokens = await _completion_prompt(body.get("prompt"), texts)
        prompt = Prompt(tokens, self._session(request, body, tokens[:PREFIX_TOKENS]))
        spelling = Spelling(
            "completion",
            "text_completion",
            "cmpl-",
            lambda output: {**output.completion(logprobs=ask.logprobs), **output.facts(ids=ids)},
            lambda output, step, _: output.completion_chunk(step, logprobs=ask.logprobs),
        )
        return await self._answer(request, ask, prompt, texts, spelling)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        for name in sorted(
            body.keys() - {"model", "token_ids", "sampling_params", "cache_salt", "priority", "request_id"}
        ):
            if body[name] not in (None, False):
                raise unusable(name[:64], "is not supported", "unsupported_value")
        given = body.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise unusable("sampling_params", "expected an object")
        logprobs = given.get("logprobs")
        if logprobs not in (None, 0, 1) or isinstance(logprobs, bool):
            raise unusable("logprobs", "engines report the sampled token's only: expected 1, 0 or null")
        ask = replace(read_ask(given, OF_ITS_TEXT, logprobs=logprobs is not None), stream=False)
        tokens = read_tokens(body.get("token_ids"), "token_ids", PROMPT_TOKENS_MAX)
        prompt = Prompt(tokens, self._session(request, body, tokens[:PREFIX_TOKENS]))
        spelling = Spelling(
            "generate",
            "",
            "gen-",
            lambda output: {**output.generated(logprobs=ask.logprobs), **output.facts(ids=False)},
        )
        return await self._answer(request, ask, prompt, await self._backend.texts(), spelling)

    # --- inside: asking

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = await json_object(request)
        if body.get("model") != self._backend.model:
            detail = f"model: there is only {self._backend.model!r} here"
            raise CallRefusal(HTTPStatus.NOT_FOUND, "model_not_found", detail, param="model")
        return body

    def _session(self, request: web.Request, body: Mapping[str, Any], prefix: Sequence[Any]) -> str:
        """Of a header or a field if there is one, else of how the prompt begins; of one caller only."""
        named = request.headers.get(SESSION_HEADER) or body.get("prompt_cache_key") or body.get("user")
        said = [self._backend.caller(request).name, "named" if named else "prefix", named or list(prefix)]
        return blake3(json.dumps(said, default=str).encode()).hexdigest()[:32]

    def _make(self, request: web.Request, ask: Ask, prompt: Prompt, texts: Texts) -> Callable[[CallId], CallAsked]:
        """The call, once all is in order."""
        if max(prompt.tokens) >= self._backend.vocab_size:
            raise unusable("prompt", f"token ids are below {self._backend.vocab_size}")
        room = self._room(len(prompt.tokens), ask.max_new_tokens, texts)
        header = request.headers.get(MIN_VERSION_HEADER)
        oldest = Version(0 if header is None else integer_text(header, MIN_VERSION_HEADER))
        ends = tuple(dict.fromkeys((*self._backend.stop_token_ids, *ask.stop_token_ids)))
        return lambda number: CallAsked(
            number, pack_tokens(prompt.tokens), ask.choices, room, ask.temperature, ask.top_p, ends, ask.rng_seed,
            oldest, prompt.session,
        )  # fmt: skip

    def _room(self, prompt_tokens: int, wanted: int | None, texts: Texts) -> int:
        """How many tokens a choice gets."""
        most, context = self._backend.max_new_tokens, texts.context_max
        if wanted is not None and wanted > most:
            raise unusable("max_tokens", f"at most {most} are given here")
        left = most if context is None else min(most, context - prompt_tokens)
        if prompt_tokens > PROMPT_TOKENS_MAX or left < (wanted or 1):
            limit = PROMPT_TOKENS_MAX if context is None else context
            detail = (
                f"this model's maximum context length is {limit} tokens; {prompt_tokens} and {wanted or 1} are too many"
            )
            raise unusable("prompt", detail, "context_length_exceeded")
        return wanted or left

    # --- inside: answering

    async def _answer(
        self, request: web.Request, ask: Ask, prompt: Prompt, texts: Texts, spelling: Spelling
    ) -> web.StreamResponse:
        outputs = [Output(index, texts, ask.stops, special=ask.special) for index in range(ask.choices)]
        head = {
            "id": spelling.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": self._backend.model,
        }
        began, outcome = time.monotonic(), "gone"
        try:
            async with self._backend.open(self._make(request, ask, prompt, texts)) as call:
                steps = self._steps(request, call, outputs)
                if ask.stream and spelling.chunk is not None:
                    response, outcome = await _stream(request, steps, _Chunks(head, spelling, ask, prompt, outputs))
                    return response
                async for _ in steps:
                    pass
            outcome = "done"
            return _whole(head, spelling, prompt, outputs)
        except (Refusal, PeerFault) as fault:
            outcome = getattr(fault, "code", "malformed")
            raise
        finally:
            sampling = {"temperature": ask.temperature, "top_p": ask.top_p, "seed": ask.rng_seed, "stop": ask.stops}
            self._backend.record(
                {
                    **head,
                    "kind": spelling.kind,
                    "caller": self._name(request),
                    "session": prompt.session,
                    "outcome": outcome,
                    "seconds": round(time.monotonic() - began, 3),
                    "sampling": sampling,
                    "prompt": prompt.tokens,
                    "choices": [output.record() for output in outputs],
                }
            )

    async def _steps(
        self, request: web.Request, call: OpenCall, outputs: Sequence[Output]
    ) -> AsyncIterator[tuple[Output, Step]]:
        """Until every choice has finished. Refusal: the call was, or its caller has no valid secret any more."""
        while not all(output.finish for output in outputs):
            event = await call.next()
            self._backend.caller(request)
            if isinstance(event, CallRefused):
                raise CallRefusal(STATUSES[event.code], event.code, event.detail, version=event.version)
            output = outputs[event.choice]
            if output.finish is None:
                step = output.take(event)
                if step.cut:
                    await call.stop(output.index)
                yield output, step

    def _name(self, request: web.Request) -> str:
        try:
            return self._backend.caller(request).name
        except (Refusal, PeerFault):
            return ""


def _whole(head: Mapping[str, Any], spelling: Spelling, prompt: Prompt, outputs: Sequence[Output]) -> web.Response:
    said = {**head, "object": spelling.object}
    if spelling.kind == "generate":
        said = {"request_id": head["id"], "prompt_token_ids": None, "model": head["model"]}
    choices, usage = [spelling.whole(output) for output in outputs], usage_of(len(prompt.tokens), outputs)
    newest = max((span["version"] for output in outputs for span in output.spans), default=None)
    headers = {} if newest is None else {VERSION_HEADER: str(newest)}
    return web.json_response({**said, "choices": choices, "usage": usage}, headers=headers)


class _Chunks:
    """An answer in pieces."""

    def __init__(
        self, head: Mapping[str, Any], spelling: Spelling, ask: Ask, prompt: Prompt, outputs: Sequence[Output]
    ) -> None:
        kind = "chat.completion.chunk" if spelling.kind == "chat" else spelling.object
        self._head = {**head, "object": kind}
        self._spelling, self._ask, self._prompt, self._outputs = spelling, ask, prompt, outputs
        self._begun: set[int] = set()

    def of(self, output: Output, step: Step) -> dict[str, Any]:
        assert self._spelling.chunk is not None
        choice = self._spelling.chunk(output, step, output.index not in self._begun)
        self._begun.add(output.index)
        usage = {"usage": None} if self._ask.include_usage else {}
        return {**self._head, "choices": [{**choice, "version_spans": output.spans}], **usage}

    def last(self) -> dict[str, Any] | None:
        usage = usage_of(len(self._prompt.tokens), self._outputs)
        return {**self._head, "choices": [], "usage": usage} if self._ask.include_usage else None


async def _stream(
    request: web.Request, steps: AsyncIterator[tuple[Output, Step]], chunks: _Chunks
) -> tuple[web.StreamResponse, str]:
    """The answer and how it ended. What is wrong before the first token is a plain answer with its status."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        async for output, step in steps:
            if not response.prepared:
                await response.prepare(request)
            await _send(response, json.dumps(chunks.of(output, step)))
    except (Refusal, PeerFault) as fault:
        if not response.prepared:
            raise
        refusal = fault if isinstance(fault, Refusal) else None
        status, code = getattr(fault, "status", 500), getattr(fault, "code", "malformed")
        await _send(response, json.dumps(error_body(status, code, str(fault), refusal=refusal)))
        return response, code
    last = chunks.last()
    for data in ([json.dumps(last)] if last is not None else []) + ["[DONE]"]:
        await _send(response, data)
    await response.write_eof()
    return response, "done"


async def _send(response: web.StreamResponse, data: str) -> None:
    """ConnectionResetError: the caller does not read, or has gone."""
    try:
        async with asyncio.timeout(SEND_S_MAX):
            await response.write(f"data: {data}\n\n".encode())
    except TimeoutError as error:
        raise ConnectionResetError("the caller does not read") from error


async def _completion_prompt(given: Any, texts: Texts) -> tuple[int, ...]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        text = checked_text(given, "prompt")
        tokens = tuple(await asyncio.to_thread(texts.encode, text, special=True))
        if not tokens:
            raise unusable("prompt", "is empty")
        return tokens
    if isinstance(given, list) and given and not isinstance(given[0], int):
        raise unusable("prompt", "one prompt per call", "unsupported_value")
    return read_tokens(given, "prompt", PROMPT_TOKENS_MAX)


def _template_options(given: Any) -> dict[str, Any]:
    options = {} if given is None else given
    if not isinstance(options, dict) or len(options) > TEMPLATE_OPTIONS_MAX:
        raise unusable("chat_template_kwargs", f"expected an object of at most {TEMPLATE_OPTIONS_MAX} values")
    if not all(isinstance(value, str | int | float | None) for value in options.values()):
        raise unusable("chat_template_kwargs", "expected texts, numbers and booleans")
    return options


def mount(app: web.Application, backend: Backend, allow: Callable[[Handler], Handler]) -> None:
    """Add the endpoints. allow: makes a handler one for callers of the gateway only."""
    endpoints = Endpoints(backend)
    app.router.add_get("/v1/models", allow(endpoints.models))
    app.router.add_post("/v1/chat/completions", allow(endpoints.chat))
    app.router.add_post("/v1/completions", allow(endpoints.complete))
    app.router.add_post("/inference/v1/generate", allow(endpoints.generate))

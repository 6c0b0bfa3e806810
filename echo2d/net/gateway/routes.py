"""The gateway's endpoints: turn requests of OpenAI's and verifiers' clients into calls on workers.

    GET  /v1/models                 the policy, as one model
    POST /v1/chat/completions       messages through the snapshot's chat template; also streamed
    POST /v1/completions            a text or token ids; also streamed
    POST /inference/v1/generate     token ids in, token ids and logprobs out (vLLM's shape)
    /v1/episodes                    agents that play episodes of the run (`episodes`)

Callers need a bearer secret of role gateway, or a ticket. Calls with the same X-Session-ID go to the same
worker. X-Echo2d-Min-Version asks for this version or a newer one, X-Echo2d-Version-Exact for this one
only; if it is not served, the answer is 409 with the version that is. Not here: sending answers
(`handlers.py`); slots, versions and the checks of tokens (`core/work/calls`); the form of tool calls
(`texts/tool_calls.py`).
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web
from blake3 import blake3

from echo2d.core.base.ids import Version
from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.core.work.calls.events import CallAsked, CallId
from echo2d.core.work.events import StepEnvironment
from echo2d.net.gateway.conversations import Conversation
from echo2d.net.gateway.episodes import (
    Answered,
    EpisodeEndpoints,
    HeardMessages,
    Spoken,
    TicketOffice,
    asked,
    check_sampling,
    named_sampling,
    ticket_of,
)
from echo2d.net.gateway.errors import CallRefusal, unusable
from echo2d.net.gateway.handlers import Answering, GrowingAnswer, Question, Spelling
from echo2d.net.gateway.limits import Desk, OpenRequests
from echo2d.net.gateway.requests import (
    check_routed_experts,
    checked_text,
    read_ask,
    read_messages,
    read_tokens,
    read_tools,
    wants_legacy_logprobs,
    wants_logprobs,
)
from echo2d.net.http.admission import admit
from echo2d.net.http.json_fields import Handler, integer_text, json_object
from echo2d.net.security.auth import Role
from echo2d.texts.model_texts import ModelTexts, UnusableText
from echo2d.texts.plain_contents import encode_prompt
from echo2d.texts.tool_calls import THINK, AnswerTurn, call_form, read_answer

PATHS = frozenset(
    {"/v1/models", "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"}
)
_EPISODES = "/v1/episodes"
_GATEWAY: frozenset[Role] = frozenset({"gateway"})
AGENT: frozenset[Role] = frozenset({"agent"})
MIN_VERSION_HEADER = "X-Echo2d-Min-Version"
EXACT_VERSION_HEADER = "X-Echo2d-Version-Exact"
_SESSION_HEADER = "X-Session-ID"
# The time for the whole body to arrive; it has at most 1 MiB.
BODY_S_MAX = 30.0
# The same limit as for a task's prompts: 512 KiB in a lease.
_PROMPT_TOKENS_MAX = 1 << 17
# The limit for all choices of a call together: a response of some 10 MB with logprobs.
CALL_TOKENS_MAX = 1 << 17
TEMPLATE_OPTIONS_MAX = 32
# vLLM's fields about text have no effect here, because `generate` answers with token ids.
OF_ITS_TEXT = frozenset({"detokenize", "output_kind", "spaces_between_special_tokens"})
_OF_EXPERTS = frozenset({"routed_experts_prompt_start"})


class GatewayBackend(Answering, Protocol):
    """What the endpoints need from the coordinator's runtime.

    max_new_tokens: the limit for one choice.
    """

    vocab_size: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def office(self) -> TicketOffice:
        """The tickets of agents that play episodes of the run."""

    async def texts(self) -> ModelTexts:
        """The newest published version's tokenizer. CallRefusal: nothing is published yet."""

    def newest(self) -> dict[str, Any] | None:
        """The newest published version, as JSON for /v1/models; None if there is none."""


class Endpoints:
    """The handlers of the gateway's endpoints."""

    def __init__(self, backend: GatewayBackend) -> None:
        self._backend = backend
        self._requests = OpenRequests()
        self._desk = Desk()

    def limited(self, handler: Handler) -> Handler:
        """Wrap the handler so that the limits on open requests hold."""

        async def counted(request: web.Request) -> web.StreamResponse:
            with self._requests.one_of(self._backend.caller(request).name):
                return await handler(request)

        return counted

    # aiohttp passes the request to every handler, hence the unused argument.
    async def models(self, request: web.Request) -> web.Response:  # noqa: ARG002
        newest = self._backend.newest()
        facts = {
            "id": self._backend.model,
            "object": "model",
            "created": 0,
            "owned_by": "echo2d",
            "version": newest,
        }
        if newest is not None:
            facts["max_model_len"] = (await self._backend.texts()).context_max
        return web.json_response({"object": "list", "data": [facts]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, await self._chat(request))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, await self._completion(request))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, await self._generation(request))

    # --- reading requests; each body is freed before its answer begins

    async def _chat(self, request: web.Request) -> Question:
        body = await self._body(request)
        own = frozenset({
            "messages", "max_completion_tokens", "chat_template_kwargs", "return_token_ids", "tools",
            "tool_choice",
        })  # fmt: skip
        ask, ids = (
            read_ask(body, own, logprobs=wants_logprobs(body)),
            body.get("return_token_ids") is True,
        )
        messages, options = (
            read_messages(body.get("messages")),
            _template_options(body.get("chat_template_kwargs")),
        )
        if tools := read_tools(body):
            options["tools"] = tools
        texts = await self._backend.texts()
        prompt = await self._tokenized(
            lambda: encode_prompt(texts, messages, options, tokens_max=_PROMPT_TOKENS_MAX)
        )
        if not prompt:
            raise unusable("messages", "the chat template makes no tokens of them")
        read = _reader_of_calls(texts, prompt) if tools else None
        spelling = Spelling(
            "chat",
            "chat.completion",
            "chatcmpl-",
            lambda output: {
                **output.message(logprobs=ask.logprobs, read=read),
                **output.facts(ids=ids),
            },
            lambda output, step, first: output.delta(
                step, first=first, logprobs=ask.logprobs, read=read
            ),
        )
        said = Conversation(texts, messages, options, prompt, read)
        session = self._session(request, body, messages[:2])
        return Question(ask, prompt, session, texts, spelling, named_sampling(body), said)

    async def _completion(self, request: web.Request) -> Question:
        body = await self._body(request)
        own = frozenset({"prompt", "return_token_ids"})
        ask, ids = (
            read_ask(body, own, logprobs=wants_legacy_logprobs(body)),
            body.get("return_token_ids") is True,
        )
        if ask.max_new_tokens is None:
            # 16 tokens are OpenAI's default length of a completion.
            ask = replace(ask, max_new_tokens=16)
        texts = await self._backend.texts()
        prompt = await self._completion_prompt(body.get("prompt"), texts)
        spelling = Spelling(
            "completion",
            "text_completion",
            "cmpl-",
            lambda output: {**output.completion(logprobs=ask.logprobs), **output.facts(ids=ids)},
            lambda output, step, _: output.completion_chunk(step, logprobs=ask.logprobs),
        )
        session = self._session(request, body, _prefix(prompt))
        return Question(ask, prompt, session, texts, spelling, named_sampling(body))

    async def _generation(self, request: web.Request) -> Question:
        body = await self._body(request)
        known = {"model", "token_ids", "sampling_params", "cache_salt", "priority", "request_id"}
        for name in sorted(body.keys() - known):
            if body[name] not in (None, False):
                raise unusable(name[:64], "is not supported", "unsupported_value")
        given = body.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise unusable("sampling_params", "expected an object")
        logprobs = given.get("logprobs")
        if logprobs not in (None, 0, 1) or isinstance(logprobs, bool):
            raise unusable(
                "logprobs", "engines report the sampled token's only: expected 1, 0 or null"
            )
        known_here = OF_ITS_TEXT | _OF_EXPERTS
        ask = replace(read_ask(given, known_here, logprobs=logprobs is not None), stream=False)
        check_routed_experts(given)
        prompt = pack_tokens(read_tokens(body.get("token_ids"), "token_ids", _PROMPT_TOKENS_MAX))
        spelling = Spelling(
            "generate",
            "",
            "gen-",
            lambda output: {**output.generated(logprobs=ask.logprobs), **output.facts(ids=False)},
        )
        session = self._session(request, body, _prefix(prompt))
        texts = await self._backend.texts()
        return Question(ask, prompt, session, texts, spelling, named_sampling(body))

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            async with asyncio.timeout(BODY_S_MAX):
                body = await json_object(request)
        except TimeoutError as error:
            detail = f"the body did not arrive within {BODY_S_MAX:g} s"
            raise CallRefusal(HTTPStatus.REQUEST_TIMEOUT, "slow", detail) from error
        if body.get("model") != self._backend.model:
            detail = f"model: there is only {self._backend.model!r} here"
            raise CallRefusal(HTTPStatus.NOT_FOUND, "model_not_found", detail, param="model")
        return body

    async def _completion_prompt(self, given: Any, texts: ModelTexts) -> bytes:
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
            given = given[0]
        if isinstance(given, str):
            text = checked_text(given, "prompt")
            prompt = await self._tokenized(
                lambda: texts.encode(text, special=True, tokens_max=_PROMPT_TOKENS_MAX)
            )
            if not prompt:
                raise unusable("prompt", "is empty")
            return prompt
        if isinstance(given, list) and given and not isinstance(given[0], int):
            raise unusable("prompt", "one prompt per call", "unsupported_value")
        return pack_tokens(read_tokens(given, "prompt", _PROMPT_TOKENS_MAX))

    async def _tokenized(self, work: Callable[[], Sequence[int]]) -> bytes:
        """Run this work of the tokenizer in a thread; returns the tokens. CallRefusal: the text is unusable."""
        try:
            return await self._desk.do(lambda: pack_tokens(work()))
        except UnusableText as fault:
            raise unusable(fault.part, fault.detail, fault.code) from fault

    def _session(self, request: web.Request, body: Mapping[str, Any], prefix: Any) -> str:
        """The session's id: from a header or field if given, otherwise from the prompt's beginning.

        The caller's name is part of the hash, so that callers never share a session.
        """
        named = (
            request.headers.get(_SESSION_HEADER) or body.get("prompt_cache_key") or body.get("user")
        )
        said = [self._backend.caller(request).name, "named" if named else "prefix", named or prefix]
        return blake3(json.dumps(said, default=str).encode()).hexdigest()[:32]

    # --- making calls

    async def _answer(self, request: web.Request, question: Question) -> web.StreamResponse:
        self._check_vocabulary(question.prompt)
        if (ticket := ticket_of(request)) is not None:
            return await self._play(request, question, ticket)
        return await GrowingAnswer(self._backend, request, question).give(
            self._make(request, question)
        )

    async def _play(
        self, request: web.Request, question: Question, ticket: str
    ) -> web.StreamResponse:
        """Answer a call that is a turn of an episode of the run."""
        caller = self._backend.caller(request)
        task, episode = self._backend.office.find(ticket)
        check_sampling(task, question.ask, question.named)
        for header in (MIN_VERSION_HEADER, EXACT_VERSION_HEADER):
            if header in request.headers:
                raise unusable(header, "the run chooses the versions of an episode; omit it")
        conversation = question.conversation

        async def say(order: StepEnvironment, heard: HeardMessages) -> Spoken:
            if conversation is None:
                spoken = Spoken(question.prompt)
            else:
                spoken = await self._desk.do(lambda: conversation.spoken(task, order, heard))
            if not spoken.tokens.startswith(order.prompt):
                detail = "its tokens do not begin with those that all calls of this task begin with"
                raise unusable("prompt", detail)
            return spoken

        order = await episode.ask(say)
        question = replace(
            question, prompt=asked(order), ask=replace(question.ask, stops=task.stop_strings)
        )
        answered = Answered(order, caller, self._backend.model)
        return await GrowingAnswer(answered, request, question).give(answered.make)

    def _make(self, request: web.Request, question: Question) -> Callable[[CallId], CallAsked]:
        """Check the question; returns the maker of its call. CallRefusal: it cannot be served."""
        ask = question.ask
        room = self._room(question)
        oldest, newest = _versions_wanted(request)
        ends = tuple(dict.fromkeys((*self._backend.stop_token_ids, *ask.stop_token_ids)))
        caller = self._backend.caller(request).name
        return lambda number: CallAsked(
            number, caller, question.prompt, ask.choices, room, ask.sampling, ends,
            ask.rng_seed, oldest, question.session, newest,
        )  # fmt: skip

    def _check_vocabulary(self, prompt: bytes) -> None:
        if int(unpack_tokens(prompt).max()) >= self._backend.vocab_size:
            raise unusable("prompt", f"token ids are below {self._backend.vocab_size}")

    def _room(self, question: Question) -> int:
        """The most tokens that each choice may generate. CallRefusal: too many are asked for."""
        wanted, choices, context = (
            question.ask.max_new_tokens,
            question.ask.choices,
            question.texts.context_max,
        )
        most = min(self._backend.max_new_tokens, CALL_TOKENS_MAX // choices)
        if wanted is not None and wanted > most:
            raise unusable(
                "max_tokens",
                f"at most {most} are allowed here" + (f" for {choices} choices" * (choices > 1)),
            )
        asked = question.prompt_tokens
        left = most if context is None else min(most, context - asked)
        if asked > _PROMPT_TOKENS_MAX or left < (wanted or 1):
            limit = _PROMPT_TOKENS_MAX if context is None else context
            detail = (
                f"this model's maximum context length is {limit} tokens; "
                f"{asked} prompt tokens and {wanted or 1} new ones are too many"
            )
            raise unusable("prompt", detail, "context_length_exceeded")
        return wanted or left


def _versions_wanted(request: web.Request) -> tuple[Version, Version | None]:
    """The oldest and the newest version that may write a token of the answer."""
    exact, oldest = (
        None if text is None else Version(integer_text(text, name))
        for name in (EXACT_VERSION_HEADER, MIN_VERSION_HEADER)
        for text in [request.headers.get(name)]
    )
    if exact is not None and oldest is not None:
        raise unusable(EXACT_VERSION_HEADER, f"not together with {MIN_VERSION_HEADER}")
    return oldest or exact or Version(0), exact


def _reader_of_calls(texts: ModelTexts, prompt: bytes) -> Callable[[str], AnswerTurn]:
    """The function that reads the tool calls of an answer to this prompt."""
    # If the prompt opens the reasoning, the word for that is among its last 16 tokens.
    end = texts.decode(unpack_tokens(prompt)[-16:].tolist())
    thinking = end.rstrip().endswith(THINK)
    return lambda text: read_answer(text, call_form(texts.template), thinking=thinking)


def _prefix(prompt: bytes) -> str:
    # Without a session id, prompts that begin with the same 64 tokens count as one session.
    return prompt[: 4 * 64].hex()


def _template_options(given: Any) -> dict[str, Any]:
    options = {} if given is None else given
    if not isinstance(options, dict) or len(options) > TEMPLATE_OPTIONS_MAX:
        raise unusable(
            "chat_template_kwargs", f"expected an object of at most {TEMPLATE_OPTIONS_MAX} values"
        )
    if not all(isinstance(value, str | int | float | None) for value in options.values()):
        raise unusable("chat_template_kwargs", "expected texts, numbers and booleans")
    return options


def is_gateway_path(path: str) -> bool:
    """Whether errors at this path have the form that OpenAI's clients read."""
    return path in PATHS or path.startswith(_EPISODES)


def mount(
    app: web.Application,
    backend: GatewayBackend,
    allow: Callable[[frozenset[Role], Handler], Handler],
) -> None:
    """Add the endpoints. allow: wraps a handler so that it serves callers of these roles only."""
    endpoints, episodes = Endpoints(backend), EpisodeEndpoints(backend.office)

    def allow_calls(handler: Handler) -> Handler:
        """Callers of role gateway, and agents that show a ticket."""
        for_callers = allow(_GATEWAY, handler)

        async def checked(request: web.Request) -> web.StreamResponse:
            if ticket_of(request) is None:
                return await for_callers(request)
            backend.caller(request)
            admit(request)
            return await handler(request)

        return checked

    app.router.add_post(_EPISODES, allow(AGENT, episodes.take))
    # The ticket in the path is the credential.
    app.router.add_get(f"{_EPISODES}/{{ticket}}", episodes.record)
    app.router.add_post(f"{_EPISODES}/{{ticket}}/end", episodes.end)
    app.router.add_get("/v1/models", allow_calls(endpoints.models))
    for path, handler in {
        "/v1/chat/completions": endpoints.chat,
        "/v1/completions": endpoints.complete,
        "/inference/v1/generate": endpoints.generate,
    }.items():
        app.router.add_post(path, allow_calls(endpoints.limited(handler)))

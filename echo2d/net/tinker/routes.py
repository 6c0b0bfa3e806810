"""The Tinker API: turns the calls of its clients into events, and replies into its bodies. All paths begin with PREFIX.

    POST client/config, client/dynamic_config, create_session, session_heartbeat, sessions/{id}/finish, telemetry
    POST create_model, load_weights, get_info                  a model
    POST forward_backward, optim_step                          its operations, numbered by the client
    POST save_weights, save_weights_for_sampler, weights_info  its checkpoints
    POST retrieve_future                                       a long poll for the result of an operation or sample
    POST create_sampling_session, asample, cancel_future; GET samplers/{sampler}
    GET  get_server_capabilities
    GET  training_runs, training_runs/{model}, training_runs/{model}/checkpoints, checkpoints
    DELETE, PUT .../checkpoints/{kind}/{name}, .../ttl
    POST /v1/tinker/operation, /v1/tinker/operation/result     the learner that runs the operations

A caller shows X-API-Key: tml-SECRET, where SECRET is that of a token of role tinker. As soon as the model and the
number of a call are known, the answer is a future, and every fault is told there: after another refusal a client may
not send the calls that it has prepared. Fields that are unknown here are ignored, because clients are newer than
servers.
Not here: order and results (`core/tinker`), arrays (`tinker.wire`).
"""

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Protocol

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from echo2d.client.http import LONG_POLL_S, OPERATION_PATH, RESULT_PATH
from echo2d.client.tinker import RESULT_BYTES_MAX, SAVED_STEPS_MAX
from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Epoch, RequestId
from echo2d.core.cluster.events import Reply
from echo2d.core.protocol.answer_end import CONTEXT_SPARE
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.seeds import SEED_BITS
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.tinker.checkpoints import KINDS, SCHEME, path_of
from echo2d.core.tinker.events import (
    LAYERS,
    AwaitResult,
    CancelSample,
    ClientAsked,
    ClientCall,
    DeleteCheckpoint,
    EndSession,
    ExpireCheckpoint,
    KeepSession,
    ListCheckpoints,
    ListModels,
    OpenSampler,
    OpenSession,
    OperationAsked,
    OperationEnded,
    SampleAsked,
    SampleOrder,
    SamplerName,
    SessionName,
    ShowCheckpoint,
    ShowModel,
    ShowQueue,
    ShowSampler,
    StepSaved,
    Submit,
    TinkerEvent,
)
from echo2d.core.tinker.futures import Category, Failed, FutureId, Outcome
from echo2d.core.tinker.operations import ModelId, Operation, OperationKind
from echo2d.net.http.admission import admit
from echo2d.net.http.json_fields import (
    Handler,
    HttpRefusal,
    fields,
    integer,
    integer_text,
    json_object,
    json_object_of,
    malformed,
    overloaded,
)
from echo2d.net.security.auth import Caller, Role
from echo2d.net.tinker.models import ServedModels
from echo2d.tinker.prompts import (
    PROMPT_ANSWER_BYTES_MAX,
    PROMPT_COLUMNS_MAX,
    PromptCall,
    PromptTargets,
)
from echo2d.tinker.wire import (
    FORWARD_BACKWARD_BYTES_MAX,
    Malformed,
    read_head,
    write_prompt_call,
)

PREFIX = "/api/v1"
KEY_PREFIX = "tml-"
# A client gives up a request after 45 s.
RESULT_POLL_S = 35.0
# If the coordinator needs longer, it is overloaded.
_ANSWER_S_MAX = 60.0
# The time for a body to arrive.
_BODY_S_MAX = 120.0
# Bodies that arrive at the same time, of one caller and of all.
CALLER_BYTES_MAX, ARRIVING_BYTES_MAX = 128 << 20, 512 << 20
# Open requests of one caller.
OPEN_MAX = 2048
METADATA_BYTES_MAX = 4 << 10
# A bound on the levels of nesting.
METADATA_BRACKETS_MAX = 256
SAMPLE_BYTES_MAX = 4 << 20
SEQUENCES_MAX = 128  # of one call
SEQUENCE_TOKENS_MAX = 1 << 17
STOPS_MAX, STOP_CHARS_MAX = 64, 128
LISTED_MAX = 100
# The client's number of a sampler.
SAMPLER_NUMBER = "sampling_session_seq_id"
# The releases of the client with which the tests have run.
TESTED = ((0, 38), (0, 38))
NOTE = (
    "echo2d speaks the Tinker API. The head gets no adapter (train_unembed has no effect), and the loss "
    "stable_reinforce is echo2d's REINFORCE with truncated importance ratios."
)
_ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
_MODEL = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}")


class TinkerBackend(Protocol):
    """What the routes need of the coordinator's runtime."""

    def caller(self, secret: str) -> Caller:
        """The caller with this secret. Denied: the secret is not valid."""

    async def ask(
        self, make: Callable[[RequestId], TinkerEvent], *, timeout_s: float
    ) -> Reply | None:
        """Put a call of the learner to the core; None if it was not answered in time."""

    async def ask_for_client(
        self, make: Callable[[RequestId], TinkerEvent], *, timeout_s: float
    ) -> Reply | None:
        """The same for a call of a client; there may be thousands of them."""


class TinkerRoutes:
    """The handlers of the API."""

    def __init__(self, backend: TinkerBackend, models: ServedModels) -> None:
        self._backend, self._models = backend, models
        self._open: Counter[str] = Counter()
        self._arriving: Counter[str] = Counter()

    def allow(self, handler: Callable[[web.Request, str], Any]) -> Handler:
        """Wrap a handler, which also gets the caller's name, so that it serves callers of role tinker only."""

        async def checked(request: web.Request) -> web.StreamResponse:
            key = request.headers.get("X-API-Key", "")
            if not key.startswith(KEY_PREFIX) or not key.isascii():
                raise HttpRefusal(
                    HTTPStatus.UNAUTHORIZED, "credential", f"expected X-API-Key: {KEY_PREFIX}SECRET"
                )
            caller = self._backend.caller(key.removeprefix(KEY_PREFIX))
            admit(request)
            if caller.role != "tinker":
                detail = f"token {caller.name} has the role {caller.role}; this needs tinker"
                raise HttpRefusal(HTTPStatus.FORBIDDEN, "role", detail)
            if self._open[caller.name] >= OPEN_MAX:
                raise _too_many(f"{OPEN_MAX} requests of this token are open")
            self._open[caller.name] += 1
            try:
                answer: web.StreamResponse = await handler(request, caller.name)
                return answer
            finally:
                self._open[caller.name] -= 1

        return checked

    # --- sessions

    async def config(self, request: web.Request, _: str) -> web.Response:
        await json_object(request)
        # In this order a call whose first chunk is refused cannot leave the others without their turn.
        return web.json_response({"parallel_fwdbwd_chunks": False})

    async def open_session(self, request: web.Request, caller: str) -> web.Response:
        body = await json_object(request)
        session = SessionName(secrets.token_hex(16))
        reply = await self._ask(caller, OpenSession(session))
        told: dict[str, Any] = {"info_message": NOTE}
        if warning := _untested(body.get("sdk_version")):
            told["warning_message"] = warning
        return _json(replace(reply, body=_body(reply) | told) if reply.status == 200 else reply)

    async def heartbeat(self, request: web.Request, caller: str) -> web.Response:
        body = await json_object(request)
        return _json(await self._ask(caller, KeepSession(SessionName(_text(body, "session_id")))))

    async def finish(self, request: web.Request, caller: str) -> web.Response:
        session = SessionName(request.match_info["session"])
        return _json(await self._ask(caller, EndSession(session)))

    async def telemetry(self, request: web.Request, _: str) -> web.Response:
        await request.read()
        return web.json_response({"status": "accepted"})

    async def capabilities(self, _: web.Request, __: str) -> web.Response:
        facts: dict[str, Any] = {"trainable": True, "sampleable": True}
        if self._models.context_max:
            facts["max_context_length"] = self._models.context_max
        models = [{"model_name": name, **facts} for name in self._models.names]
        return web.json_response({"supported_models": models})

    # --- operations

    async def create_model(self, request: web.Request, caller: str) -> web.Response:
        body = await json_object(request)
        model, faults = _new_model(body), _Faults()
        lora = faults.table(body, "lora_config")
        optimizer = faults.table(body, "optimizer_config").get("type", "adamw")
        if optimizer != "adamw":
            faults.add(f"optimizer_config.type: expected adamw; found {str(optimizer)[:40]!r}")
        arguments = {
            "base": faults.text(body, "base_model"),
            "rank": faults.integer(lora, "rank", 32),
            "seed": secrets.randbits(SEED_BITS)
            if lora.get("seed") is None
            else faults.integer(lora, "seed", 0) % (1 << SEED_BITS),
            "layers": [each for each in LAYERS if lora.get(each, True)],
            "metadata": faults.metadata(body),
        }
        return await self._submit(caller, model, 0, "create", body, arguments, faults)

    async def load_weights(self, request: web.Request, caller: str) -> web.Response:
        body = await json_object(request)
        faults = _Faults()
        arguments = {
            "path": faults.text(body, "path"),
            "optimizer": bool(body.get("optimizer", False)),
            "metadata": faults.metadata(body),
        }
        if body.get("session_id") is not None:
            return await self._submit(caller, _new_model(body), 0, "load", body, arguments, faults)
        model, number = _numbered(body)
        faults.add("a model that is made is not loaded again: make another one from the checkpoint")
        return await self._submit(caller, model, number, "load", body, {}, faults)

    async def forward_backward(self, request: web.Request, caller: str) -> web.Response:
        raw = await self._raw(request, caller, FORWARD_BACKWARD_BYTES_MAX)
        try:
            head = read_head(raw)
        except Malformed as wrong:
            raise malformed(str(wrong)) from wrong
        model, number = _numbered({"model_id": head.model, "seq_id": head.number})
        operation = Operation(
            model,
            number,
            "forward_backward",
            digest_of(raw),
            body=raw,
            adds=not head.forward_only,
        )
        return _json(await self._ask(caller, Submit(operation)))

    async def optim_step(self, request: web.Request, caller: str) -> web.Response:
        body = await json_object(request)
        model, number = _numbered(body)
        faults = _Faults()
        given = faults.table(body, "adam_params")
        if body.get("optimizer_params") is not None:
            given = faults.table(body, "optimizer_params")
            if given.get("type", "adamw") != "adamw":
                faults.add(f"optimizer_params.type: expected adamw; found {given['type']!r}"[:200])
        arguments = {name: faults.number(given, name, value) for name, value in _ADAM.items()}
        return await self._submit(caller, model, number, "optim_step", body, arguments, faults)

    async def save_weights(self, request: web.Request, caller: str) -> web.Response:
        body = await json_object(request)
        return await self._save(caller, body, "weights", _Faults())

    async def save_for_sampler(self, request: web.Request, caller: str) -> web.Response:
        return await self._save(caller, await json_object(request), "sampler_weights", _Faults())

    async def _save(
        self, caller: str, body: Mapping[str, Any], kind: str, faults: "_Faults"
    ) -> web.Response:
        model, number = _numbered(body)
        name = str(number) if body.get("path") is None else faults.text(body, "path")
        arguments = {
            "type": "save_weights" if kind == "weights" else "save_weights_for_sampler",
            "path": path_of(model, kind, name),
            "overwrite": bool(body.get("overwrite", False)),
            "ttl_s": faults.ttl(body),
            "metadata": faults.metadata(body),
            "sampler": None,
            "follows": body.get("kind") == "inflight",
        }
        if kind == "sampler_weights" and body.get("path") is None:
            arguments["sampler"] = _new_sampler(model, body)
            # When the client did not get the answer, it asks again with the same number, and a new one for the sampler.
            body = {name: each for name, each in body.items() if name != SAMPLER_NUMBER}
        return await self._submit(caller, model, number, "save", body, arguments, faults)

    async def result(self, request: web.Request, caller: str) -> web.Response:
        body = await json_object(request)
        future = FutureId(_text(body, "request_id"))
        reply = await self._asked(caller, AwaitResult(future), RESULT_POLL_S)
        if reply is None:
            # The client asks again at once.
            state = {"queue_state": "active"}
            if ":sample:" in future:
                state = _body(await self._ask(caller, ShowQueue(future)))
            told = {"type": "try_again", "request_id": future, **state}
            return web.json_response(told, status=HTTPStatus.REQUEST_TIMEOUT)
        if isinstance(reply.body, bytes):
            return web.Response(body=reply.body, content_type="application/x-protobuf")
        return _json(reply)

    # --- samples

    async def open_sampler(self, request: web.Request, caller: str) -> web.Response:
        body = await json_object(request)
        session = SessionName(_text(body, "session_id"))
        number = _number(body, SAMPLER_NUMBER, 0)
        base, path = body.get("base_model"), body.get("model_path")
        if path is not None:
            path = _text(body, "model_path")
        elif base is not None:
            base = _text(body, "base_model")
        name = SamplerName(f"{session}:sample:{number}")
        return _json(await self._ask(caller, OpenSampler(name, session, base, path)))

    async def sampler(self, request: web.Request, caller: str) -> web.Response:
        name = SamplerName(request.match_info["sampler"])
        return _json(await self._ask(caller, ShowSampler(name)))

    async def sample(self, request: web.Request, caller: str) -> web.Response:
        raw = await self._raw(request, caller, SAMPLE_BYTES_MAX)
        body = json_object_of(raw)
        name, number = SamplerName(_text(body, "sampling_session_id")), body.get("seq_id")
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise malformed("seq_id: expected an integer from 0 on")
        faults = _Faults()
        count = faults.integer(body, "num_samples", 1)
        if not 1 <= count <= SEQUENCES_MAX:
            faults.add(f"num_samples: expected 1 to {SEQUENCES_MAX}; found {count}")
            count = min(max(count, 0), SEQUENCES_MAX)
        order = self._sample_order(body, count, faults)
        digest = digest_of(json.dumps(body, sort_keys=True).encode())
        call = SampleAsked(name, number, digest, count, order, faults.first)
        return _json(await self._ask(caller, call))

    def _sample_order(
        self, body: Mapping[str, Any], count: int, faults: "_Faults"
    ) -> SampleOrder | None:
        """What to draw; None: `faults` says why nothing."""
        said, models = faults.table(body, "sampling_params"), self._models
        prompt = faults.prompt(body, models.vocab_size)
        context = models.context_max or SEQUENCE_TOKENS_MAX
        asked = faults.prompt_call(body, prompt, models.vocab_size)
        top_tokens = faults.top_tokens(body, models.vocab_size)
        scores = asked.asks and len(prompt) <= context
        if scores and not top_tokens and said.get("max_tokens") == 1:
            # The client wants no answer. So one may follow what leaves room for it.
            prompt = prompt[: context - CONTEXT_SPARE - 1]
        room = min(context - CONTEXT_SPARE - len(prompt), SEQUENCE_TOKENS_MAX)
        most = room if said.get("max_tokens") is None else faults.integer(said, "max_tokens", 1)
        if most < 1 or room < 1:
            faults.add(f"max_tokens: expected 1 to {room} after a prompt of {len(prompt)} tokens")
        top_k = min(faults.integer(said, "top_k", -1), models.vocab_size)
        sampling = Sampling(
            faults.number(said, "temperature", 1.0),
            faults.number(said, "top_p", 1.0),
            max(0, top_k),
        )
        faults.add_if(sampling.fault)
        texts, tokens = faults.stops(said, models)
        seed = None if said.get("seed") is None else faults.integer(said, "seed", 0)
        answer_bytes = asked.answer_bytes
        if top_tokens:
            # The learner reads each sequence behind the prompt.
            cells = len(prompt) + min(most, room) * (1 + top_tokens)
            answer_bytes += 8 * count * cells
        if answer_bytes > PROMPT_ANSWER_BYTES_MAX:
            faults.add(
                f"num_samples, max_tokens and topk_sample_logprobs: expected at most {PROMPT_ANSWER_BYTES_MAX} "
                f"bytes of tokens and logprobs; found {answer_bytes}"
            )
        if faults.first is not None:
            return None
        asked = replace(asked, temperature=sampling.temperature, rng_seed=seed)
        return SampleOrder(
            pack_tokens(prompt),
            count,
            min(most, room),
            sampling,
            tokens,
            texts,
            seed,
            write_prompt_call(asked) if scores else b"",
            answer_bytes,
            top_tokens,
        )

    async def cancel(self, request: web.Request, caller: str) -> web.Response:
        future = FutureId(_text(await json_object(request), "request_id"))
        return _json(await self._ask(caller, CancelSample(future)))

    # --- models and checkpoints

    async def info(self, request: web.Request, caller: str) -> web.Response:
        model = _model(_text(await json_object(request), "model_id"))
        reply = await self._ask(caller, ShowModel(model))
        if reply.status != HTTPStatus.OK:
            return _json(reply)
        shown = _body(reply)
        facts = {
            "type": "get_info",
            "model_id": model,
            "model_data": {"model_name": shown["base_model"]},
            "model_name": shown["base_model"],
            "is_lora": shown["is_lora"],
            "lora_rank": shown["lora_rank"],
        }
        return web.json_response(facts)

    async def run(self, request: web.Request, caller: str) -> web.Response:
        return _json(await self._ask(caller, ShowModel(_model(request.match_info["model"]))))

    async def runs(self, request: web.Request, caller: str) -> web.Response:
        return _json(await self._ask(caller, ListModels(*_part(request))))

    async def checkpoints(self, request: web.Request, caller: str) -> web.Response:
        name = request.match_info.get("model")
        model = None if name is None else _model(name)
        return _json(await self._ask(caller, ListCheckpoints(model, *_part(request))))

    async def weights_info(self, request: web.Request, caller: str) -> web.Response:
        path = _text(await json_object(request), "tinker_path")
        return _json(await self._ask(caller, ShowCheckpoint(path)))

    async def delete(self, request: web.Request, caller: str) -> web.Response:
        return _json(await self._ask(caller, DeleteCheckpoint(_path(request))))

    async def expire(self, request: web.Request, caller: str) -> web.Response:
        faults = _Faults()
        ttl_s = faults.ttl(await json_object(request))
        if faults.first is not None:
            raise malformed(faults.first)
        return _json(await self._ask(caller, ExpireCheckpoint(_path(request), ttl_s)))

    # --- the learner

    async def next_operation(self, request: web.Request) -> web.Response:
        body = await fields(request, {"epoch", "saved"})
        epoch, saved = Epoch(integer(body["epoch"], "epoch")), _saved_steps(body["saved"])
        reply = await self._backend.ask(
            lambda number: OperationAsked(number, epoch, saved), timeout_s=LONG_POLL_S
        )
        if reply is None or reply.status == HTTPStatus.NO_CONTENT:
            return web.Response(status=HTTPStatus.NO_CONTENT)
        if isinstance(reply.body, bytes):
            return web.Response(body=reply.body, content_type="application/octet-stream")
        return _json(reply)

    async def end_operation(self, request: web.Request) -> web.Response:
        epoch = Epoch(integer_text(request.query.get("epoch"), "epoch"))
        model = ModelId(request.query.get("model", ""))
        of = integer_text(request.query.get("number"), "number")
        raw = await _read(request, RESULT_BYTES_MAX)
        result: Outcome = raw
        if request.content_type == "application/json":
            result = _result(raw)
        reply = await self._backend.ask(
            lambda number: OperationEnded(number, epoch, time.time(), model, of, result),
            timeout_s=_ANSWER_S_MAX,
        )
        if reply is None:
            raise overloaded()
        return _json(reply)

    # --- inside

    async def _submit(
        self,
        caller: str,
        model: ModelId,
        number: int,
        kind: OperationKind,
        body: Mapping[str, Any],
        arguments: Mapping[str, Any],
        faults: "_Faults",
    ) -> web.Response:
        digest = digest_of(json.dumps([kind, body], sort_keys=True).encode())
        operation = Operation(model, number, kind, digest, arguments, fault=faults.first)
        return _json(await self._ask(caller, Submit(operation)))

    async def _ask(self, caller: str, call: ClientCall) -> Reply:
        reply = await self._asked(caller, call, _ANSWER_S_MAX)
        if reply is None:
            raise overloaded()
        return reply

    async def _asked(self, caller: str, call: ClientCall, timeout_s: float) -> Reply | None:
        reply = await self._backend.ask_for_client(
            lambda number: ClientAsked(number, caller, time.time(), call), timeout_s=timeout_s
        )
        if reply is not None and reply.status == HTTPStatus.SERVICE_UNAVAILABLE:
            # After a 503 the client would ask again at once.
            raise _too_many("too many calls wait")
        return reply

    async def _raw(self, request: web.Request, caller: str, most: int) -> bytes:
        """The body. HttpRefusal: it is too large, or too many bytes arrive at once."""
        size = most if request.content_length is None else request.content_length
        if size > most:
            raise _too_large(most)
        if self._arriving[caller] + size > CALLER_BYTES_MAX:
            raise _too_many(f"{CALLER_BYTES_MAX} bytes of this token arrive already")
        if self._arriving.total() + size > ARRIVING_BYTES_MAX:
            raise _too_many(f"{ARRIVING_BYTES_MAX} bytes arrive already")
        self._arriving[caller] += size
        try:
            return await _read(request, most)
        finally:
            self._arriving[caller] -= size


class _Faults:
    """Reads fields, and keeps the first fault instead of raising it."""

    def __init__(self) -> None:
        self.first: str | None = None

    def add(self, fault: str) -> None:
        self.first = self.first or fault

    def table(self, body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        found = body.get(name)
        if found is None:
            return {}
        if not isinstance(found, dict):
            self.add(f"{name}: expected an object")
            return {}
        return found

    def text(self, body: Mapping[str, Any], name: str) -> str:
        found = body.get(name)
        if not isinstance(found, str) or not found.isprintable() or len(found) > 1024:
            self.add(f"{name}: expected a text of at most 1024 characters")
            return ""
        return found

    def integer(self, body: Mapping[str, Any], name: str, default: int) -> int:
        found = body.get(name, default)
        if type(found) is not int or abs(found) > 1 << 62:
            self.add(f"{name}: expected an integer")
            return default
        return found

    def number(self, body: Mapping[str, Any], name: str, default: float) -> float:
        found = default if body.get(name) is None else body[name]
        if type(found) not in (int, float) or not 0 <= found <= 1e9:
            self.add(f"{name}: expected a number from 0 on; found {str(found)[:40]}")
            return default
        return float(found)

    def add_if(self, fault: str) -> None:
        if fault:
            self.add(fault)

    def prompt(self, body: Mapping[str, Any], vocab_size: int) -> list[int]:
        """The token ids of the chunks of text."""
        found: list[int] = []
        chunks = self.table(body, "prompt").get("chunks")
        for chunk in chunks if isinstance(chunks, list) else ():
            tokens = chunk.get("tokens") if isinstance(chunk, dict) else None
            if not isinstance(tokens, list) or chunk.get("type", "encoded_text") != "encoded_text":
                self.add("prompt.chunks: expected encoded_text alone")
                return []
            found += tokens
        if not found or not all(type(each) is int and 0 <= each < vocab_size for each in found):
            self.add(f"prompt: expected token ids from 0 to {vocab_size - 1}")
            return []
        return found

    def prompt_call(
        self, body: Mapping[str, Any], prompt: list[int], vocab_size: int
    ) -> PromptCall:
        """What the client wants to know of the prompt's tokens."""
        last = body.get("prompt_logprobs_last_n")
        call = PromptCall(
            tokens_t=np.array(prompt, np.int64),
            logprobs=bool(body.get("prompt_logprobs")),
            last=len(prompt) - 1
            if last is None
            else self.integer(body, "prompt_logprobs_last_n", 0),
            top_tokens=self.integer(body, "topk_prompt_logprobs", 0),
            targets=self._targets(body, "target_prompt_logprobs"),
            alternatives=self.integer(body, "prompt_alt_tokens_k", 0),
        )
        self.add_if(call.fault(vocab_size))
        return call

    def top_tokens(self, body: Mapping[str, Any], vocab_size: int) -> int:
        """How many of the most likely tokens the client wants to know at each sampled position."""
        most, name = min(PROMPT_COLUMNS_MAX, vocab_size), "topk_sample_logprobs"
        found = self.integer(body, name, 0)
        if not 0 <= found <= most:
            self.add(f"{name}: expected 0 to {most}; found {found}")
        return found

    def _targets(self, body: Mapping[str, Any], name: str) -> PromptTargets | None:
        """A matrix of tokens, dense or in CSR."""
        table = self.table(body, name)
        if not table:
            return None

        def integers(part: str) -> NDArray[np.int64]:
            found = table.get(part)
            # A text among them would widen every cell of an array.
            if isinstance(found, list) and all(type(each) is int for each in found):
                with contextlib.suppress(OverflowError):
                    return np.array(found, np.int64)
            self.add(f"{name}.{part}: expected a list of integers")
            return np.zeros(0, np.int64)

        shape, tokens_c = integers("shape").tolist(), integers("data")
        if len(shape) != 2 or min(shape) < 0:
            self.add(f"{name}.shape: expected two numbers from 0 on")
            return None
        if table.get("sparse_crow_indices") is None:
            return PromptTargets((shape[0], shape[1]), tokens_c)
        starts, columns_c = integers("sparse_crow_indices"), integers("sparse_col_indices")
        return PromptTargets((shape[0], shape[1]), tokens_c, starts, columns_c)

    def stops(
        self, said: Mapping[str, Any], models: ServedModels
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The texts and the tokens that end a sequence. An empty list switches off the model's own end tokens."""
        stop, ends = said.get("stop"), models.end_token_ids
        stops = ends if stop is None else [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list | tuple) or len(stops) > STOPS_MAX:
            self.add(f"stop: expected at most {STOPS_MAX} texts or token ids")
            return (), ()
        texts = tuple(
            each for each in stops if isinstance(each, str) and 0 < len(each) <= STOP_CHARS_MAX
        )
        tokens = tuple(
            each for each in stops if type(each) is int and 0 <= each < models.vocab_size
        )
        if len(texts) + len(tokens) != len(stops):
            self.add(f"stop: expected texts of 1 to {STOP_CHARS_MAX} characters, or token ids")
        return texts, tokens or (ends if texts else ())

    def ttl(self, body: Mapping[str, Any]) -> float | None:
        """ttl_seconds; None: for ever."""
        return None if body.get("ttl_seconds") is None else self.number(body, "ttl_seconds", 0.0)

    def metadata(self, body: Mapping[str, Any]) -> str:
        """user_metadata as JSON."""
        text = json.dumps(self.table(body, "user_metadata"))
        brackets = text.count("[") + text.count("{")
        if len(text) > METADATA_BYTES_MAX or brackets > METADATA_BRACKETS_MAX:
            self.add(f"user_metadata: expected at most {METADATA_BYTES_MAX} bytes, and few levels")
            return "{}"
        return text


def _result(raw: bytes) -> dict[str, Any] | Failed:
    """What the learner reports of an operation whose result is no message."""
    try:
        body = json.loads(raw)
        if (failed := body.get("failed")) is not None:
            category: Category = "user" if failed["category"] == "user" else "server"
            return Failed(str(failed["detail"])[:2000], category)
        found: dict[str, Any] = dict(body["result"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise malformed("expected {result} or {failed}") from error
    return found


def _saved_steps(found: Any) -> tuple[StepSaved, ...]:
    """What the learner reports of states on its disk."""
    if not isinstance(found, list) or len(found) > SAVED_STEPS_MAX:
        raise malformed(f"saved: expected at most {SAVED_STEPS_MAX} pairs")
    steps = []
    for each in found:
        match each:
            case [str(model), number] if _MODEL.fullmatch(model):
                steps.append(StepSaved(ModelId(model), integer(number, "saved")))
            case _:
                raise malformed("saved: expected [model, number]")
    return tuple(steps)


async def _read(request: web.Request, most: int) -> bytes:
    found = bytearray()
    try:
        async with asyncio.timeout(_BODY_S_MAX):
            async for part in request.content.iter_any():
                found += part
                if len(found) > most:
                    raise _too_large(most)
    except TimeoutError as error:
        detail = f"expected the body within {_BODY_S_MAX:g} s"
        raise HttpRefusal(HTTPStatus.REQUEST_TIMEOUT, "late", detail) from error
    return bytes(found)


def _too_large(most: int) -> HttpRefusal:
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return HttpRefusal(status, "too_large", f"at most {most} bytes")


def _too_many(detail: str) -> HttpRefusal:
    return HttpRefusal(HTTPStatus.TOO_MANY_REQUESTS, "busy", f"{detail}; try again")


def _json(reply: Reply) -> web.Response:
    return web.json_response(_with_dates(_body(reply)), status=reply.status)


def _with_dates(found: dict[str, Any]) -> dict[str, Any]:
    """A body of the core, in which seconds since 1970 become dates, and the text of metadata an object."""
    dates = {
        name: datetime.fromtimestamp(found[name], UTC).isoformat()
        for name in ("time", "last_request_time", "expires_at")
        if isinstance(found.get(name), float)
    }
    lists = {
        name: list(map(_with_dates, found[name]))
        for name in ("training_runs", "checkpoints")
        if name in found
    }
    own = {"user_metadata": json.loads(found["user_metadata"])} if "user_metadata" in found else {}
    return found | dates | lists | own


def _body(reply: Reply) -> dict[str, Any]:
    assert isinstance(reply.body, dict)
    return reply.body


def _text(body: Mapping[str, Any], name: str) -> str:
    found = body.get(name)
    if not isinstance(found, str) or len(found) > 1024:
        raise malformed(f"{name}: expected a text of at most 1024 characters")
    return found


def _model(name: str) -> ModelId:
    if not _MODEL.fullmatch(name):
        raise HttpRefusal(HTTPStatus.NOT_FOUND, "model", f"no model {name[:64]!r}")
    return ModelId(name)


def _number(body: Mapping[str, Any], name: str, low: int) -> int:
    found = body.get(name)
    if type(found) is not int or not low <= found < 1 << 31:
        raise malformed(f"{name}: expected an integer from {low} on")
    return found


def _new_model(body: Mapping[str, Any]) -> ModelId:
    """The id under which the client will ask for the model that it makes."""
    return _model(f"{_text(body, 'session_id')}:train:{_number(body, 'model_seq_id', 0)}")


def _new_sampler(model: ModelId, body: Mapping[str, Any]) -> str:
    """The id of the sampler of a model's present weights."""
    number = _number(body, SAMPLER_NUMBER, 0)
    return f"{model.partition(':')[0]}:sample:{number}"


def _numbered(body: Mapping[str, Any]) -> tuple[ModelId, int]:
    return _model(_text(body, "model_id")), _number(body, "seq_id", 1)


def _part(request: web.Request) -> tuple[int, int]:
    offset = integer_text(request.query.get("offset", "0"), "offset")
    limit = integer_text(request.query.get("limit", "100"), "limit")
    return offset, min(limit, LISTED_MAX)


def _path(request: web.Request) -> str:
    kind, name = request.match_info["kind"], request.match_info["name"]
    model = _model(request.match_info["model"])
    if kind not in KINDS:
        raise HttpRefusal(HTTPStatus.NOT_FOUND, "checkpoint", f"no checkpoint {SCHEME}{model}")
    return path_of(model, kind, name)


def _untested(version: Any) -> str | None:
    """A warning for a client of another release than those that were tested."""
    found = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    (low, high) = TESTED
    if found is not None and low <= (int(found[1]), int(found[2])) <= high:
        return None
    first, last = (".".join(map(str, each)) for each in TESTED)
    return f"echo2d was tested with releases {first} to {last} of the client; this one says {version!r}"


async def _unknown(request: web.Request, _: str) -> web.Response:
    detail = f"{request.method} {request.path[:200]} is not served"
    return web.json_response({"detail": detail}, status=HTTPStatus.NOT_FOUND)


def mount(
    app: web.Application,
    backend: TinkerBackend,
    models: ServedModels,
    allow_learner: Callable[[frozenset[Role], Handler], Handler],
) -> None:
    """Add the routes. allow_learner: wraps a handler so that it serves callers of these roles only."""
    routes = TinkerRoutes(backend, models)
    checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
    for method, path, handler in (
        ("POST", "client/config", routes.config),
        ("POST", "client/dynamic_config", routes.config),
        ("POST", "create_session", routes.open_session),
        ("POST", "session_heartbeat", routes.heartbeat),
        ("POST", "sessions/{session}/finish", routes.finish),
        ("POST", "telemetry", routes.telemetry),
        ("GET", "get_server_capabilities", routes.capabilities),
        ("POST", "create_model", routes.create_model),
        ("POST", "load_weights", routes.load_weights),
        ("POST", "get_info", routes.info),
        ("POST", "forward_backward", routes.forward_backward),
        ("POST", "optim_step", routes.optim_step),
        ("POST", "save_weights", routes.save_weights),
        ("POST", "save_weights_for_sampler", routes.save_for_sampler),
        ("POST", "retrieve_future", routes.result),
        ("POST", "create_sampling_session", routes.open_sampler),
        ("GET", "samplers/{sampler}", routes.sampler),
        ("POST", "asample", routes.sample),
        ("POST", "cancel_future", routes.cancel),
        ("POST", "weights_info", routes.weights_info),
        ("GET", "training_runs", routes.runs),
        ("GET", "training_runs/{model}", routes.run),
        ("GET", "training_runs/{model}/checkpoints", routes.checkpoints),
        ("GET", "checkpoints", routes.checkpoints),
        ("DELETE", checkpoint, routes.delete),
        ("PUT", f"{checkpoint}/ttl", routes.expire),
    ):
        app.router.add_route(method, f"{PREFIX}/{path}", routes.allow(handler))
    app.router.add_route("*", PREFIX + "/{rest:.*}", routes.allow(_unknown))
    learner: frozenset[Role] = frozenset({"learner"})
    app.router.add_post(OPERATION_PATH, allow_learner(learner, routes.next_operation))
    app.router.add_post(RESULT_PATH, allow_learner(learner, routes.end_operation))

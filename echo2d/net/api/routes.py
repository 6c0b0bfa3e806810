"""The coordinator's public HTTP API: authenticates callers and validates requests.

The core takes every decision; this module only turns requests into events, and replies into JSON.

    POST /v1/enrol                      bearer secret, {key, proof} in hex
                                        -> {peer, run_id, certificate}
    GET  /v1/worker                     WebSocket, see net/control/server.py
    POST /v1/learner/session            {resume_step} -> {epoch, run_id, ...}
                                        may be added: learner: its identity; take_over: true;
                                        steps: the number of the last step
    GET  /v1/learner/session            -> the same facts about the session that is open; none is opened
    POST /v1/learner/alive              {epoch, software} -> {}: the learner lives; every few seconds
    POST /v1/versions                   {version, epoch, path} or {version, epoch, upload: true}
                                        -> {version, digest, ...}
                                        manifest: base64 of `Manifest.encode` may be added; without
                                        it the coordinator hashes the files before it answers
    PUT  /v1/versions/{n}/files/{name}  ?epoch=E, the file's bytes -> {bytes}
    GET  /v1/batches/{n}                ?epoch=E, long poll -> the batch's bytes, or 204; a header has
                                        the bound S by which it was made
    POST /v1/batches/{n}/commit         {batch_digest, epoch, t_train_s, ...} -> {publish_every}
                                        scores: [[group, sample, k, z], ...] may be added, see
                                        `TrajectoryScore` in core/protocol/trajectory.py
    POST /v1/batches/{n}/refuse         {groups, reasons, epoch} -> {}
    GET  /v1/attachments/{digest}       -> the bytes with this digest (hex), which a trajectory names
    POST /v1/learner/checkpoint         {step, epoch} -> {}
    GET  /v1/evaluations                ?after=N -> {evaluations, unfinished}: those with a number
                                        above N
    POST /v1/evaluations                {version, epoch, after} -> the same; the newest version is
                                        evaluated if it was not yet
    GET  /v1/samples                    ?step=N -> {step, groups}: prompts, answers and rewards of a
                                        step, by default the newest; for viewers only with samples.viewers
    POST /v1/workers/{id}/cordon        {} -> {id, connected, leased}: no new leases for this worker
    POST /v1/workers/{id}/uncordon      {} -> the same; also cancels a drain
    POST /v1/workers/{id}/drain         {} -> the same; it is cordoned, and ends once it holds nothing
                                        hand_over: true may be added: other workers continue its leases
    GET  /v1/wheel                      the wheel of this installation, for a box that holds a
                                        worker's token; see `echo2d join --print-script`
    POST /v1/uplink                     worker's token: how fast it can send, see boxes.py
    GET  /v1/status/own                 worker's token: facts about the boxes enrolled with it
    GET  /healthz, /readyz              see net/http/health.py; no credential is needed
    GET  /v1/history                    ?since=STEP -> {columns, rows, rewound}: a row of figures for
                                        each later step
    GET  /v1/live                       ?seen=N&plan=NAME&stripe=K -> what is new for the page, see
                                        runtime/coordinator/live_page.py
    GET  /v1/status, /metrics           facts as JSON, as Prometheus text
    GET  /, /page/{name}                the page and its files, for everybody, see page.py
    the gateway's, if it is enabled     see net/gateway/routes.py; its errors have OpenAI's shape
    /api/v1/..., with [tinker]          see net/tinker/routes.py

Every error is {"error": a short code, "detail": one line}, with status 400 (malformed or refused),
401 / 403 (caller unknown / not allowed), 404 (no such attachment), 409 (the run's state forbids it, or
the learner is of another build), 413 (too large), 415 (encoded body), 503 (busy, try again) or 507
(disk). Unknown fields are refused. Request bodies are never decompressed.
"""

import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Protocol, get_args

from aiohttp import web

from echo2d.client.http import (
    ALIVE_PATH,
    ATTACHMENT_PATH,
    BATCH_PATH,
    BODY_BYTES_MAX,
    CHECKPOINT_PATH,
    COMMIT_PATH,
    DIGEST_HEADER,
    EVALUATIONS_PATH,
    FILES_PATH,
    LONG_POLL_S,
    OWN_STATUS_PATH,
    REFUSE_PATH,
    SAMPLES_PATH,
    SESSION_PATH,
    STALENESS_HEADER,
    STATUS_PATH,
    VERSIONS_PATH,
    WORKER_ORDER_PATH,
)
from echo2d.core.base.ids import DIGEST_BYTES, Digest, Epoch, PeerId, RequestId, RunId, Version
from echo2d.core.cluster.events import Reply
from echo2d.core.coordinator.events import (
    AliveTold,
    BatchAsked,
    CheckpointAsked,
    CommitAsked,
    CoordinatorEvent,
    EpochAsked,
    EvaluationsAsked,
    RefuseAsked,
    RulesAsked,
    SessionAsked,
    WorkerOrder,
)
from echo2d.core.protocol.builds import (
    BUILD_HEADER,
    OURS_AS_LEARNER_API,
    from_header,
    not_understood,
    to_header,
)
from echo2d.core.weights.manifest import Manifest
from echo2d.errors import OperatorFault, PeerFault, StoreFault
from echo2d.net.api.bodies import (
    figures_of,
    learner_identity,
    manifest_of,
    refused_groups,
    scores_of,
    software_name,
)
from echo2d.net.api.boxes import UPLINK_PATH, UplinkTrials, WheelDownloads
from echo2d.net.api.page import NOTHING_ELSE, known_names, serve_page
from echo2d.net.gateway.errors import error_response
from echo2d.net.gateway.routes import GatewayBackend as Gateway
from echo2d.net.gateway.routes import is_gateway_path, mount
from echo2d.net.http.admission import DOOR, ConnectionAdmission, admit
from echo2d.net.http.costly_answer import CostlyAnswer
from echo2d.net.http.health import Health, add_health_routes
from echo2d.net.http.json_fields import (
    Handler,
    HttpRefusal,
    fields,
    from_hex,
    integer,
    integer_text,
    malformed,
    overloaded,
    seconds,
    secret_of,
)
from echo2d.net.security.auth import (
    CONTROL_LINK_PATH,
    ENROL_PATH,
    PEER_KEY_BYTES,
    Caller,
    Denied,
    Role,
)
from echo2d.net.tinker.models import ServedModels
from echo2d.this_build import THIS_BUILD

ENROL_BYTES_MAX = 1 << 10  # a key and a proof in hex, from a caller that has no key here yet
# If the coordinator needs longer, it is overloaded, and the caller should try again.
_ANSWER_S_MAX = 60.0
THIS_LEARNER_API = replace(OURS_AS_LEARNER_API, name=THIS_BUILD.name)

LEARNER: frozenset[Role] = frozenset({"learner"})
VIEWER: frozenset[Role] = frozenset({"viewer"})
WORKER: frozenset[Role] = frozenset({"worker"})
READERS: frozenset[Role] = frozenset({"learner", "gateway", "viewer", "operator"})
OPERATOR: frozenset[Role] = frozenset({"operator"})

log = logging.getLogger("echo2d.coordinator")


class ApiBackend(Health, Protocol):
    """What the API needs from the coordinator's runtime."""

    run_id: RunId
    viewers_see_samples: bool

    def caller(self, secret: str) -> Caller:
        """The caller with this secret. Denied: the secret is not valid."""

    async def recognise(self, secret: str) -> None:
        """Denied: the secret is not valid."""

    async def enrol(self, secret: str, public_key: bytes, proof: bytes) -> tuple[PeerId, str]:
        """The peer's id and certificate. Denied: the secret, key or proof is not valid."""

    async def ask(
        self, make: Callable[[RequestId], CoordinatorEvent], *, timeout_s: float
    ) -> Reply | None:
        """Put a request to the core; None if it was not answered in time."""

    async def ask_for_client(
        self, make: Callable[[RequestId], CoordinatorEvent], *, timeout_s: float
    ) -> Reply | None:
        """The same for a call of a client of the Tinker API, which may wait for a result."""

    async def publish(
        self, epoch: Epoch, version: Version, path: str | None, manifest: Manifest | None
    ) -> Reply | None:
        """Publish the snapshot in directory `path`, or the uploaded one (None).

        OperatorFault: it is not a snapshot, or not one that the coordinator may read.
        """

    async def upload(
        self, epoch: Epoch, version: Version, name: str, data: AsyncIterator[bytes]
    ) -> int:
        """Keep one file until its version is published; returns its size in bytes.

        OperatorFault: the name or the size is not allowed.
        """

    async def order_worker(
        self, peer: PeerId, order: WorkerOrder, *, hand_over: bool, timeout_s: float
    ) -> Reply | None:
        """Cordon, uncordon or drain a worker. OperatorFault: no such worker has enrolled."""

    def samples(self, step: int | None) -> dict[str, Any]:
        """Groups of a step as lines of the sample log, shortened; None: of the newest step."""

    def history(self, since: int) -> bytes:
        """JSON of the run's curves: one row for each step after `since`."""

    def live_page(self, *, role: Role, seen: int, plan: str, stripe: int) -> bytes:
        """JSON of what the page shows; see `runtime/coordinator/live_page.py`."""

    def status(self) -> dict[str, Any]: ...

    def own_status(self, token: str) -> dict[str, Any]:
        """What the owner of the token with this name may know. Cheap, so callers may ask often."""

    def metrics(self) -> bytes: ...

    async def attachment(self, digest: Digest) -> bytes | None:
        """The content of an attachment. None: no stored group names it."""

    async def wheel(self) -> tuple[str, bytes]:
        """The wheel's file name and bytes. OperatorFault: there is no wheel."""
        ...


def _error(
    request: web.Request, status: int, code: str, detail: str, *, refusal: HttpRefusal | None = None
) -> web.Response:
    # OpenAI's clients expect their own shape of errors on the gateway's paths.
    if is_gateway_path(request.path):
        return error_response(status, code, detail, refusal=refusal)
    return web.json_response({"error": code, "detail": detail}, status=status)


@web.middleware
async def _faults_to_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    if "Content-Encoding" in request.headers:
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        return _error(
            request, status, "encoded", "request bodies must not be encoded; omit Content-Encoding"
        )
    try:
        return await handler(request)
    except HttpRefusal as refusal:
        return _error(request, refusal.status, refusal.code, refusal.detail, refusal=refusal)
    except Denied as denied:
        return _error(request, denied.status, denied.code, denied.detail)
    except PeerFault as fault:
        return _error(request, HTTPStatus.BAD_REQUEST, "malformed", str(fault))
    except OperatorFault as fault:
        return _error(request, HTTPStatus.BAD_REQUEST, "refused", str(fault))
    except StoreFault as fault:
        code, host = ("full" if fault.full else "disk"), "on the coordinator's host"
        return _error(request, HTTPStatus.INSUFFICIENT_STORAGE, code, f"{host}: {fault}")
    except web.HTTPRequestEntityTooLarge:
        return _error(
            request,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "too_large",
            f"at most {BODY_BYTES_MAX} bytes",
        )
    except web.HTTPException as http:
        return _error(request, http.status, "http", http.reason)


# --- handlers


def _require_understood(header: str) -> None:
    """HttpRefusal: this learner's build and ours do not understand each other."""
    theirs = from_header(header)
    if theirs is not None and not THIS_LEARNER_API.speaks_with(theirs):
        detail = not_understood("learner", theirs, THIS_LEARNER_API, "learner API")
        raise HttpRefusal(HTTPStatus.CONFLICT, "build", detail)


class Api:
    """The handlers of one coordinator's API."""

    def __init__(self, backend: ApiBackend) -> None:
        self._backend = backend
        self._status = CostlyAnswer(lambda: json.dumps(backend.status()).encode())
        self._metrics = CostlyAnswer(backend.metrics)
        self._wheels = WheelDownloads()
        self._uplinks = UplinkTrials()

    def allow(self, roles: frozenset[Role], handler: Handler) -> Handler:
        """Wrap the handler so that it serves callers of these roles only."""

        async def checked(request: web.Request) -> web.StreamResponse:
            caller = self._backend.caller(secret_of(request))
            # A valid secret takes the connection out of the limits on strangers.
            admit(request)
            if caller.role not in roles:
                needed = " or ".join(sorted(roles))
                detail = f"token {caller.name} has the role {caller.role}; this needs {needed}"
                raise HttpRefusal(HTTPStatus.FORBIDDEN, "role", detail)
            if roles != LEARNER:
                return await handler(request)
            _require_understood(request.headers.get(BUILD_HEADER, ""))
            answer = await handler(request)
            # A newer learner sees here which requests this coordinator understands.
            answer.headers[BUILD_HEADER] = to_header(THIS_LEARNER_API)
            return answer

        return checked

    async def enrol(self, request: web.Request) -> web.Response:
        secret = secret_of(request)
        await self._backend.recognise(secret)
        if (request.content_length or ENROL_BYTES_MAX + 1) > ENROL_BYTES_MAX:
            raise malformed(f"expected a body of at most {ENROL_BYTES_MAX} bytes, with its length")
        body = await fields(request, {"key", "proof"})
        key, proof = (
            from_hex(body["key"], "key", PEER_KEY_BYTES),
            from_hex(body["proof"], "proof", 2 * PEER_KEY_BYTES),
        )
        peer, certificate = await self._backend.enrol(secret, key, proof)
        return web.json_response(
            {"peer": peer, "run_id": self._backend.run_id, "certificate": certificate}
        )

    async def open_session(self, request: web.Request) -> web.Response:
        body = await fields(request, {"resume_step"}, frozenset({"learner", "take_over", "steps"}))
        step = integer(body["resume_step"], "resume_step")
        learner, take_over = learner_identity(body.get("learner", "")), body.get("take_over", False)
        if not isinstance(take_over, bool):
            raise malformed("take_over: expected true or false")
        steps = integer(body.get("steps", 0), "steps")
        return await self._ask(lambda number: SessionAsked(number, step, learner, take_over, steps))

    async def session_rules(self, _: web.Request) -> web.Response:
        return await self._ask(RulesAsked)

    async def alive(self, request: web.Request) -> web.Response:
        body = await fields(request, {"epoch", "software"})
        epoch, software = _epoch_in(body), software_name(body["software"])
        return await self._ask(lambda number: AliveTold(number, epoch, software))

    async def publish(self, request: web.Request) -> web.Response:
        optional = frozenset({"path", "upload", "manifest"})
        body = await fields(request, {"version", "epoch"}, optional)
        path = body.get("path")
        if isinstance(path, str) and not path.isprintable():
            raise malformed("path: expected printable text")
        if (path is None) != (body.get("upload") is True) or not isinstance(path, str | None):
            raise malformed('expected either "path": a directory, or "upload": true')
        epoch, version = _epoch_in(body), Version(integer(body["version"], "version"))
        manifest = None if "manifest" not in body else manifest_of(body["manifest"])
        await self._fence(epoch)
        return _answer(await self._backend.publish(epoch, version, path, manifest))

    async def upload(self, request: web.Request) -> web.Response:
        epoch, version = (
            _epoch(request),
            Version(integer_text(request.match_info["version"], "version")),
        )
        await self._fence(epoch)
        size = await self._backend.upload(
            epoch, version, request.match_info["name"], request.content.iter_any()
        )
        return web.json_response({"bytes": size})

    async def take_batch(self, request: web.Request) -> web.Response:
        epoch, step = _epoch(request), _step(request)
        reply = await self._backend.ask(
            lambda number: BatchAsked(number, epoch, step), timeout_s=LONG_POLL_S
        )
        # The token may have been revoked during the long poll.
        self._backend.caller(secret_of(request))
        return web.Response(status=HTTPStatus.NO_CONTENT) if reply is None else _answer(reply)

    async def commit(self, request: web.Request) -> web.Response:
        required = {"batch_digest", "epoch", "t_train_s"}
        optional = frozenset({"scores", "figures"})
        body, step = await fields(request, required, optional), _step(request)
        digest = Digest(from_hex(body["batch_digest"], "batch_digest", DIGEST_BYTES))
        epoch, t_train_s = _epoch_in(body), seconds(body["t_train_s"], "t_train_s")
        scores = scores_of(body.get("scores", []))
        figures = figures_of(body["figures"]) if "figures" in body else None
        return await self._ask(
            lambda number: CommitAsked(number, epoch, step, digest, t_train_s, scores, figures)
        )

    async def refuse(self, request: web.Request) -> web.Response:
        body, step = await fields(request, {"groups", "reasons", "epoch"}), _step(request)
        epoch, groups = _epoch_in(body), refused_groups(body)
        return await self._ask(lambda number: RefuseAsked(number, epoch, step, groups))

    async def attachment(self, request: web.Request) -> web.Response:
        digest = Digest(from_hex(request.match_info["digest"], "digest", DIGEST_BYTES))
        content = await self._backend.attachment(digest)
        if content is None:
            detail = (
                f"attachment {digest.hex()[:16]}: no group that is kept names it; "
                "fetch attachments before the checkpoint of their step"
            )
            raise HttpRefusal(HTTPStatus.NOT_FOUND, "attachment", detail)
        return web.Response(body=content, content_type="application/octet-stream")

    async def checkpoint(self, request: web.Request) -> web.Response:
        body = await fields(request, {"step", "epoch"})
        epoch, step = _epoch_in(body), integer(body["step"], "step")
        return await self._ask(lambda number: CheckpointAsked(number, epoch, step))

    async def evaluations(self, request: web.Request) -> web.Response:
        after = integer_text(request.query.get("after", "0"), "after")
        return await self._ask(lambda number: EvaluationsAsked(number, after))

    async def evaluate(self, request: web.Request) -> web.Response:
        body = await fields(request, {"version", "epoch", "after"})
        epoch, version = _epoch_in(body), Version(integer(body["version"], "version"))
        after = integer(body["after"], "after")
        return await self._ask(lambda number: EvaluationsAsked(number, after, epoch, version))

    async def samples(self, request: web.Request) -> web.Response:
        step = request.query.get("step")
        return web.json_response(
            self._backend.samples(None if step is None else integer_text(step, "step"))
        )

    def order(self, order: WorkerOrder) -> Handler:
        """A handler of orders about one worker."""
        optional = frozenset({"hand_over"}) if order == "drain" else frozenset[str]()

        async def take(request: web.Request) -> web.Response:
            body = await fields(request, set(), optional)
            hand_over = body.get("hand_over", False)
            if not isinstance(hand_over, bool):
                raise malformed("hand_over: expected true or false")
            peer = PeerId(request.match_info["peer"])
            if not peer.isprintable():
                raise malformed("expected the id of a worker")
            ordered = await self._backend.order_worker(
                peer, order, hand_over=hand_over, timeout_s=_ANSWER_S_MAX
            )
            self._status.forget()
            by = self._backend.caller(secret_of(request)).name
            log.info("ordered worker %s %s by=%s", order, peer, by)
            return _answer(ordered)

        return take

    async def history(self, request: web.Request) -> web.Response:
        since = integer_text(request.query.get("since", "0"), "since")
        return web.Response(body=self._backend.history(since), content_type="application/json")

    async def live(self, request: web.Request) -> web.Response:
        seen = integer_text(request.query.get("seen", "0"), "seen")
        stripe = integer_text(request.query.get("stripe", "0"), "stripe")
        body = self._backend.live_page(
            role=self._backend.caller(secret_of(request)).role,
            seen=seen,
            plan=request.query.get("plan", ""),
            stripe=stripe,
        )
        return web.Response(body=body, content_type="application/json")

    # aiohttp passes the request to every handler, hence the unused argument.
    async def status(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.Response(body=self._status.get(), content_type="application/json")

    async def own_status(self, request: web.Request) -> web.Response:
        token = self._backend.caller(secret_of(request)).name
        return web.json_response(self._backend.own_status(token))

    async def metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.Response(body=self._metrics.get(), content_type="text/plain", charset="utf-8")

    async def wheel(self, request: web.Request) -> web.StreamResponse:
        token = self._backend.caller(secret_of(request)).name
        return await self._wheels.send(request, token, self._backend.wheel)

    async def uplink(self, request: web.Request) -> web.Response:
        token = self._backend.caller(secret_of(request)).name
        return await self._uplinks.take(request, token)

    async def _fence(self, epoch: Epoch) -> None:
        """Check the epoch before any bytes are read.

        HttpRefusal: a newer learner has taken over the run, or the coordinator is overloaded.
        """
        reply = await self._backend.ask(
            lambda number: EpochAsked(number, epoch), timeout_s=_ANSWER_S_MAX
        )
        if reply is None:
            raise overloaded()
        if reply.status != HTTPStatus.OK:
            assert isinstance(reply.body, dict)
            raise HttpRefusal(reply.status, reply.body["error"], reply.body["detail"])

    async def _ask(self, make: Callable[[RequestId], CoordinatorEvent]) -> web.Response:
        return _answer(await self._backend.ask(make, timeout_s=_ANSWER_S_MAX))


def _epoch_in(body: Mapping[str, Any]) -> Epoch:
    return Epoch(integer(body["epoch"], "epoch"))


def _epoch(request: web.Request) -> Epoch:
    return Epoch(integer_text(request.query.get("epoch"), "epoch"))


def _step(request: web.Request) -> int:
    return integer_text(request.match_info["step"], "step")


def _answer(reply: Reply | None) -> web.Response:
    if reply is None:
        raise overloaded()
    if isinstance(reply.body, bytes):
        assert reply.digest is not None, "a batch is answered with its digest"
        headers = {DIGEST_HEADER: reply.digest.hex(), STALENESS_HEADER: str(reply.staleness_max)}
        # aiohttp sends a file object in parts; a whole batch in one write would block the loop.
        body = io.BytesIO(reply.body)
        return web.Response(
            status=reply.status, body=body, headers=headers, content_type="application/octet-stream"
        )
    return web.json_response(reply.body, status=reply.status)


# aiohttp requires signal handlers to be coroutine functions.
async def _guard(request: web.Request, response: web.StreamResponse) -> None:  # noqa: ARG001
    """Add the headers for browsers to every answer, and remove the versions of libraries."""
    response.headers.setdefault("Content-Security-Policy", NOTHING_ELSE)
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.pop("Server", None)


def make_app(
    backend: ApiBackend,
    *,
    worker: Handler,
    page: Mapping[str, bytes],
    gateway: Gateway | None = None,
    tinker: ServedModels | None = None,
    names: Collection[str] = (),
) -> web.Application:
    """The application, to be served with `make_runner`.

    worker: handles the control links. page: the dashboard's files, by name. gateway: None if it is disabled. tinker:
    the models of the Tinker API; None: it is not served. names: the names under which browsers may ask, besides
    addresses and localhost.
    """
    api, app = (
        Api(backend),
        web.Application(
            middlewares=[_faults_to_json, known_names(names)], client_max_size=BODY_BYTES_MAX
        ),
    )
    app.on_response_prepare.append(_guard)
    app[DOOR] = ConnectionAdmission()
    serve_page(app, page)
    add_health_routes(app, backend)
    app.router.add_get(CONTROL_LINK_PATH, worker)
    app.router.add_post(ENROL_PATH, api.enrol)
    app.router.add_post(SESSION_PATH, api.allow(LEARNER, api.open_session))
    app.router.add_get(SESSION_PATH, api.allow(LEARNER, api.session_rules), allow_head=False)
    app.router.add_post(ALIVE_PATH, api.allow(LEARNER, api.alive))
    app.router.add_post(CHECKPOINT_PATH, api.allow(LEARNER, api.checkpoint))
    app.router.add_post(VERSIONS_PATH, api.allow(LEARNER, api.publish))
    app.router.add_put(FILES_PATH + "/{name:.+}", api.allow(LEARNER, api.upload))
    app.router.add_get(BATCH_PATH, api.allow(LEARNER, api.take_batch))
    app.router.add_post(COMMIT_PATH, api.allow(LEARNER, api.commit))
    app.router.add_post(REFUSE_PATH, api.allow(LEARNER, api.refuse))
    app.router.add_get(ATTACHMENT_PATH, api.allow(LEARNER, api.attachment))
    app.router.add_get(EVALUATIONS_PATH, api.allow(READERS, api.evaluations))
    app.router.add_post(EVALUATIONS_PATH, api.allow(LEARNER, api.evaluate))
    sees = LEARNER | VIEWER if backend.viewers_see_samples else LEARNER
    app.router.add_get(SAMPLES_PATH, api.allow(sees, api.samples))
    for order in get_args(WorkerOrder):
        handler = api.allow(OPERATOR, api.order(order))
        app.router.add_post(WORKER_ORDER_PATH.replace("{order}", order), handler)
    app.router.add_get("/v1/wheel", api.allow(WORKER, api.wheel))
    app.router.add_post(UPLINK_PATH, api.allow(WORKER, api.uplink))
    app.router.add_get("/v1/history", api.allow(READERS, api.history))
    app.router.add_get("/v1/live", api.allow(READERS, api.live))
    app.router.add_get(STATUS_PATH, api.allow(READERS, api.status))
    app.router.add_get(OWN_STATUS_PATH, api.allow(WORKER, api.own_status))
    app.router.add_get("/metrics", api.allow(READERS, api.metrics))
    if gateway is not None:
        mount(app, gateway, api.allow)
    if tinker is not None:
        # It needs protobuf, which only runs with [tinker] have.
        from echo2d.net.tinker.routes import mount as mount_tinker

        mount_tinker(app, backend, tinker, api.allow)
    return app

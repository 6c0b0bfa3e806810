"""The public API over real HTTP, with a backend that records its calls."""

import asyncio
import gzip
import io
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_args

import aiohttp
import pytest
import yarl
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.client.http import BODY_BYTES_MAX, DIGEST_HEADER, SCORES_MAX
from echo2d.core.base.ids import Digest, Epoch, GroupId, PeerId, RequestId, RunId, Version
from echo2d.core.cluster.events import Reply
from echo2d.core.coordinator.events import (
    AliveTold,
    BatchAsked,
    CheckpointAsked,
    CommitAsked,
    CoordinatorEvent,
    EpochAsked,
    RefuseAsked,
    SessionAsked,
    WorkerOrder,
    WorkerOrdered,
)
from echo2d.core.protocol.trajectory import StepFigures, TrajectoryScore
from echo2d.core.weights.manifest import Manifest
from echo2d.errors import OperatorFault, StoreFault
from echo2d.net.api import boxes
from echo2d.net.api import routes as api_routes
from echo2d.net.api.boxes import WHEELS_MAX, WHEELS_PER_TOKEN_MAX
from echo2d.net.api.page import read_page
from echo2d.net.api.routes import (
    ENROL_BYTES_MAX,
    make_app,
)
from echo2d.net.http.serving import make_runner
from echo2d.net.security.auth import Caller, Denied, Role, enrol_proof, public_bytes
from tests.support.polling import HANG_S

DIGEST = Digest(b"d" * 32)
PAGE = read_page()
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
ROLES: dict[str, Any] = {
    "L": "learner",
    "V": "viewer",
    "W": "worker",
    "O": "operator",
}


class Backend:
    """Answers everything with `reply`, or not at all when it is None."""

    def __init__(self) -> None:
        self.run_id = RunId("run")
        self.viewers_see_samples = False
        self.asked: list[CoordinatorEvent] = []
        self.published: list[tuple[int, int, str | None]] = []
        self.manifests: list[Manifest | None] = []
        self.uploaded: list[tuple[int, int, str, bytes]] = []
        self.reply: Reply | None = Reply(RequestId(7), 200, {"fine": True})
        self.fault: Exception | None = None
        self.gone = asyncio.Event()

    def caller(self, secret: str) -> Caller:
        if secret not in ROLES:
            raise Denied(401, "credential", "unknown credential")
        return Caller(secret, ROLES[secret])

    async def recognise(self, secret: str) -> None:
        self.caller(secret)

    async def enrol(self, secret: str, public_key: bytes, proof: bytes) -> tuple[PeerId, str]:
        self.caller(secret)
        assert proof == enrol_proof(KEY, secret)
        return PeerId(public_key.hex()[:8]), "a certificate"

    async def attachment(self, digest: Digest) -> bytes | None:
        return None

    async def ask(
        self, make: Callable[[RequestId], CoordinatorEvent], *, timeout_s: float
    ) -> Reply | None:
        self.asked.append(make(RequestId(7)))
        if self.reply is None:
            try:
                await asyncio.sleep(timeout_s)
            except asyncio.CancelledError:
                self.gone.set()
                raise
        return self.reply

    ask_for_client = ask

    async def order_worker(
        self, peer: PeerId, order: WorkerOrder, *, hand_over: bool, timeout_s: float
    ) -> Reply | None:
        def make(number: RequestId) -> CoordinatorEvent:
            return WorkerOrdered(number, peer, order, hand_over)

        return await self.ask(make, timeout_s=timeout_s)

    async def publish(
        self, epoch: Epoch, version: Version, path: str | None, manifest: Manifest | None
    ) -> Reply | None:
        if self.fault is not None:
            raise self.fault
        self.published.append((epoch, version, path))
        self.manifests.append(manifest)
        return self.reply

    async def upload(
        self, epoch: Epoch, version: Version, name: str, data: AsyncIterator[bytes]
    ) -> int:
        content = b"".join([part async for part in data])
        self.uploaded.append((epoch, version, name, content))
        return len(content)

    def samples(self, step: int | None) -> dict[str, Any]:
        return {"step": step, "groups": []}

    async def wheel(self) -> tuple[str, bytes]:
        return "echo2d-0-py3-none-any.whl", b"a wheel"

    def history(self, since: int) -> bytes:
        return b'{"since":%d}' % since

    def live_page(self, *, role: Role, seen: int, plan: str, stripe: int) -> bytes:
        return json.dumps([role, seen, plan, stripe]).encode()

    def status(self) -> dict[str, Any]:
        return {"version": 3}

    def own_status(self, token: str) -> dict[str, Any]:
        return {"boxes of": token}

    def metrics(self) -> bytes:
        return b"echo2d_version 3\n"

    def unhealthy(self) -> str:
        return ""

    def unready(self) -> str:
        return "the seed is away"


async def no_worker(request: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


class Client:
    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url

    async def __call__(
        self, method: str, path: str, secret: str | None = "L", **options: Any
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        headers |= options.pop("headers", {})
        async with self.http.request(
            method, self.url + path, headers=headers, **options
        ) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.read()


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
async def call(backend: Backend) -> AsyncIterator[Client]:
    async with serving(backend) as client:
        yield client


@asynccontextmanager
async def serving(backend: Backend) -> AsyncIterator[Client]:
    runner = make_runner(
        make_app(backend, worker=no_worker, page=PAGE, names=["run.example.org"]),
        shutdown_timeout_s=0.1,
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:
        yield Client(http, f"http://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


async def test_a_wheel_that_is_read_too_slowly_is_cut_off(
    call: Client,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = [64 << 20, 1]

    async def wheel() -> tuple[str, bytes]:
        return "a.whl", bytes(sizes.pop(0))

    monkeypatch.setattr(backend, "wheel", wheel)
    monkeypatch.setattr(boxes, "WHEELS_PER_TOKEN_MAX", 1)
    monkeypatch.setattr(boxes, "WHEEL_S_MAX", 0.05)
    reader, writer = await asyncio.open_connection(*call.url.removeprefix("http://").split(":"))
    writer.write(b"GET /v1/wheel HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer W\r\n\r\n")
    async with asyncio.timeout(HANG_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        # No more is read until the server has given up, and has room for the next one.
        while (await call("GET", "/v1/wheel", "W"))[0] != 200:
            pass
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(64 << 20)
    writer.close()
    assert [each.getMessage() for each in caplog.records if each.exc_info] == []


@pytest.mark.parametrize("most", ["token", "run"])
async def test_the_number_of_wheels_sent_at_once_is_limited(
    call: Client, backend: Backend, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    asked, go = asyncio.Semaphore(0), asyncio.Event()
    many = WHEELS_PER_TOKEN_MAX if most == "token" else WHEELS_MAX
    if most == "run":
        monkeypatch.setattr(boxes, "WHEELS_PER_TOKEN_MAX", 2 * WHEELS_MAX)

    async def wheel() -> tuple[str, bytes]:
        asked.release()
        await go.wait()
        return "echo2d-0-py3-none-any.whl", b"a wheel"

    monkeypatch.setattr(backend, "wheel", wheel)
    async with asyncio.TaskGroup() as tasks:
        open_ = [tasks.create_task(call("GET", "/v1/wheel", "W")) for _ in range(many)]
        for _ in open_:
            await asked.acquire()
        status, answer = await call("GET", "/v1/wheel", "W")
        assert (status, answer["error"]) == (503, "busy")
        go.set()
    assert [each.result() for each in open_] == [(200, b"a wheel")] * many
    assert await call("GET", "/v1/wheel", "W") == (200, b"a wheel"), "they made room"


async def test_a_learner_may_send_its_identity(call: Client, backend: Backend) -> None:
    named = {"resume_step": 5, "learner": "host-1", "take_over": True, "steps": 80}
    assert (await call("POST", "/v1/learner/session", json=named))[0] == 200
    assert backend.asked == [SessionAsked(RequestId(7), 5, "host-1", take_over=True, steps=80)]
    for wrong in (
        {"learner": 1},
        {"learner": "x" * 129},
        {"learner": "a\n"},
        {"take_over": 1},
        {"steps": -1},
    ):
        status, answer = await call("POST", "/v1/learner/session", json={**named, **wrong})
        assert (status, answer["error"]) == (400, "malformed")


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/learner/session", {"resume_step": 5}, SessionAsked(RequestId(7), 5)),
        (
            "/v1/learner/alive",
            {"epoch": 2, "software": "0.1.0"},
            AliveTold(RequestId(7), Epoch(2), "0.1.0"),
        ),
        (
            "/v1/learner/checkpoint",
            {"step": 4, "epoch": 2},
            CheckpointAsked(RequestId(7), Epoch(2), 4),
        ),
        (
            "/v1/batches/3/commit",
            {"batch_digest": DIGEST.hex(), "epoch": 2, "t_train_s": 1},
            CommitAsked(RequestId(7), Epoch(2), 3, DIGEST, 1.0),
        ),
        (
            "/v1/batches/3/refuse",
            {"groups": [9], "reasons": ["stale"], "epoch": 2},
            RefuseAsked(RequestId(7), Epoch(2), 3, ((GroupId(9), "stale"),)),
        ),
    ],
)
async def test_learner_calls_become_events(
    call: Client, backend: Backend, path: str, body: dict[str, Any], event: CoordinatorEvent
) -> None:
    assert await call("POST", path, json=body) == (200, {"fine": True})
    assert backend.asked == [event]
    assert (await call("POST", path, json={**body, "more": 1}))[0] == 400
    for name in body:
        status, answer = await call(
            "POST", path, json={key: value for key, value in body.items() if key != name}
        )
        assert (status, answer["error"]) == (400, "malformed")
        assert name in answer["detail"]
    assert (await call("POST", path, secret="V", json=body))[0] == 403
    assert (await call("POST", path, secret="nobody", json=body))[0] == 401
    assert (await call("POST", path, secret=None, json=body))[0] == 401
    assert backend.asked == [event]


@pytest.mark.parametrize("value", [-1, 1 << 63, 1.5, "1", None, True, [1]])
async def test_a_number_that_is_no_integer_is_refused(
    call: Client, backend: Backend, value: Any
) -> None:
    status, answer = await call("POST", "/v1/learner/session", json={"resume_step": value})
    assert (status, answer["error"], backend.asked) == (400, "malformed", [])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_digest", "zz"),
        ("batch_digest", "00"),
        ("batch_digest", 3),
        ("t_train_s", -1),
        ("t_train_s", "1"),
        ("t_train_s", 10**400),
    ],
)
async def test_digests_and_seconds_are_checked(
    call: Client, backend: Backend, field: str, value: Any
) -> None:
    body = {"batch_digest": DIGEST.hex(), "epoch": 2, "t_train_s": 1.0, field: value}
    status, answer = await call("POST", "/v1/batches/3/commit", json=body)
    assert (status, backend.asked) == (400, [])
    assert field in answer["detail"]


def commit_with(scores: Any) -> dict[str, Any]:
    return {"batch_digest": DIGEST.hex(), "epoch": 2, "t_train_s": 1.0, "scores": scores}


async def test_a_commit_carries_scores(call: Client, backend: Backend) -> None:
    body = commit_with([[9, 0, 0, -1.5], [9, 1, 1e6, 3]])
    assert (await call("POST", "/v1/batches/3/commit", json=body))[0] == 200
    scores = (TrajectoryScore(9, 0, 0.0, -1.5), TrajectoryScore(9, 1, 1e6, 3.0))
    assert backend.asked == [CommitAsked(RequestId(7), Epoch(2), 3, DIGEST, 1.0, scores)]


async def test_a_commit_carries_figures(call: Client, backend: Backend) -> None:
    body = {**commit_with([]), "figures": {"entropy": 1.5, "grad_norm": 2}}
    assert (await call("POST", "/v1/batches/3/commit", json=body))[0] == 200
    figures = StepFigures(entropy=1.5, grad_norm=2.0)
    assert backend.asked == [CommitAsked(RequestId(7), Epoch(2), 3, DIGEST, 1.0, (), figures)]


@pytest.mark.parametrize(
    "figures",
    [None, [1.0], {"perplexity": 1.0}, {"entropy": "1"}, {"entropy": 1e7}, {"entropy": True}],
)
async def test_figures_are_checked(call: Client, backend: Backend, figures: Any) -> None:
    body = {**commit_with([]), "figures": figures}
    status, answer = await call("POST", "/v1/batches/3/commit", json=body)
    assert (status, backend.asked) == (400, [])
    assert "figures" in answer["detail"]


@pytest.mark.parametrize(
    "scores",
    [
        None,
        {},
        "scores",
        [1],
        [[9, 0, 0.5]],
        [[9, 0, 0.5, 0.5, 0.5]],
        [{"group": 9}],
        [[-1, 0, 0.5, 0.5]],
        [[9, 0.0, 0.5, 0.5]],
        [[9, 1 << 63, 0.5, 0.5]],
        [[9, 0, "0.5", 0.5]],
        [[9, 0, 0.5, None]],
        [[9, 0, True, 0.5]],
        [[9, 0, -0.5, 0.5]],
        [[9, 0, 0.5, math.nan]],
        [[9, 0, math.inf, 0.5]],
        [[9, 0, 0.5, -math.inf]],
        [[9, 0, 0.5, 10**400]],
        [[9, 0, 1e300, 0.5]],
        [[9, 0, 0.5, 0.5]] * (SCORES_MAX + 1),
    ],
)
async def test_scores_are_checked(call: Client, backend: Backend, scores: Any) -> None:
    status, answer = await call("POST", "/v1/batches/3/commit", json=commit_with(scores))
    assert (status, answer["error"], backend.asked) == (400, "malformed", [])
    assert answer["detail"].startswith("scores")
    assert "\n" not in answer["detail"]


async def test_the_scores_of_the_largest_batch_are_taken(call: Client, backend: Backend) -> None:
    rows = [[number, 0, 0.5, 0.5] for number in range(SCORES_MAX)]
    assert (await call("POST", "/v1/batches/3/commit", json=commit_with(rows)))[0] == 200
    (event,) = backend.asked
    assert isinstance(event, CommitAsked)
    assert len(event.scores) == SCORES_MAX


async def test_seconds_are_finite(call: Client, backend: Backend) -> None:
    body = f'{{"batch_digest": "{DIGEST.hex()}", "epoch": 2, "t_train_s": NaN}}'
    assert (await call("POST", "/v1/batches/3/commit", data=body))[0] == 400


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_refused(call: Client, data: bytes) -> None:
    status, answer = await call("POST", "/v1/learner/session", data=data)
    assert (status, answer["error"]) == (400, "malformed")


async def test_large_bodies_are_refused(call: Client) -> None:
    status, answer = await call(
        "POST",
        "/v1/learner/session",
        data=io.BytesIO(b" " * (BODY_BYTES_MAX + 1)),
    )
    assert (status, answer["error"]) == (413, "too_large")


async def test_bodies_are_not_decompressed(call: Client, backend: Backend) -> None:
    data, headers = gzip.compress(b'{"resume_step": 0}'), {"Content-Encoding": "gzip"}
    assert (await call("POST", "/v1/learner/session", data=data, headers=headers))[0] == 415
    assert backend.asked == []


@pytest.mark.parametrize(
    "change",
    [
        {"groups": []},
        {"groups": [1, 2]},
        {"groups": ["1"]},
        {"reasons": [1]},
        {"reasons": "stale"},
        {"reasons": ["\ud800"]},
    ],
)
async def test_refusals_of_groups_are_checked(
    call: Client, backend: Backend, change: dict[str, Any]
) -> None:
    body = {"groups": [1], "reasons": ["stale"], "epoch": 2, **change}
    assert (await call("POST", "/v1/batches/3/refuse", json=body))[0] == 400
    assert backend.asked == []


async def test_a_batch_is_bytes_with_their_digest(call: Client, backend: Backend) -> None:
    backend.reply = Reply(RequestId(7), 200, b"batch", DIGEST)
    headers = {"Authorization": "Bearer L"}
    async with call.http.get(f"{call.url}/v1/batches/3?epoch=2", headers=headers) as response:
        assert await response.read() == b"batch"
        assert response.headers[DIGEST_HEADER] == DIGEST.hex()
    assert backend.asked == [BatchAsked(RequestId(7), Epoch(2), 3)]


async def test_a_caller_revoked_during_a_long_poll_gets_no_batch(
    call: Client, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def revoked(
        make: Callable[[RequestId], CoordinatorEvent], *, timeout_s: float
    ) -> Awaitable[Reply | None]:
        monkeypatch.delitem(ROLES, "L")
        return ask(make, timeout_s=timeout_s)

    ask, backend.reply = backend.ask, Reply(RequestId(7), 200, b"batch", DIGEST)
    monkeypatch.setattr(backend, "ask", revoked)
    assert (await call("GET", "/v1/batches/4?epoch=2"))[0] == 401


async def test_a_long_poll_without_a_batch_ends_empty(
    call: Client, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_routes, "LONG_POLL_S", 0.01)
    backend.reply = None
    assert await call("GET", "/v1/batches/3?epoch=2") == (204, b"")


async def test_a_caller_that_hangs_up_is_noticed(call: Client, backend: Backend) -> None:
    backend.reply = None
    with pytest.raises(TimeoutError):
        await call("GET", "/v1/batches/3?epoch=2", timeout=aiohttp.ClientTimeout(total=0.05))
    await backend.gone.wait()


@pytest.mark.parametrize(
    "path", ["/v1/batches/3", "/v1/batches/x?epoch=1", "/v1/batches/3?epoch=-1"]
)
async def test_batches_need_step_and_epoch(call: Client, path: str) -> None:
    assert (await call("GET", path))[0] == 400


async def test_the_cores_refusals_are_passed_on(call: Client, backend: Backend) -> None:
    backend.reply = Reply(RequestId(7), 409, {"error": "fenced", "detail": "epoch 3 is newer"})
    status, answer = await call("POST", "/v1/learner/session", json={"resume_step": 0})
    assert (status, answer["error"]) == (409, "fenced")


async def test_a_caller_whose_call_is_unanswered_is_asked_to_try_again(
    call: Client, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_routes, "_ANSWER_S_MAX", 0.01)
    backend.reply = None
    status, answer = await call("POST", "/v1/learner/session", json={"resume_step": 0})
    assert (status, answer["error"]) == (503, "busy")


async def test_versions_are_published_by_path_or_upload(call: Client, backend: Backend) -> None:
    common = {"version": 1, "epoch": 2}
    assert (await call("POST", "/v1/versions", json={**common, "path": "/x"}))[0] == 200
    assert (await call("POST", "/v1/versions", json={**common, "upload": True}))[0] == 200
    assert backend.published == [(2, 1, "/x"), (2, 1, None)]
    for wrong in (
        {},
        {"path": 3},
        {"upload": False},
        {"path": "/x", "upload": True},
        {"upload": 1},
    ):
        assert (await call("POST", "/v1/versions", json={**common, **wrong}))[0] == 400
    assert len(backend.published) == 2


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (OperatorFault("no tokenizer.json"), 400, "refused"),
        (StoreFault("Too many open files"), 507, "disk"),
        (StoreFault("No space left on device", full=True), 507, "full"),
    ],
)
async def test_a_bad_snapshot_is_refused_in_one_clear_line(
    call: Client, backend: Backend, fault: Exception, status: int, code: str
) -> None:
    backend.fault = fault
    found, answer = await call(
        "POST", "/v1/versions", json={"version": 1, "epoch": 2, "path": "/x"}
    )
    whose = "on the coordinator's host: " if status == 507 else ""
    assert (found, answer) == (status, {"error": code, "detail": f"{whose}{fault}"})


async def test_files_are_uploaded_unchanged(call: Client, backend: Backend) -> None:
    content = bytes(3 << 20)
    path = "/v1/versions/1/files/sub/model.safetensors?epoch=2"
    assert await call("PUT", path, data=io.BytesIO(content)) == (200, {"bytes": len(content)})
    assert backend.uploaded == [(2, 1, "sub/model.safetensors", content)]
    assert (await call("PUT", path, secret="W", data=b""))[0] == 403


async def test_a_worker_enrols_with_its_proof(call: Client) -> None:
    body = {"key": public_bytes(KEY).hex(), "proof": enrol_proof(KEY, "W").hex()}
    status, answer = await call("POST", "/v1/enrol", secret="W", json=body)
    assert (status, answer) == (
        200,
        {"peer": public_bytes(KEY).hex()[:8], "run_id": "run", "certificate": "a certificate"},
    )
    assert (await call("POST", "/v1/enrol", secret="nobody", json=body))[0] == 401
    assert (await call("POST", "/v1/enrol", secret=None, json=body))[0] == 401
    assert (await call("POST", "/v1/enrol", secret="W", json={**body, "key": "00"}))[0] == 400
    long = {**body, "key": "0" * ENROL_BYTES_MAX}
    status, answer = await call("POST", "/v1/enrol", secret="W", json=long)
    assert (status, answer["error"]) == (400, "malformed")
    assert f"at most {ENROL_BYTES_MAX} bytes" in answer["detail"]


async def test_status_and_metrics_are_for_readers(call: Client) -> None:
    assert await call("GET", "/v1/status", secret="V") == (200, {"version": 3})
    assert await call("GET", "/metrics", secret="V") == (200, b"echo2d_version 3\n")
    assert (await call("GET", "/v1/status", secret="W"))[0] == 403
    assert await call("GET", "/v1/status/own", secret="W") == (200, {"boxes of": "W"})
    assert await call("GET", "/v1/status/own?token=V", secret="W") == (200, {"boxes of": "W"})
    assert (await call("GET", "/v1/samples", secret="V"))[0] == 403
    assert (await call("GET", "/metrics", secret=None))[0] == 401


async def test_probes_need_no_credential(call: Client) -> None:
    assert await call("GET", "/healthz", secret=None) == (200, b"ok\n")
    assert await call("GET", "/readyz", secret=None) == (503, b"the seed is away\n")


@pytest.mark.parametrize("order", get_args(WorkerOrder))
async def test_an_operator_orders_workers(
    call: Client, backend: Backend, order: WorkerOrder
) -> None:
    path, ordered = f"/v1/workers/box/{order}", WorkerOrdered(RequestId(7), PeerId("box"), order)
    assert await call("POST", path, secret="O", json={}) == (200, {"fine": True})
    assert backend.asked == [ordered]
    for secret, status in (("L", 403), ("V", 403), ("W", 403), ("x", 401)):
        assert (await call("POST", path, secret=secret, json={}))[0] == status
    assert (await call("POST", path, secret="O", json={"hand_over": 1}))[0] == 400
    assert (await call("POST", "/v1/workers/%0a/cordon", secret="O", json={}))[0] == 400
    assert backend.asked == [ordered]


async def test_only_a_drain_hands_over(call: Client, backend: Backend) -> None:
    for order, status in (("cordon", 400), ("drain", 200)):
        path, body = f"/v1/workers/box/{order}", {"hand_over": True}
        assert (await call("POST", path, secret="O", json=body))[0] == status
    assert backend.asked == [WorkerOrdered(RequestId(7), PeerId("box"), "drain", hand_over=True)]


async def test_viewers_see_samples_only_if_the_operator_says_so(backend: Backend) -> None:
    for allowed, status in ((False, 403), (True, 200)):
        backend.viewers_see_samples = allowed
        async with serving(backend) as call:
            assert (await call("GET", "/v1/samples", secret="V"))[0] == status
            assert await call("GET", "/v1/samples?step=4") == (200, {"step": 4, "groups": []})
            assert (await call("GET", "/v1/samples", secret="W"))[0] == 403


async def test_the_page_holds_no_data_and_needs_no_credential(call: Client) -> None:
    status, page = await call("GET", "/", secret=None)
    assert status == 200
    assert b"/page/main.js" in page


async def test_bytes_that_are_no_http_get_one_line(
    call: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    address = yarl.URL(call.url)
    for noise in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",  # aiohttp says nothing of a TLS hello
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: %s\r\n\r\n" % (b"x" * 9000),
    ):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(noise)
        assert b" 400 " in await reader.readline()
        writer.close()
    told = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert len(told) == 2
    assert all(record.levelname == "INFO" and record.exc_info is None for record in told)
    assert not any("\n" in record.getMessage() for record in told)
    assert (await call("GET", "/v1/status"))[0] == 200


async def test_any_other_request_gets_a_json_error(call: Client) -> None:
    assert await call("GET", "/nothing") == (404, {"error": "http", "detail": "Not Found"})
    assert (await call("GET", "/v1/versions"))[0] == 405


async def test_a_fenced_learner_need_not_send_its_bytes(call: Client, backend: Backend) -> None:
    fenced = {"error": "fenced", "detail": "epoch 3 is in force"}
    backend.reply = Reply(RequestId(7), 409, {**fenced, "epoch": 3})
    assert await call("PUT", "/v1/versions/4/files/a.json?epoch=2", data=b"{}") == (409, fenced)
    assert await call(
        "POST", "/v1/versions", json={"version": 4, "epoch": 2, "path": "/out/4"}
    ) == (409, fenced)
    assert backend.asked == [EpochAsked(RequestId(7), Epoch(2))] * 2
    assert (backend.uploaded, backend.published) == ([], [])


@pytest.mark.parametrize(
    "path", ["/", "/v1/status", "/metrics", "/healthz", "/v1/models", "/nothing"]
)
async def test_every_answer_has_headers_that_protect_browsers(call: Client, path: str) -> None:
    async with call.http.get(call.url + path) as response:
        check_headers(response.headers)


async def test_the_answer_to_bytes_that_are_no_http_has_the_protecting_headers_too(
    call: Client,
) -> None:
    address = yarl.URL(call.url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"GET / HTTP/9.9\r\n\r\n")
    _, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    check_headers(dict(line.split(": ", 1) for line in lines))
    writer.close()


def check_headers(headers: Mapping[str, str]) -> None:
    policy = headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "frame-ancestors 'none'", "form-action 'none'"} <= set(policy)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Server" not in headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:7700", 200),
        ("[::1]:7700", 200),
        ("localhost:7700", 200),
        ("run.example.org:7700", 200),
        ("RUN.example.org.", 200),
        ("evil.example.org", 421),
        ("127.0.0.1.evil.org:7700", 421),
        ("", 421),
    ],
)
async def test_a_browser_must_use_a_host_name_of_this_run(
    call: Client, host: str, status: int
) -> None:
    assert (await call("GET", "/", headers={"Host": host}))[0] == status
    told = {"Host": host, "Sec-Fetch-Site": "same-origin"}
    assert ((await call("GET", "/v1/status", headers=told))[0] == 421) == (status == 421)


async def test_a_program_may_use_any_host_name(call: Client) -> None:
    assert (await call("GET", "/v1/status", headers={"Host": "evil.example.org"}))[0] == 200


async def test_the_page_may_run_its_own_scripts_alone(call: Client) -> None:
    async with call.http.get(call.url) as response:
        policy = response.headers["Content-Security-Policy"].split("; ")
        html = await response.text()
    assert {"script-src 'self'", "style-src 'self'", "trusted-types 'none'"} <= set(policy)
    assert not any("unsafe" in each for each in policy)
    assert "style=" not in html
    assert "<script>" not in html


async def test_every_file_of_the_page_is_served_with_its_type(call: Client) -> None:
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    names = [name for name in PAGE if name != "index.html"]
    assert "main.js" in names
    for name in names:
        async with call.http.get(f"{call.url}/page/{name}") as response:
            assert await response.read() == PAGE[name]
            assert response.content_type == kinds[name.rpartition(".")[2]]
            check_headers(response.headers)
    for path in ("/page/", "/page/other.js", "/page/../index.html", "/page/%2e%2e/routes.py"):
        assert (await call("GET", path))[0] == 404


async def test_the_page_gets_live_data_and_history(call: Client) -> None:
    assert await call("GET", "/v1/live?seen=4&plan=7.1&stripe=2", secret="V") == (
        200,
        ["viewer", 4, "7.1", 2],
    )
    assert await call("GET", "/v1/history?since=9", secret="V") == (200, {"since": 9})
    for path in ("/v1/live?seen=x", "/v1/live?stripe=-1", "/v1/history?since=1e3"):
        assert (await call("GET", path))[0] == 400
    for path in ("/v1/live", "/v1/history"):
        assert (await call("GET", path, secret="W"))[0] == 403

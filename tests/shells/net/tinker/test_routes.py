"""The Tinker API over real HTTP, with the real service behind it."""

import re
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

import msgpack
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from echo2d.client.http import OPERATION_PATH, RESULT_PATH
from echo2d.client.tinker import SAVED_STEPS_MAX
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import PublishSeq, RequestId
from echo2d.core.cluster.events import Persist, Reply
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.coordinator.events import CoordinatorEvent, RequestGone
from echo2d.core.protocol.answer_end import CONTEXT_SPARE
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.tinker.events import (
    ClientAsked,
    GiveOperation,
    KeptClients,
    OperationAsked,
    OperationEnded,
    OperationTaken,
    SampleEnded,
    SampleOrder,
    StepSaved,
    StopSample,
    TinkerEvent,
)
from echo2d.core.tinker.futures import FutureId
from echo2d.core.tinker.operations import ModelId
from echo2d.core.tinker.service import TinkerService
from echo2d.net.api import routes as api_routes
from echo2d.net.http.json_fields import Handler, secret_of
from echo2d.net.security.auth import Caller, Denied, Role
from echo2d.net.tinker import routes as module
from echo2d.net.tinker.models import ServedModels
from echo2d.net.tinker.routes import PREFIX, TESTED, mount
from echo2d.runtime.process.mailbox import PendingRequests
from echo2d.tinker import messages_pb2 as pb
from echo2d.tinker.prompts import PROMPT_ANSWER_BYTES_MAX
from echo2d.tinker.wire import read_prompt_call
from tests.support.paths import REPO
from tests.support.tinker_samplers import ObedientWorkers

ROLES: dict[str, Role] = {"ann": "tinker", "bob": "tinker", "box": "worker"}
BASE = "org/base"
IDLE: dict[str, Any] = {"epoch": 1, "saved": []}
Http = TestClient[web.Request, web.Application]


class Backend:
    """The service, as the coordinator's process runs it."""

    def __init__(self) -> None:
        versions, now = PublishedVersions((), PublishSeq(0)), time.monotonic()
        self.service = TinkerService(
            [BASE], Membership("r", 1.0), versions, KeptClients(), ObedientWorkers(), now=now
        )
        self.requests = PendingRequests(self.take, count(), 100)
        self.records: list[Any] = []
        self.draws: list[Any] = []
        self.saved: list[StepSaved] = []

    async def take(self, event: CoordinatorEvent) -> None:
        if isinstance(event, RequestGone):
            self.service.request_gone(event.request)
            return
        assert isinstance(event, ClientAsked | OperationAsked | OperationEnded | SampleEnded)
        if isinstance(event, OperationAsked):
            self.saved += event.saved
        for action in self.service.handle(event, now=time.monotonic()):
            if isinstance(action, Persist):
                self.records.append(action.record)
            elif isinstance(action, Reply):
                self.requests.answer(action)
            elif isinstance(action, GiveOperation):
                taken = [each for each in self.records if isinstance(each, OperationTaken)]
                of = [each.operation for each in taken if each.operation.number == action.number]
                order = pack({**action.order, "body": of[-1].body})
                self.requests.answer(Reply(action.request, 200, order))
            else:
                self.draws.append(action)

    def caller(self, secret: str) -> Caller:
        if secret not in ROLES:
            raise Denied(401, "credential", "unknown credential")
        return Caller(secret, ROLES[secret])

    async def ask(
        self, make: Callable[[RequestId], TinkerEvent], *, timeout_s: float
    ) -> Reply | None:
        return await self.requests.ask(make, timeout_s=timeout_s)

    ask_for_client = ask


def as_learner(_: frozenset[Role], handler: Handler) -> Handler:
    async def checked(request: web.Request) -> web.StreamResponse:
        assert secret_of(request) == "learner"
        return await handler(request)

    return checked


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
async def http(backend: Backend) -> AsyncIterator[Http]:
    app = web.Application(middlewares=[api_routes._faults_to_json])
    mount(app, backend, ServedModels([BASE], 2048, 512, (7,)), as_learner)
    async with TestClient(TestServer(app)) as client:
        yield client


async def call(
    http: Http, path: str, body: Any = None, *, key: str = "ann", method: str = "POST"
) -> tuple[int, Any]:
    headers = {"X-API-Key": f"tml-{key}"} if key else {}
    content = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with http.request(method, f"{PREFIX}/{path}", headers=headers, **content) as answer:
        raw = await answer.read()
        return answer.status, raw if "protobuf" in answer.content_type else await answer.json()


async def said(http: Http, path: str, body: Any = None, **more: Any) -> Any:
    status, found = await call(http, path, body, **more)
    assert status == 200, found
    return found


async def learn(http: Http, result: Any = None) -> dict[str, Any]:
    """Run the next operation that is a client's, as a learner that answers with `result`."""
    headers = {"Authorization": "Bearer learner"}
    while True:
        async with http.post(OPERATION_PATH, headers=headers, json=IDLE) as answer:
            order: dict[str, Any] = msgpack.unpackb(await answer.read())
        where = f"epoch=1&model={order['model']}&number={order['number']}"
        body = {"result": {}} if result is None or not order["model"] else result
        content: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with http.post(f"{RESULT_PATH}?{where}", headers=headers, **content) as told:
            assert told.status == 200
        if order["model"]:
            return order


async def model_of(http: Http, key: str = "ann") -> str:
    """A session with one model; returns the model."""
    session = (await said(http, "create_session", {"sdk_version": "0.38.0"}, key=key))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    future = await said(http, "create_model", {**body, "lora_config": {"rank": 4}}, key=key)
    order = await learn(http)
    arguments = order["arguments"]
    assert 0 <= arguments.pop("seed") < 1 << 63, "one that the ledger keeps"
    assert arguments == {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": True}
    made = await result_of(http, future, key=key)
    model: str = made["model_id"]
    assert model == f"{session}:train:0"
    return model


async def result_of(http: Http, future: dict[str, Any], key: str = "ann") -> Any:
    return await said(http, "retrieve_future", {"request_id": future["request_id"]}, key=key)


def chunk(model: str, number: int, **more: Any) -> bytes:
    message = pb.ForwardBackwardCall(model=model, number=number, loss="cross_entropy", **more)
    return bytes(message.SerializeToString())


async def test_a_client_trains_and_saves(http: Http) -> None:
    model = await model_of(http)
    info = await said(http, "get_info", {"model_id": model})
    assert (info["model_data"], info["lora_rank"]) == ({"model_name": BASE}, 4)
    data = await said(http, "forward_backward", chunk(model, 1))
    order = await learn(http, b"logprobs")
    assert (order["kind"], order["body"]) == ("forward_backward", chunk(model, 1))
    assert await result_of(http, data) == b"logprobs"
    body = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
    step = await said(http, "optim_step", body)
    order = await learn(http, {"result": {"metrics": {"grad_norm": 2.0}}})
    assert order["arguments"]["learning_rate"] == 1e-3
    assert order["arguments"]["beta2"] == 0.95
    assert (await result_of(http, step))["metrics"] == {"grad_norm": 2.0}
    saved = await said(http, "save_weights", {"model_id": model, "seq_id": 3, "path": "one"})
    await learn(http, {"result": {"bytes": 7, "steps": 0}})
    path = (await result_of(http, saved))["path"]
    assert path == f"tinker://{model}/weights/one"
    listed = await said(http, "checkpoints", method="GET")
    assert listed["checkpoints"][0]["size_bytes"] == 7
    assert listed["checkpoints"][0]["time"].endswith("+00:00")
    assert (await said(http, "weights_info", {"tinker_path": path}))["lora_rank"] == 4
    await said(http, f"training_runs/{model}/checkpoints/weights/one", method="DELETE")
    assert (await call(http, "weights_info", {"tinker_path": path}))[0] == 404


async def test_a_repeated_save_gets_the_sampler_of_the_first(http: Http) -> None:
    """The client repeats a save whose answer was lost with the same number, and another one of the sampler."""
    model = await model_of(http)
    session = model.partition(":")[0]
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    first = await said(http, "save_weights_for_sampler", body)
    again = await said(http, "save_weights_for_sampler", body | {"sampling_session_seq_id": 1})
    assert again == first
    await learn(http, {"result": {"bytes": 7, "steps": 0}})
    assert (await result_of(http, again))["sampling_session_id"] == f"{session}:sample:0"


async def test_a_result_that_is_not_there_yet_is_asked_for_again(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESULT_POLL_S", 0.01)
    model = await model_of(http)
    future = await said(http, "forward_backward", chunk(model, 1))
    status, told = await call(http, "retrieve_future", {"request_id": future["request_id"]})
    assert (status, told["type"]) == (408, "try_again")
    await learn(http, {"failed": {"detail": "no GPU", "category": "server"}})
    assert await result_of(http, future) == {"error": "no GPU", "category": "server"}


async def test_a_sample_that_is_not_there_yet_says_what_it_waits_for(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESULT_POLL_S", 0.01)
    future = await said(http, "asample", sampling(await sampler_of(http)))
    status, told = await call(http, "retrieve_future", {"request_id": future["request_id"]})
    assert (status, told["queue_state"]) == (408, "active")


@pytest.mark.parametrize(
    ("path", "more", "line"),
    [
        ("optim_step", {"adam_params": 7}, "adam_params: expected an object"),
        ("optim_step", {"adam_params": {"beta1": "x"}}, "beta1: expected a number"),
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate: expected a number"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "expected adamw; found 'dimuon'"),
        ("save_weights", {"path": 7}, "path: expected a text"),
        ("save_weights", {"path": "../up"}, "path: expected 1 to 128 letters"),
        ("save_weights", {"path": "a", "ttl_seconds": "x"}, "ttl_seconds: expected a number"),
        ("save_weights", {"path": "a", "user_metadata": [1]}, "user_metadata: expected an object"),
        ("save_weights", {"path": "a", "user_metadata": {"a": "[" * 300}}, "few levels"),
        ("save_weights", {"path": "a", "user_metadata": {"a": "x" * 5000}}, "at most 4096 bytes"),
        ("load_weights", {"path": "tinker://x/weights/y"}, "make another one from the checkpoint"),
    ],
)
async def test_a_wrong_call_fails_in_its_future(
    http: Http, path: str, more: dict[str, Any], line: str
) -> None:
    model = await model_of(http)
    future = await said(http, path, {"model_id": model, "seq_id": 1, **more})
    data = await said(http, "forward_backward", chunk(model, 2))
    # The learner gets the next call, and of this one at most that its gradient is dropped.
    while (order := await learn(http, b"logprobs"))["number"] != 2:
        assert order["kind"] == "discard"
    assert line in (await result_of(http, future))["error"]
    assert await result_of(http, data) == b"logprobs"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("forward_backward", b"\xff\xff\xff", 400),
        ("forward_backward", chunk("", 1), 404),
        ("forward_backward", chunk("s:train:0", 0), 400),
        ("optim_step", {"model_id": "s:train:0"}, 400),
        ("optim_step", {"model_id": "../x", "seq_id": 1}, 404),
        ("optim_step", {"model_id": 5, "seq_id": 1}, 400),
        ("optim_step", [1], 400),
        ("create_model", {"session_id": "a/b", "model_seq_id": 0, "base_model": BASE}, 404),
        ("create_model", {"session_id": "s", "model_seq_id": -1, "base_model": BASE}, 400),
        ("retrieve_future", {"request_id": "none"}, 410),
        ("asample", {}, 400),
        ("asample", {"sampling_session_id": "s:sample:0", "seq_id": 1}, 404),
        ("publish_everything", {}, 404),
    ],
)
async def test_what_cannot_have_a_future_is_refused(
    http: Http, path: str, body: Any, status: int
) -> None:
    found, told = await call(http, path, body)
    assert found == status
    assert told["detail"]


@pytest.mark.parametrize(
    ("key", "status"),
    [("", 401), ("stranger", 401), ("box", 403)],
    ids=["none", "unknown", "worker"],
)
async def test_every_route_needs_a_token_of_its_role(http: Http, key: str, status: int) -> None:
    app = http.app
    assert app is not None
    routes = [
        each for each in app.router.routes() if each.resource and PREFIX in each.resource.canonical
    ]
    assert len(routes) > 20
    for route in routes:
        assert route.resource is not None
        path = route.resource.canonical.removeprefix(f"{PREFIX}/").replace("{", "").replace("}", "")
        method = "GET" if route.method == "*" else route.method
        assert (await call(http, path, {}, key=key, method=method))[0] == status, path


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await model_of(http)
    monkeypatch.setattr(module, "CALLER_BYTES_MAX", 100)
    status, _ = await call(http, "forward_backward", chunk(model, 1) + bytes(100))
    assert status == 429
    monkeypatch.setattr(module, "FORWARD_BACKWARD_BYTES_MAX", 50)
    status, _ = await call(http, "forward_backward", bytes(51))
    assert status == 413


def test_the_release_that_the_tests_install_is_the_newest_tested_one() -> None:
    requirements = (REPO / "tools/tinker/requirements.txt").read_text()
    (pinned,) = re.findall(r"^tinker==(\d+)\.(\d+)\.\d+$", requirements, re.MULTILINE)
    oldest, newest = TESTED
    assert oldest <= newest == tuple(map(int, pinned))


async def test_a_client_of_another_release_is_warned(http: Http) -> None:
    for version, warned in (("0.38.2", False), ("0.39.0", True), ("1.0", True), (None, True)):
        told = await said(http, "create_session", {"sdk_version": version})
        assert ("warning_message" in told) == warned, version


async def sampler_of(http: Http) -> str:
    session = (await said(http, "create_session", {"sdk_version": "0.38.0"}))["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    name: str = (await said(http, "create_sampling_session", body))["sampling_session_id"]
    return name


def sampling(name: str, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"sampling_session_id": name, "seq_id": 1, "num_samples": 2, "prompt": prompt}
    return body | {"sampling_params": {"max_tokens": 5}} | more


async def test_a_learner_says_which_steps_it_has_saved(http: Http, backend: Backend) -> None:
    saved = [("0a-b:train:0", 7), ("0a-b:train:1", 0)]
    headers = {"Authorization": "Bearer learner"}
    body = {"epoch": 1, "saved": saved}
    async with http.post(OPERATION_PATH, headers=headers, json=body) as answer:
        assert msgpack.unpackb(await answer.read())["kind"] == "keep"
    assert backend.saved == [StepSaved(ModelId(model), number) for model, number in saved]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"saved": []}, "epoch: missing"),
        ({"epoch": 1}, "saved: missing"),
        ({"epoch": "1", "saved": []}, "epoch: expected a non-negative integer"),
        ({"epoch": 1, "saved": {}}, f"saved: expected at most {SAVED_STEPS_MAX} pairs"),
        (
            {"epoch": 1, "saved": [["a:train:0", 1]] * (SAVED_STEPS_MAX + 1)},
            f"saved: expected at most {SAVED_STEPS_MAX} pairs",
        ),
        ({"epoch": 1, "saved": [["a:train:0"]]}, "saved: expected [model, number]"),
        ({"epoch": 1, "saved": ["ab"]}, "saved: expected [model, number]"),
        ({"epoch": 1, "saved": [["../x", 1]]}, "saved: expected [model, number]"),
        ({"epoch": 1, "saved": [[1, 1]]}, "saved: expected [model, number]"),
        ({"epoch": 1, "saved": [["a:train:0", -1]]}, "saved: expected a non-negative integer"),
        ({"epoch": 1, "saved": [["a:train:0", True]]}, "saved: expected a non-negative integer"),
        ({"epoch": 1, "saved": [["a:train:0", 1.0]]}, "saved: expected a non-negative integer"),
    ],
)
async def test_a_learner_that_asks_wrongly_is_refused(
    http: Http, backend: Backend, body: dict[str, Any], line: str
) -> None:
    headers = {"Authorization": "Bearer learner"}
    async with http.post(OPERATION_PATH, headers=headers, json=body) as answer:
        assert (answer.status, (await answer.json())["detail"]) == (400, line)
    assert backend.saved == []


async def test_a_client_samples(http: Http, backend: Backend) -> None:
    name = await sampler_of(http)
    assert (await said(http, f"samplers/{name}", method="GET"))["base_model"] == BASE
    params = {"max_tokens": 5, "stop": ["\n"], "temperature": 0.5, "top_k": -1, "seed": 3}
    future = await said(http, "asample", sampling(name, sampling_params=params))
    assert len(future["sample_sequence_ids"]) == 2
    await publish(http)
    (draw,) = backend.draws
    assert draw.order == SampleOrder(pack_tokens([1, 2, 3]), 2, 5, Sampling(0.5), (7,), ("\n",), 3)
    await backend.take(SampleEnded(draw.future, b"tokens"))
    assert await result_of(http, future) == b"tokens"
    again = await said(http, "asample", sampling(name, sampling_params=params))
    assert again == future
    other = await said(http, "asample", sampling(name, seq_id=2, sampling_params={"stop": []}))
    # Without max_tokens: what the context leaves.
    draw = backend.draws[-1]
    assert (draw.order.tokens_max, draw.order.stop_token_ids) == (2048 - CONTEXT_SPARE - 3, ())
    await said(http, "cancel_future", {"request_id": other["request_id"]})
    assert backend.draws[-1] == StopSample(FutureId(other["request_id"]))
    assert (await result_of(http, other))["error"] == "it was cancelled"


async def publish(http: Http) -> None:
    """As a learner, publish what it is told to."""
    await own_orders(http, "publish")


async def own_orders(http: Http, last: str, result: bytes | None = None) -> list[dict[str, Any]]:
    """As a learner, do what the coordinator itself wants, up to the first order of the kind `last`. result: of that."""
    headers = {"Authorization": "Bearer learner"}
    orders: list[dict[str, Any]] = []
    while not orders or orders[-1]["kind"] != last:
        async with http.post(OPERATION_PATH, headers=headers, json=IDLE) as answer:
            orders.append(msgpack.unpackb(await answer.read()))
        path = f"{RESULT_PATH}?epoch=1&model=&number={orders[-1]['number']}"
        content: dict[str, Any] = {"json": {"result": {}}}
        if orders[-1]["kind"] == last and result is not None:
            content = {"data": result}
        async with http.post(path, headers=headers, **content) as told:
            assert told.status == 200
    return orders


def targets(**changed: Any) -> dict[str, Any]:
    """One target in place of each token of a prompt of three but the first."""
    body = {"data": [4, 5], "dtype": "int64", "shape": [2, 1], **changed}
    return {"target_prompt_logprobs": body}


async def test_what_is_asked_of_a_prompt_reaches_the_learner(http: Http) -> None:
    name = await sampler_of(http)
    more = {
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
        "topk_prompt_logprobs": 5,
        "prompt_alt_tokens_k": 2,
        "sampling_params": {"temperature": 0.5, "seed": -3},
        **targets(sparse_crow_indices=[0, 0, 2], sparse_col_indices=[0, 2], shape=[2, 3]),
    }
    await said(http, "asample", sampling(name, **more))
    orders = await own_orders(http, "score")
    call = read_prompt_call(orders[-1]["body"])
    assert (call.logprobs, call.last, call.top_tokens, call.alternatives) == (True, 1, 5, 2)
    assert (call.temperature, call.rng_seed, call.tokens_t.tolist()) == (0.5, -3, [1, 2, 3])
    assert call.targets is not None
    assert call.targets.shape == (2, 3)
    assert (call.targets.rows_c.tolist(), call.targets.tokens_c.tolist()) == ([1, 1], [4, 5])


async def test_the_most_likely_tokens_of_a_sample_are_asked_of_the_learner_once_it_is_drawn(
    http: Http, backend: Backend
) -> None:
    name = await sampler_of(http)
    more = {"topk_sample_logprobs": 511, "sampling_params": {"max_tokens": 767, "temperature": 0.5}}
    future = await said(http, "asample", sampling(name, num_samples=8, **more))
    await publish(http)
    (draw,) = backend.draws
    assert (draw.order.top_tokens, draw.order.scored) == (511, b"")
    assert draw.order.scores_bytes == 8 * 8 * (3 + 767 * 512) < PROMPT_ANSWER_BYTES_MAX
    await backend.take(SampleEnded(draw.future, b"tokens"))
    (order,) = await own_orders(http, "score_sample", b"tokens and more")
    assert (order["body"], order["arguments"]["prompt"]) == (b"tokens", draw.order.prompt)
    assert (order["arguments"]["top_tokens"], order["arguments"]["temperature"]) == (511, 0.5)
    assert await result_of(http, future) == b"tokens and more"


async def test_a_client_that_wants_the_most_likely_tokens_of_its_sample_wants_the_sample(
    http: Http,
) -> None:
    whole = {"prompt": {"chunks": [{"tokens": [1] * 2048}]}, "topk_prompt_logprobs": 3}
    more = {"topk_sample_logprobs": 1, "sampling_params": {"max_tokens": 1}}
    future = await said(http, "asample", sampling(await sampler_of(http), **whole, **more))
    assert "after a prompt of 2048 tokens" in (await result_of(http, future))["error"]


async def test_a_prompt_is_scored_also_if_nothing_fits_behind_it(http: Http) -> None:
    name = await sampler_of(http)
    whole = {"prompt": {"chunks": [{"tokens": [1] * 2048}]}, "topk_prompt_logprobs": 3}
    await said(http, "asample", sampling(name, sampling_params={"max_tokens": 1}, **whole))
    orders = await own_orders(http, "score")
    call = read_prompt_call(orders[-1]["body"])
    assert (call.logprobs, call.last, call.targets, len(call.tokens_t)) == (False, 2047, None, 2048)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"num_samples": 0}, "num_samples: expected 1 to 128; found 0"),
        ({"num_samples": 1 << 40}, "num_samples: expected 1 to 128"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "expected encoded_text alone"),
        ({"prompt": {"chunks": []}}, "prompt: expected token ids from 0 to 511"),
        ({"prompt": {"chunks": [{"tokens": [512]}]}}, "prompt: expected token ids from 0 to 511"),
        ({"prompt": {"chunks": [{"tokens": [1] * 2048}]}}, "after a prompt of 2048 tokens"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens: expected 1 to"),
        ({"sampling_params": {"temperature": 1e-9}}, "temperature must be 0 or at least"),
        ({"sampling_params": {"stop": [1.5]}}, "stop: expected texts of 1 to 128 characters"),
        ({"sampling_params": {"stop": {}}}, "stop: expected at most 64 texts or token ids"),
        ({"sampling_params": {"stop": [10**30]}}, "stop: expected texts of 1 to 128 characters"),
        ({"topk_sample_logprobs": 513}, "topk_sample_logprobs: expected 0 to 512; found 513"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs: expected 0 to 512; found -1"),
        ({"topk_sample_logprobs": "3"}, "topk_sample_logprobs: expected an integer"),
        (
            {
                "num_samples": 8,
                "topk_sample_logprobs": 511,
                "sampling_params": {"max_tokens": 767},
                "prompt_alt_tokens_k": 1024,
            },
            "topk_sample_logprobs: expected at most 25165824 bytes of tokens and logprobs; found 25170112",
        ),
        ({"topk_prompt_logprobs": 513}, "topk_prompt_logprobs: expected 0 to 512; found 513"),
        ({"prompt_alt_tokens_k": 1025}, "prompt_alt_tokens_k: expected 0 to 1024; found 1025"),
        (
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
            "prompt_logprobs_last_n: expected 1 to 2; found 3",
        ),
        (
            {
                "prompt": {"chunks": [{"tokens": [1] * 2000}]},
                "prompt_alt_tokens_k": 1024,
                "topk_prompt_logprobs": 512,
            },
            "prompt: expected at most 25165824 bytes of logprobs; found 32768000",
        ),
        ({"target_prompt_logprobs": 3}, "target_prompt_logprobs: expected an object"),
        (targets(shape=[2]), "target_prompt_logprobs.shape: expected two numbers from 0 on"),
        (targets(shape=[2, -1]), "target_prompt_logprobs.shape: expected two numbers from 0 on"),
        (targets(data=[1, 2.5]), "target_prompt_logprobs.data: expected a list of integers"),
        (targets(data=[1, [2]]), "target_prompt_logprobs.data: expected a list of integers"),
        (targets(data=[1, 10**30]), "target_prompt_logprobs.data: expected a list of integers"),
        (targets(data=[1, "a"]), "target_prompt_logprobs.data: expected a list of integers"),
        (targets(data=7), "target_prompt_logprobs.data: expected a list of integers"),
        (targets(data=[1, 512]), "target_prompt_logprobs: expected tokens from 0 to 511, or -1"),
        (targets(data=[-1, -1]), "target_prompt_logprobs: expected at least one token"),
        (targets(data=[1]), "expected the cells of a matrix [2, 1]; found 1 others"),
        (targets(shape=[1, 2]), "expected 2 rows, one less than the prompt has tokens; found 1"),
        (
            targets(sparse_crow_indices=[0, 2, 1], sparse_col_indices=[0, 0]),
            "expected the cells of a matrix [2, 1]; found 2 others",
        ),
        (
            targets(sparse_crow_indices=[0, 1, 2], sparse_col_indices=[0, 1]),
            "expected the cells of a matrix [2, 1]; found 2 others",
        ),
        (
            targets(sparse_crow_indices=[0, 1, 2]),
            "target_prompt_logprobs.sparse_col_indices: expected a list of integers",
        ),
    ],
)
async def test_a_wrong_sample_fails_in_its_future(
    http: Http, more: dict[str, Any], line: str
) -> None:
    future = await said(http, "asample", sampling(await sampler_of(http), **more))
    assert line in (await result_of(http, future))["error"]

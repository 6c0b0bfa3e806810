"""The client, with a real server that answers from a script."""

import asyncio
import concurrent.futures
import dataclasses
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from aiohttp import web

from echo2d.client import (
    AsyncCoordinator,
    Attachment,
    Batch,
    Coordinator,
    Fenced,
    IntegrityFault,
    OperatorFault,
    PeerFault,
    Published,
    Session,
    Span,
    StepFigures,
    TinkerOperation,
    Trajectory,
    TrajectoryScore,
    Unanswered,
    async_coordinator,
    connection,
    read_batch,
)
from echo2d.client import coordinator as synchronous
from echo2d.client.http import (
    BODY_BYTES_MAX,
    DIGEST_HEADER,
    SCORE_MAX,
    SCORES_MAX,
    STALENESS_HEADER,
)
from echo2d.core.base.canonical import digest_of
from echo2d.core.base.codec import INT_MAX
from echo2d.core.base.ids import Digest, GroupId, PeerId, Version
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    BatchBody,
    GivenTokens,
    GroupRecord,
    Source,
    TrajectoryRecord,
    batch_digest,
    pack_batch,
    pack_logprobs,
    pack_tokens,
)
from echo2d.net.security.auth import TokenFile, write_token_file
from echo2d.this_build import THIS_BUILD
from tests.support.column_engine import columns_of, experts_of

SPAN = AuthoredSpan(0, 2, Version(3), Digest(b"d" * 32), PeerId("w"))
TRAJECTORY = TrajectoryRecord(
    0, pack_tokens([5, 1]), pack_logprobs([-0.5, 0.0]), (SPAN,), "stop", 1.0
)
BODY = pack_batch(BatchBody.of(4, (GroupRecord(GroupId(9), pack_tokens([7, 8]), (TRAJECTORY,)),)))
SESSION = {
    "epoch": 2, "run_id": "run", "staleness_max": 2, "publish_every": 1, "trajectories_per_step": 16,
    "group_size": 4, "group_min": 2, "checkpoint": 1, "over_stale": "mask",
}  # fmt: skip


def reply(body: Any, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


class Server:
    """Answers requests with the scripted responses, in order; None hangs up. When they have run out: silence."""

    def __init__(self) -> None:
        self.script: list[web.Response | None] = []
        self.heard: list[tuple[str, str, bytes]] = []
        self.alive: list[Any] = []
        self.told_alive = asyncio.Event()
        self.port = 0
        self.hanging = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer s3cret"
        if request.path == "/v1/learner/alive":
            self.alive.append(await request.json())
            self.told_alive.set()
            return reply({})
        self.heard.append((request.method, request.path_qs, await request.read()))
        if not self.script:
            self.hanging.set()
            await asyncio.Event().wait()
        answer = self.script.pop(0)
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return answer

    def said(self) -> list[tuple[str, str, Any]]:
        return [
            (method, path, json.loads(body) if body else None) for method, path, body in self.heard
        ]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made, app = Server(), web.Application(client_max_size=8 << 20)
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "learner.token"
    write_token_file(path, TokenFile("learner", "learner", "s3cret", "00" * 32))
    return path


@pytest.fixture
async def coordinator(server: Server, token_file: Path) -> AsyncIterator[AsyncCoordinator]:
    url = f"http://127.0.0.1:{server.port}"
    async with AsyncCoordinator(url, token_file=token_file, timeout_s=2.0) as made:
        yield made


def batch_reply(body: bytes = BODY, digest: str | None = None) -> web.Response:
    return web.Response(body=body, headers={DIGEST_HEADER: digest or batch_digest(body).hex()})


async def test_a_client_reports_that_its_learner_is_alive_until_it_is_closed(
    server: Server, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_coordinator, "ALIVE_EVERY_S", 0.01)
    server.script = [reply(SESSION)]
    url = f"http://127.0.0.1:{server.port}"
    async with AsyncCoordinator(url, token_file=token_file) as coordinator:
        await coordinator.open_session(0, steps=80)
        for _ in range(2):
            server.told_alive.clear()
            await server.told_alive.wait()
    assert coordinator._telling is not None
    assert coordinator._telling.done()
    assert server.alive[0] == {"epoch": 2, "software": THIS_BUILD.name}
    assert server.said()[0][2] == {"resume_step": 0, "steps": 80}


async def test_a_batch_names_the_staleness_bound_of_its_making(
    server: Server, coordinator: AsyncCoordinator
) -> None:
    told = batch_reply()
    told.headers[STALENESS_HEADER] = "4"
    server.script = [told, batch_reply()]
    assert (await coordinator.take_batch(4)).staleness_max == 4
    assert (await coordinator.take_batch(4)).staleness_max is None


async def test_every_call_carries_the_session_and_its_epoch(
    server: Server, coordinator: AsyncCoordinator
) -> None:
    server.script = [reply(SESSION), reply({"version": 3, "digest": "ab"}), batch_reply()]
    server.script += [reply({"publish_every": 2}), reply({}), reply({}), reply({"workers": []})]
    assert await coordinator.open_session(1) == Session(2, "run", 2, 1, 16, 4, 2, 1, "mask")
    assert await coordinator.publish(3, Path("/out/3")) == Published(3, "ab")
    batch = await coordinator.take_batch(4)
    assert await coordinator.commit(batch, t_train_s=0.5) == 2
    await coordinator.refuse(batch, {9: "stale"})
    await coordinator.checkpoint(4)
    assert await coordinator.status() == {"workers": []}
    assert server.said() == [
        ("POST", "/v1/learner/session", {"resume_step": 1}),
        ("POST", "/v1/versions", {"version": 3, "epoch": 2, "path": "/out/3"}),
        ("GET", "/v1/batches/4?epoch=2", None),
        (
            "POST",
            "/v1/batches/4/commit",
            {"batch_digest": batch.digest, "epoch": 2, "t_train_s": 0.5},
        ),
        ("POST", "/v1/batches/4/refuse", {"groups": [9], "reasons": ["stale"], "epoch": 2}),
        ("POST", "/v1/learner/checkpoint", {"step": 4, "epoch": 2}),
        ("GET", "/v1/status", None),
    ]


async def test_the_rules_of_the_run_are_asked_without_a_session(
    server: Server, coordinator: AsyncCoordinator
) -> None:
    server.script = [reply({**SESSION, "answer_tokens": 512})]
    rules = await coordinator.rules()
    assert (rules.answer_tokens, rules.staleness_max) == (512, SESSION["staleness_max"])
    assert server.said() == [("GET", "/v1/learner/session", None)]


async def test_a_commit_may_carry_scores(server: Server, coordinator: AsyncCoordinator) -> None:
    server.script = [reply({"publish_every": 1}), reply({"publish_every": 1})]
    batch = Batch(4, 2, "00", ())
    scores = [
        TrajectoryScore(9, 0, 1.23456789e-7, -0.5),
        TrajectoryScore(9, 1, 3.0, math.inf),
        TrajectoryScore(10, 0, 0.0, math.nan),
    ]
    assert await coordinator.commit(batch, t_train_s=0.5, scores=scores) == 1
    longest = TrajectoryScore(INT_MAX, 1023, 1.23456789e-7, -1.23456789e-5)
    many = [longest] * (SCORES_MAX + 1)
    assert await coordinator.commit(batch, t_train_s=0.5, scores=many) == 1
    (_, _, first), (_, _, second) = server.said()
    assert first["scores"][:2] == [[9, 0, 1.23457e-07, -0.5], [9, 1, 3.0, SCORE_MAX]]
    assert math.isnan(first["scores"][2][3]), "the coordinator refuses it"
    assert len(second["scores"]) == SCORES_MAX
    assert len(server.heard[1][2]) <= BODY_BYTES_MAX


async def test_a_commit_may_carry_figures(server: Server, coordinator: AsyncCoordinator) -> None:
    server.script = [reply({"publish_every": 1})]
    figures = StepFigures(entropy=1.5, kl_rollout=math.nan, grad_norm=math.inf)
    assert await coordinator.commit(Batch(4, 2, "00", ()), t_train_s=0.5, figures=figures) == 1
    ((_, _, body),) = server.said()
    assert body["figures"] == {"entropy": 1.5, "grad_norm": SCORE_MAX}


def check_batch(batch: Batch) -> None:
    assert (batch.step, batch.digest) == (4, batch_digest(BODY).hex())
    (group,) = batch.groups
    (trajectory,) = group.trajectories
    assert (group.group_id, group.prompt.tolist()) == (9, [7, 8])
    assert trajectory.tokens.dtype == np.dtype("int32")
    assert trajectory.logprobs.dtype == np.dtype("float32")
    assert (trajectory.tokens.tolist(), trajectory.logprobs.tolist()) == ([5, 1], [-0.5, 0.0])
    assert trajectory.spans == (Span(0, 2, 3, (b"d" * 32).hex(), "w"),)
    assert (trajectory.reward, trajectory.worker) == (1.0, "w")


async def test_a_batch_is_polled_for_and_unpacked(
    server: Server, coordinator: AsyncCoordinator
) -> None:
    server.script = [web.Response(status=204), web.Response(status=204), batch_reply()]
    check_batch(await coordinator.take_batch(4))


def test_a_trajectory_says_which_tokens_were_written_and_a_group_which_episodes_it_has() -> None:
    conversation = TrajectoryRecord(
        0,
        pack_tokens([5, 6, 7, 1]),
        pack_logprobs([-0.5, 0.0, 0.0, -0.25]),
        (SPAN._replace(end=1), SPAN._replace(start=3, end=4)),
        "stop",
        1.0,
        given=(GivenTokens(1, 3),),
        turns=2,
    )
    short = dataclasses.replace(TRAJECTORY, sample=1)
    for branches, episodes in (((), [0, 1, 2]), ((1,), [0, 1, 2, 2])):
        last = dataclasses.replace(conversation, sample=2, branches=branches)
        members = (conversation, short, last)
        record = GroupRecord(GroupId(9), pack_tokens([7, 8]), members)
        body = pack_batch(BatchBody.of(4, (record,)))
        (group,) = read_batch(1, batch_digest(body).hex(), body).groups
        assert group.episodes == episodes
        assert len({each.sample for each in group.trajectories}) == len(episodes)
        turns = [each.turns for each in group.trajectories]
        assert turns == ([2, 1, 1, 1] if branches else [2, 1, 2])
        masks = [each.written.tolist() for each in group.trajectories]
        last_masks = [[True], [False, False, True]] if branches else [[True, False, False, True]]
        assert masks == [[True, False, False, True], [True, True], *last_masks]
        for each in group.trajectories:
            assert [each.written[span.start : span.end].all() for span in each.spans]
            assert sum(span.end - span.start for span in each.spans) == each.written.sum()


def read_one(record: TrajectoryRecord) -> tuple[Trajectory, ...]:
    body = pack_batch(BatchBody.of(4, (GroupRecord(GroupId(9), pack_tokens([7]), (record,)),)))
    (group,) = read_batch(1, batch_digest(body).hex(), body).groups
    return group.trajectories


def test_a_trajectory_has_the_columns_of_its_branch() -> None:
    branches = dataclasses.replace(
        TRAJECTORY,
        tokens=pack_tokens([5, 6, 7, 8]),
        logprobs=pack_logprobs([-0.5, 0.0, 0.0, -0.25]),
        spans=(SPAN, SPAN._replace(start=3, end=4)),
        given=(GivenTokens(2, 3),),
        branches=(2,),
        columns=columns_of([5, 6, 7, 8]),
    )
    first, second = read_one(branches)
    assert np.array_equal(first.columns["experts"], experts_of([5, 6]))
    assert second.columns["half"].tolist() == [3.5, 4.0]
    assert read_one(TRAJECTORY)[0].columns == {}


def test_columns_that_do_not_fit_their_tokens_are_refused() -> None:
    with pytest.raises(PeerFault, match="column experts: expected 24 bytes for 2 tokens, found 12"):
        read_one(dataclasses.replace(TRAJECTORY, columns=columns_of([5])))


async def test_an_attachment_is_fetched_by_its_digest(
    server: Server, coordinator: AsyncCoordinator
) -> None:
    wanted = Attachment("picture", digest_of(b"content"), 7)
    record = dataclasses.replace(TRAJECTORY, source=Source("t", "r", (wanted,)))
    (found,) = read_one(record)[0].attachments
    assert found == wanted
    server.script = [web.Response(body=b"content"), web.Response(body=b"other")]
    assert await coordinator.attachment(found) == b"content"
    assert server.heard[0][:2] == ("GET", f"/v1/attachments/{wanted.digest.hex()}")
    with pytest.raises(IntegrityFault, match="'picture': its bytes have another digest"):
        await coordinator.attachment(found)


async def test_a_batch_whose_bytes_differ_from_its_digest_is_refused(
    server: Server, coordinator: AsyncCoordinator
) -> None:
    for digest in ("00" * 32, "zz"):
        server.script = [batch_reply(digest=digest)]
        with pytest.raises(IntegrityFault):
            await coordinator.take_batch(4)


async def test_a_client_waits_while_the_coordinator_is_away(
    server: Server, coordinator: AsyncCoordinator
) -> None:
    server.script = [
        None,
        reply({"error": "busy", "detail": ""}, 503),
        None,
        reply({"publish_every": 1}),
    ]
    batch = Batch(1, 1, "00", ())
    assert await coordinator.commit(batch, t_train_s=0.1) == 1
    assert len(server.heard) == 4


async def test_a_client_waits_for_room_on_the_coordinators_disk(
    server: Server, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For longer than an answer is."""
    url = f"http://127.0.0.1:{server.port}"
    full = {"error": "full", "detail": "on the coordinator's host: writing x failed: No space left"}
    server.script = [reply(full, 507), reply(full, 507), reply({"publish_every": 1})]
    async with AsyncCoordinator(url, token_file=token_file, timeout_s=0.0) as coordinator:
        assert await coordinator.commit(Batch(1, 1, "00", ()), t_train_s=0.1) == 1
    assert len(server.heard) == 3
    assert "waiting for room: on the coordinator's host" in caplog.text


async def test_a_call_without_an_answer_is_repeated(
    server: Server, coordinator: AsyncCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that vanished closes no connection. A version takes its time, and is waited for."""
    monkeypatch.setattr(connection, "ANSWER_SILENCE_S_MAX", 0.1)
    taking = asyncio.create_task(coordinator.take_batch(4))
    await server.hanging.wait()
    server.script = [batch_reply()]
    assert (await taking).step == 4
    assert len(server.heard) > 1
    server.hanging.clear()
    publishing = asyncio.create_task(coordinator.publish(4, Path("/model")))
    await server.hanging.wait()
    done, _ = await asyncio.wait([publishing], timeout=0.3)
    assert not done
    publishing.cancel()


@pytest.mark.parametrize(
    ("status", "body", "fault", "words"),
    [
        (409, {"error": "fenced", "detail": "epoch 3 is newer"}, Fenced, "epoch 3 is newer"),
        (409, {"error": "too_far", "detail": "step 9"}, PeerFault, "too_far: step 9"),
        (
            400,
            {"error": "refused", "detail": "no tokenizer.json"},
            PeerFault,
            "refused: no tokenizer.json",
        ),
        (401, {"error": "credential", "detail": "unknown"}, OperatorFault, "unknown"),
        (403, {"error": "revoked", "detail": "token x was revoked"}, OperatorFault, "was revoked"),
        (500, [], PeerFault, "http 500"),
        (200, [], PeerFault, "not a JSON object"),
    ],
)
async def test_refusals_are_faults_and_are_not_repeated(
    server: Server,
    coordinator: AsyncCoordinator,
    status: int,
    body: Any,
    fault: type[Exception],
    words: str,
) -> None:
    server.script = [reply(body, status)]
    with pytest.raises(fault, match=words):
        await coordinator.checkpoint(1)
    assert len(server.heard) == 1


async def test_an_unreachable_coordinator_is_reported(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncCoordinator(
        "http://127.0.0.1:1", token_file=token_file, timeout_s=1.0
    ) as coordinator:
        with pytest.raises(
            OperatorFault, match=r"cannot reach the coordinator at http://127\.0\.0\.1:1"
        ):
            await coordinator.status()
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(said) == 1
    assert said[0].startswith(
        "no coordinator answers at http://127.0.0.1:1 yet: start `echo2d run`"
    )


async def test_a_coordinator_lost_during_a_run_is_no_operators_mistake(
    server: Server, token_file: Path
) -> None:
    url = f"http://127.0.0.1:{server.port}"
    async with AsyncCoordinator(url, token_file=token_file, timeout_s=0.1) as coordinator:
        server.script = [reply({"workers": []}), *[None] * 20]
        await coordinator.status()
        with pytest.raises(PeerFault, match="cannot reach"):
            await coordinator.status()


async def test_a_wrong_url_is_reported(token_file: Path) -> None:
    with pytest.raises(OperatorFault, match="'nonsense' is not the URL of a coordinator"):
        AsyncCoordinator("nonsense", token_file=token_file)


async def test_a_learner_on_another_host_uploads_its_version(
    server: Server, coordinator: AsyncCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_coordinator, "is_loopback", lambda host: False)
    snapshot = tmp_path / "3"
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "config.json").write_bytes(b"{}")
    (snapshot / "sub" / "model.safetensors").write_bytes(bytes(3 << 20))
    server.script = [reply({}), None, reply({}), reply({"version": 3, "digest": "ab"})]
    await coordinator.publish(3, snapshot)
    heard = [(method, path, len(body)) for method, path, body in server.heard]
    upload = ("PUT", "/v1/versions/3/files/sub/model.safetensors?epoch=0")
    assert heard[0] == ("PUT", "/v1/versions/3/files/config.json?epoch=0", 2)
    assert heard[1:3] == [(*upload, 3 << 20), (*upload, 3 << 20)]
    assert json.loads(server.heard[3][2]) == {"version": 3, "epoch": 0, "upload": True}


async def test_an_upload_whose_answer_was_lost_is_sent_again(
    server: Server, coordinator: AsyncCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_coordinator, "is_loopback", lambda host: False)
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "config.json").write_bytes(b"{}")
    gone = {"error": "refused", "detail": "it has no config.json"}
    server.script = [
        reply({}),
        None,
        reply(gone, 400),
        reply({}),
        reply({"version": 3, "digest": "ab"}),
    ]
    assert await coordinator.publish(3, tmp_path / "3") == Published(3, "ab")
    assert [method for method, _, _ in server.heard] == ["PUT", "POST", "POST", "PUT", "POST"]
    server.script = [reply({}), reply(gone, 400)]
    with pytest.raises(PeerFault, match=r"it has no config\.json"):
        await coordinator.publish(3, tmp_path / "3")


def test_a_call_after_closing_is_cancelled(token_file: Path) -> None:
    client = Coordinator("http://127.0.0.1:1", token_file=token_file)
    client.close()
    client.close()
    with pytest.raises(concurrent.futures.CancelledError):
        client.status()


async def test_a_learner_takes_a_call_and_reports_the_steps_it_has_saved(
    server: Server, coordinator: AsyncCoordinator
) -> None:
    order = TinkerOperation("s:train:0", 3, "save", {}, b"")
    answer = web.Response(body=msgpack.packb(dataclasses.asdict(order)))
    server.script = [reply(SESSION), None, answer]
    server.script.append(web.Response(status=204))
    await coordinator.open_session(0)
    saved = (("s:train:0", 2), ("t:train:1", 7))
    assert await coordinator.take_operation(saved) == order
    assert await coordinator.take_operation() is None
    pairs = [["s:train:0", 2], ["t:train:1", 7]]
    path = "/v1/tinker/operation"
    assert server.said()[1:] == [
        ("POST", path, {"epoch": 2, "saved": found}) for found in (pairs, pairs, [])
    ]


async def test_the_synchronous_client_makes_the_same_calls(
    server: Server, token_file: Path
) -> None:
    server.script = [
        reply(SESSION),
        reply({"version": 0, "digest": "ab"}),
        batch_reply(),
        reply({"publish_every": 2}),
    ]
    server.script += [reply({}), reply({}), reply({"workers": []})]

    def learn() -> None:
        with Coordinator(f"http://127.0.0.1:{server.port}", token_file=token_file) as coordinator:
            assert coordinator.open_session(0).epoch == 2
            assert coordinator.publish(0, Path("/out/0")) == Published(0, "ab")
            batch = coordinator.take_batch(4)
            check_batch(batch)
            assert coordinator.commit(batch, t_train_s=1.0) == 2
            coordinator.refuse(batch, {9: "stale"})
            coordinator.checkpoint(4)
            assert coordinator.status() == {"workers": []}
        coordinator.close()

    await asyncio.to_thread(learn)
    assert len(server.heard) == 7


async def test_closing_ends_a_call_that_waits_in_another_thread(
    server: Server, token_file: Path
) -> None:
    url = f"http://127.0.0.1:{server.port}"
    coordinator = await asyncio.to_thread(lambda: Coordinator(url, token_file=token_file))
    async with asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(asyncio.to_thread(took_nothing, coordinator))
        await server.hanging.wait()
        await asyncio.to_thread(coordinator.close)
    assert taking.result()


async def test_a_hurried_call_is_given_up_after_its_time(
    server: Server, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one under way as well as the next, which may still be answered."""
    monkeypatch.setattr(synchronous, "HURRY_S", 1.0)
    url = f"http://127.0.0.1:{server.port}"
    coordinator = await asyncio.to_thread(lambda: Coordinator(url, token_file=token_file))
    async with asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(asyncio.to_thread(unanswered, coordinator))
        await server.hanging.wait()
        assert not taking.done()
        coordinator.hurry()
    server.script = [reply(SESSION)]
    assert (await asyncio.to_thread(coordinator.open_session, 0)).epoch == 2
    await asyncio.to_thread(coordinator.close)


def unanswered(coordinator: Coordinator) -> None:
    with pytest.raises(Unanswered, match="within 1 s"):
        coordinator.open_session(0)


def took_nothing(coordinator: Coordinator) -> bool:
    with pytest.raises(concurrent.futures.CancelledError):
        coordinator.take_batch(1)
    return True


def test_a_bad_token_file_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="there is no token file"):
        Coordinator("http://127.0.0.1:1", token_file=tmp_path / "none")

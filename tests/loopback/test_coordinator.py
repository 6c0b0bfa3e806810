"""The coordinator's shell on real sockets and files, around a scripted core, and around the real one."""

import asyncio
import json
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save_file

from echo2d.client import AsyncCoordinator, Fenced, PeerFault
from echo2d.config import CoordinatorConfig
from echo2d.core.coordinator_io import (
    Action,
    CheckpointAsked,
    CloseSession,
    CoordinatorRules,
    DeadlinePassed,
    DeleteVersion,
    DrawPrompt,
    EpochAsked,
    EpochOpened,
    Event,
    Note,
    PeerConnected,
    PeerDisconnected,
    PeerRevoked,
    Persist,
    PromptDrawn,
    PublishAsked,
    Recovered,
    Reply,
    RequestGone,
    SampleScored,
    ScoreSample,
    Send,
    SendRoot,
    SessionAsked,
    StopRun,
    VersionPublished,
)
from echo2d.core.ids import Epoch, GroupId, PeerId, PublishSeq
from echo2d.core.messages import PROTOCOL_VERSION, Drain, Hello, SignedRoot, Welcome
from echo2d.core.trajectory import pack_tokens, unpack_tokens
from echo2d.errors import Fault, OperatorFault
from echo2d.net.auth import TokenFile, load_or_make_key, read_token_file, verify_root
from echo2d.net.control import ControlLink, Identity, enrol
from echo2d.runtime import coordinator as coordinator_module
from echo2d.runtime import coordinator_loop
from echo2d.runtime.coordinator import MakeMachine, Opened, core_machine, open_coordinator, run_coordinator
from echo2d.runtime.mailbox import EVENTS_PER_TURN_MAX
from echo2d.runtime.tokens import create_token, find_coordinator, list_tokens, revoke_token
from echo2d.runtime.version_files import VersionFiles
from echo2d.tasks.sort_digits import answer, write_tokenizer
from tests.control_kit import Owner

HELLO = Hello(PROTOCOL_VERSION, None, "worker", "box", "boot", 4, None, None, (), (), ())


class Script:
    """A core that answers each kind of event as the test says, and writes all of them down. Every epoch is in force."""

    def __init__(self) -> None:
        self.on: dict[type, Callable[[Any], list[Action]]] = {}
        self.heard: asyncio.Queue[Event] = asyncio.Queue()
        self.wake: float | None = None
        self.recovered: Recovered | None = None
        self.rules: CoordinatorRules | None = None

    def make(self, rules: CoordinatorRules, recovered: Recovered) -> "Script":
        self.rules, self.recovered = rules, recovered
        return self

    def handle(self, event: Event, *, now: float) -> list[Action]:
        if isinstance(event, EpochAsked):
            return [Reply(event.request, 200, {})]
        self.heard.put_nowait(event)
        return self.on[type(event)](event) if type(event) in self.on else []

    def wake_at(self) -> float | None:
        return self.wake

    def status(self, *, now: float) -> dict[str, Any]:
        return {"scripted": True}

    async def hears(self, kind: type) -> Any:
        """The next event of this kind; others are passed over."""
        while not isinstance(event := await self.heard.get(), kind):
            pass
        return event


def make_config(tmp_path: Path, **changes: Any) -> CoordinatorConfig:
    document = {
        "run": {"run_dir": str(tmp_path / "run"), "snapshot_root": str(tmp_path / "out")},
        "coordinator": {"port": 0},
        "policy": {"trajectories_per_step": 4, "group_size": 2},
        "sampling": {"vocab_size": 17},
        "task": {"name": "sort_digits", "processes": 1},
    }
    return CoordinatorConfig.read(document, changes)


def make_snapshot(path: Path, value: float = 0.0) -> Path:
    path.mkdir(parents=True)
    save_file({"w": np.full(64, value, dtype=np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text('{"vocab_size": 17}')
    write_tokenizer(path)
    return path


@asynccontextmanager
async def serving(config: CoordinatorConfig, make_machine: MakeMachine) -> AsyncIterator[Opened]:
    async with open_coordinator(config, make_machine=make_machine) as opened, asyncio.TaskGroup() as tasks:
        tasks.create_task(opened.coordinator.serve())
        try:
            yield opened
        finally:
            opened.coordinator.stop("the test ends")


@asynccontextmanager
async def learner(run_dir: Path, opened: Opened) -> AsyncIterator[AsyncCoordinator]:
    token_file = run_dir / "tokens" / "learner.token"
    async with AsyncCoordinator(opened.url, token_file=token_file, timeout_s=5.0) as made:
        yield made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def asks_for_a_session(config: CoordinatorConfig, script: Script, fault: type[Fault], words: str) -> None:
    """Serves until it has ended by itself; the caller was told `fault`."""
    async with serving(config, script.make) as opened, learner(config.run.run_dir, opened) as client:
        with pytest.raises(fault, match=words):
            await client.open_session(0)


@pytest.fixture
def config(tmp_path: Path) -> CoordinatorConfig:
    return make_config(tmp_path)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def run_dir(config: CoordinatorConfig) -> Path:
    return config.run.run_dir


def worker_token(run_dir: Path, url: str) -> TokenFile:
    out = run_dir / "box.token"
    create_token(run_dir, "box", role="worker", url=url, out=out, max_workers=1, expires="1h")
    return read_token_file(out)


async def enrolled(run_dir: Path, opened: Opened) -> Identity:
    token = await asyncio.to_thread(worker_token, run_dir, opened.url)
    key = await asyncio.to_thread(load_or_make_key, run_dir / "box.key")
    identity = Identity.of(opened.url, token, key)
    await enrol(opened.url, token, identity, rng=random.Random(1), patience_s=1.0)
    return identity


# --- the loop -------------------------------------------------------------------------------------------------------


async def test_rules_and_what_was_recovered_reach_the_core(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    async with serving(config, script.make) as opened:
        assert script.recovered == Recovered.nothing()
        rules = script.rules
        assert rules is not None
        assert (rules.stop_token_ids, rules.vocab_size, rules.publish_every) == ((1,), 17, None)
        found = await asyncio.to_thread(lambda: json.loads((run_dir / "coordinator.json").read_text()))
        assert (found["url"], found["pid"], found["run_id"]) == (opened.url, os.getpid(), rules.run_id)
        assert await asyncio.to_thread(find_coordinator, run_dir) == (opened.url, run_dir / "tokens" / "viewer.token")
    assert not (run_dir / "coordinator.json").exists()
    with pytest.raises(OperatorFault, match="no coordinator runs in"):
        find_coordinator(run_dir)


async def test_what_is_answered_is_durable(config: CoordinatorConfig, script: Script, run_dir: Path) -> None:
    opened_epoch = EpochOpened(Epoch(3), 7)
    script.on[SessionAsked] = lambda event: [
        Reply(event.request, 409, {"error": "order", "detail": "x"}),
        Persist(opened_epoch),
    ]
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        with pytest.raises(PeerFault, match="order"):
            await client.open_session(7)
    again = Script()
    async with serving(config, again.make):
        assert again.recovered is not None
        assert (again.recovered.epoch, again.recovered.resume_step) == (3, 7)


async def test_a_failing_ledger_ends_the_run_unanswered(config: CoordinatorConfig, script: Script) -> None:
    script.on[SessionAsked] = lambda event: [
        Persist(EpochOpened(Epoch(1), 0)),
        Persist(EpochOpened(Epoch(1), 0)),
        Reply(event.request, 200, {"epoch": 1}),
    ]
    with pytest.raises(BaseExceptionGroup) as caught:
        await asks_for_a_session(config, script, OperatorFault, "stopping")
    assert caught.group_contains(Fault, match="UNIQUE")


async def test_the_core_may_stop_the_run(config: CoordinatorConfig, script: Script) -> None:
    script.on[SessionAsked] = lambda event: [
        StopRun("refused 5 times"),
        Reply(event.request, 409, {"error": "over", "detail": "x"}),
    ]
    with pytest.raises(BaseExceptionGroup) as caught:
        await asks_for_a_session(config, script, PeerFault, "over")
    assert caught.group_contains(Fault, match="refused 5 times")


async def test_deadlines_wake_the_core(config: CoordinatorConfig, script: Script) -> None:
    script.wake = 0.0

    def passed(event: DeadlinePassed) -> list[Action]:
        script.wake = None
        return [Note("woke", "once")]

    script.on[DeadlinePassed] = passed
    async with serving(config, script.make):
        assert await script.hears(DeadlinePassed) == DeadlinePassed()
        assert script.heard.empty()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_late_deadline_lets_in_first_what_waits_in_sockets(
    run: Callable[[Coroutine[Any, Any, None]], None], config: CoordinatorConfig, script: Script
) -> None:
    """Nobody is judged silent by a coordinator that stood still."""
    said = PeerRevoked(PeerId("box"))

    def passed(event: DeadlinePassed) -> list[Action]:
        script.wake = None
        return []

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            async with serving(config, script.make) as opened, asyncio.TaskGroup() as tasks:
                mailbox = opened.coordinator._mailbox
                tasks.create_task(hand_over(ours, lambda: mailbox.put(said)))
                await mailbox.put(said)
                assert await script.hears(PeerRevoked) == said
                theirs.send(b"x")  # in the socket, and unread, when the loop finds that its deadline has long passed
                script.wake, script.on[DeadlinePassed] = time.monotonic() - 2 * coordinator_loop.LATE_S, passed
                mailbox.wake()
                assert [await script.heard.get() for _ in range(2)] == [said, DeadlinePassed()]

    run(scenario())


async def hand_over(link: socket.socket, put: Callable[[], Awaitable[None]]) -> None:
    """When something comes."""
    await asyncio.get_running_loop().sock_recv(link, 1)
    await put()


async def test_prompts_are_drawn_and_outputs_scored(config: CoordinatorConfig, script: Script) -> None:
    def drawn(event: PromptDrawn) -> list[Action]:
        right = pack_tokens(answer(unpack_tokens(event.tokens).tolist()))
        return [
            ScoreSample(GroupId(1), 0, event.cursor, right),
            ScoreSample(GroupId(1), 1, event.cursor, right[:-4]),
        ]

    script.on[DeadlinePassed] = lambda event: [DrawPrompt(5)]
    script.on[PromptDrawn] = drawn
    script.wake = 0.0
    async with serving(config, script.make):
        await script.hears(DeadlinePassed)
        script.wake = None
        scored = sorted([await script.hears(SampleScored) for _ in range(2)], key=lambda event: event.sample)
        assert scored == [SampleScored(GroupId(1), 0, 1.0, ""), SampleScored(GroupId(1), 1, 0.0, "")]


@pytest.mark.parametrize("killed", [(0,), (1,), (0, 1)], ids=["task", "guard", "both"])
async def test_a_prompt_whose_process_is_killed_comes_all_the_same(
    killed: tuple[int, ...], script: Script, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory() as name:  # a task process of another user gets there, not into `tmp_path`
        fifo = Path(name) / "draw-5"
        await asyncio.to_thread(Path(name).chmod, 0o777)
        os.mkfifo(fifo)
        await asyncio.to_thread(fifo.chmod, 0o666)

        def draw(event: DeadlinePassed) -> list[Action]:
            script.wake = None
            return [DrawPrompt(5)]

        script.wake, script.on[DeadlinePassed] = 0.0, draw
        task = {"task.name": "tests.loopback.nasty_task:NastyTask", "task.options": {"directory": name}}
        async with serving(make_config(tmp_path, **task, **{"task.timeout_s": 600.0}), script.make):
            processes = (await asyncio.to_thread(fifo.read_text)).split()
            await asyncio.to_thread(fifo.unlink)
            for each in killed:
                os.kill(int(processes[each]), signal.SIGKILL)
            assert await script.hears(PromptDrawn) == PromptDrawn(5, pack_tokens(range(5)))


# --- versions -------------------------------------------------------------------------------------------------------


def published(event: PublishAsked) -> list[Action]:
    record = VersionPublished(
        PublishSeq(event.request + 1), event.epoch, event.version, event.digest, event.path, event.full_bytes
    )
    return [Persist(record), Reply(event.request, 200, {"version": event.version, "digest": event.digest.hex()})]


async def test_a_published_version_is_kept_until_the_core_lets_it_go(
    config: CoordinatorConfig, script: Script, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted, delete = threading.Event(), VersionFiles.delete

    def delete_and_tell(files: VersionFiles, path: str) -> None:
        delete(files, path)
        deleted.set()

    monkeypatch.setattr(VersionFiles, "delete", delete_and_tell)
    script.on[PublishAsked] = published
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        answered = await client.publish(0, snapshot)
        event = await script.hears(PublishAsked)
        assert answered.digest == event.digest.hex()
        kept = run_dir / event.path
        assert names(kept) == names(snapshot)
        script.on[CheckpointAsked] = lambda asked: [DeleteVersion(event.path), Reply(asked.request, 200, {})]
        await client.checkpoint(0)
        assert await asyncio.to_thread(deleted.wait, 10.0)
        assert not kept.exists()


async def test_a_refused_version_leaves_nothing(
    config: CoordinatorConfig, script: Script, tmp_path: Path, run_dir: Path
) -> None:
    refusal = {"error": "fenced", "detail": "epoch 2 is in force"}
    script.on[PublishAsked] = lambda event: [Reply(event.request, 409, refusal)]
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        with pytest.raises(Fenced, match="epoch 2"):
            await client.publish(0, snapshot)
    assert names(run_dir / "versions") == []


async def test_what_cannot_be_published_is_one_line(
    config: CoordinatorConfig, script: Script, tmp_path: Path, run_dir: Path
) -> None:
    outside = await asyncio.to_thread(make_snapshot, tmp_path / "elsewhere")
    no_tokenizer = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    (no_tokenizer / "tokenizer.json").unlink()
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        with pytest.raises(PeerFault, match="inside the snapshot root"):
            await client.publish(0, outside)
        with pytest.raises(PeerFault, match=r"has no tokenizer\.json"):
            await client.publish(0, no_tokenizer)
        with pytest.raises(PeerFault, match="too long"):
            await client.publish(0, tmp_path / "out" / ("x" * 5000))
        assert (await client.status())["scripted"]
    assert script.heard.empty()
    assert names(run_dir / "versions") == []


async def test_a_learner_elsewhere_publishes_by_upload(
    config: CoordinatorConfig, script: Script, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2d.client.is_loopback", lambda host: False)
    script.on[PublishAsked] = published
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        await client.publish(0, snapshot)
        event = await script.hears(PublishAsked)
        assert (run_dir / event.path / "model.safetensors").stat().st_nlink == 1
    assert names(run_dir / "uploads") == []


# --- peers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fast_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_loop, "ACCESS_RELOAD_S", 0.05)


@pytest.mark.usefixtures("fast_reload")
async def test_a_worker_enrols_is_spoken_to_and_revoked(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    assert config.coordinator.host == "127.0.0.1"

    def connected(event: PeerConnected) -> list[Action]:
        assert script.rules is not None
        welcome = Welcome(event.peer, script.rules.run_id, Epoch(1), PublishSeq(0), 60.0, (), ())
        return [Send(event.session, welcome), SendRoot((event.session,), b"root"), Send(event.session, Drain("x"))]

    script.on[PeerConnected] = connected
    async with serving(config, script.make) as opened:
        identity, owner = await enrolled(run_dir, opened), Owner(HELLO)
        link = ControlLink(opened.url, identity, owner, rng=random.Random(1))
        with pytest.raises(BaseExceptionGroup) as caught:
            await follow(link, script, owner, identity, run_dir)
        assert caught.group_contains(OperatorFault, match="was revoked")


async def follow(link: ControlLink, script: Script, owner: Owner, identity: Identity, run_dir: Path) -> None:
    """Runs the link until it gives up, having been welcomed and revoked."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        assert isinstance(await owner.heard.get(), Welcome)
        root = await owner.heard.get()
        assert isinstance(root, SignedRoot)
        verify_root(identity.run_key, root.root, root.signature)
        assert await owner.heard.get() == Drain("x")
        joined = await script.hears(PeerConnected)
        script.on[PeerRevoked] = lambda event: [CloseSession(joined.session)]
        await asyncio.to_thread(revoke_token, run_dir, "box")
        assert await script.hears(PeerRevoked) == PeerRevoked(identity.peer)
        assert await script.hears(PeerDisconnected) == PeerDisconnected(joined.session, "closed")


@pytest.mark.usefixtures("fast_reload")
async def test_enrolment_is_refused_in_one_line(config: CoordinatorConfig, script: Script, run_dir: Path) -> None:
    async with serving(config, script.make) as opened:
        token = await asyncio.to_thread(worker_token, run_dir, opened.url)
        identity = Identity.of(opened.url, token, Ed25519PrivateKey.generate())
        wrong = TokenFile("box", "worker", "wrong", token.run_key)
        for url, given, words in [
            (opened.url, wrong, "unknown credential"),
            (opened.url + "/elsewhere", token, "refused to enrol"),
            ("http://127.0.0.1:1", token, "cannot reach the coordinator"),
            ("nonsense", token, "nonsense"),
        ]:
            with pytest.raises(OperatorFault, match=words):
                await enrol(url, given, identity, rng=random.Random(1), patience_s=0.0)
    rows = await asyncio.to_thread(list_tokens, run_dir)
    assert [(row["name"], row["state"]) for row in rows] == [(n, "valid") for n in ("box", "own-learner", "own-viewer")]
    assert 3590 < rows[0]["expires_in_s"] <= 3600


# --- starting and stopping ------------------------------------------------------------------------------------------


async def opens(config: CoordinatorConfig) -> str:
    with pytest.raises(OperatorFault) as caught:
        async with open_coordinator(config, make_machine=Script().make):
            pass
    return str(caught.value)


async def test_what_cannot_start_says_why(config: CoordinatorConfig, script: Script, tmp_path: Path) -> None:
    async with serving(config, script.make) as opened:
        port = int(opened.url.rpartition(":")[2])
        assert "in use: another coordinator" in await opens(config)
        other = {"run.run_dir": str(tmp_path / "other")}
        assert "coordinator.port" in await opens(make_config(tmp_path, **other, **{"coordinator.port": port}))
        assert f"link.port: {port}" in await opens(make_config(tmp_path, **other, **{"link.port": port}))
    assert "can dial" in await opens(make_config(tmp_path, **{"link.host": "0.0.0.0"}))
    assert "link.host" in await opens(make_config(tmp_path, **{"link.host": "198.51.100.1"}))
    assert "task nothing" in await opens(make_config(tmp_path, **{"task.name": "nothing"}))
    model = {"run.base_model": str(tmp_path), "sampling.vocab_size": 0}
    assert "vocab_size" in await opens(make_config(tmp_path, **model))
    (tmp_path / "config.json").write_text('{"vocab_size": "many"}')
    assert "'many'" in await opens(make_config(tmp_path, **model))
    assert "cannot listen" in await opens(make_config(tmp_path, **{"coordinator.host": "127.0.0.1.nowhere"}))


async def test_a_stopping_coordinator_does_not_wait_for_long_polls(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    async with serving(config, script.make) as opened:
        token = await asyncio.to_thread(read_token_file, run_dir / "tokens" / "learner.token")
        headers = {"Authorization": f"Bearer {token.secret}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            waiting = asyncio.ensure_future(http.get(f"{opened.url}/v1/batches/1?epoch=1"))
            await script.heard.get()
            opened.coordinator.stop("the test ends")
            async with await waiting as response:
                assert response.status == 503


async def test_what_has_come_before_the_stop_is_committed_and_answered(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    """Also if it is more than one turn takes."""
    script.on[SessionAsked] = lambda event: [Persist(EpochOpened(Epoch(3), 7)), Reply(event.request, 200, {})]
    async with serving(config, script.make) as opened, asyncio.TaskGroup() as tasks:
        for _ in range(EVENTS_PER_TURN_MAX):
            await opened.coordinator._mailbox.put(PeerRevoked(PeerId("box")))
        last = tasks.create_task(opened.coordinator.ask(lambda request: SessionAsked(request, 7), timeout_s=20.0))
        await asyncio.sleep(0)
        opened.coordinator.stop("SIGTERM")
        answer = await last
        assert (answer and answer.status) == 200
    again = Script()
    async with serving(config, again.make):
        assert again.recovered is not None
        assert again.recovered.epoch == 3


async def test_a_caller_that_hangs_up_is_not_answered(config: CoordinatorConfig, script: Script, run_dir: Path) -> None:
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.open_session(0)
        asked = await script.hears(SessionAsked)
        assert await script.hears(RequestGone) == RequestGone(asked.request)


async def test_it_serves_until_a_signal(
    config: CoordinatorConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = asyncio.Event()

    async def no_seed(*_: Any, **__: Any) -> None:
        served.set()

    monkeypatch.setattr(coordinator_module, "supervise_seed", no_seed)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_coordinator(config))
        await served.wait()
        os.kill(os.getpid(), signal.SIGTERM)
    assert running.result() == 0
    assert not (run_dir / "coordinator.json").exists()


# --- the real core --------------------------------------------------------------------------------------------------


async def test_a_learner_publishes_to_the_real_core_across_a_restart(
    config: CoordinatorConfig, tmp_path: Path, run_dir: Path
) -> None:
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, core_machine) as opened, learner(run_dir, opened) as client:
        session = await client.open_session(0)
        assert (session.epoch, session.staleness_max, session.group_size) == (1, 2, 2)
        first = await client.publish(0, snapshot)
        assert await client.publish(0, snapshot) == first
        assert len(names(run_dir / "versions")) == 1
        status = await client.status()
        assert status["newest_version"]["digest"] == first.digest
        assert status["run_id"] == session.run_id
    async with serving(config, core_machine) as opened, learner(run_dir, opened) as client:
        with pytest.raises(Fenced):
            await client.publish(0, snapshot)
        assert (await client.status())["newest_version"]["digest"] == first.digest
        assert len(names(run_dir / "versions")) == 1
        assert (await client.open_session(0)).epoch == 2
        async with aiohttp.ClientSession() as http:
            secret = (await asyncio.to_thread(read_token_file, run_dir / "tokens" / "viewer.token")).secret
            async with http.get(f"{opened.url}/metrics", headers={"Authorization": f"Bearer {secret}"}) as response:
                text = await response.text()
        assert 'echo2d_events_total{kind="SessionAsked"} 1.0' in text
        assert "echo2d_epoch 2.0" in text


async def test_bytes_of_a_fenced_learner_are_not_taken(
    config: CoordinatorConfig, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2d.client.is_loopback", lambda host: False)  # so that it uploads
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    (snapshot / "big.txt").write_bytes(bytes(32 << 20))
    async with (
        serving(config, core_machine) as opened,
        learner(run_dir, opened) as old,
        learner(run_dir, opened) as new,
    ):
        await old.open_session(0)
        await new.open_session(0)
        with pytest.raises(Fenced, match="epoch 2 is in force"):
            await old.publish(0, snapshot)
        assert names(run_dir / "uploads") == []
        monkeypatch.setattr("echo2d.client.is_loopback", lambda host: True)
        with pytest.raises(Fenced, match="epoch 2 is in force"):
            await old.publish(0, tmp_path / "nowhere")  # it is not even looked at
        assert (await new.publish(0, snapshot)).version == 0


async def test_a_learner_of_another_run_is_told_so(config: CoordinatorConfig, run_dir: Path) -> None:
    async with serving(config, core_machine) as opened, learner(run_dir, opened) as client:
        with pytest.raises(OperatorFault, match="cannot resume: this run has come to step 0; step 9 must be another"):
            await client.open_session(9)
        assert (await client.status())["epoch"] == 0

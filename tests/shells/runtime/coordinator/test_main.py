"""The coordinator's shell around a scripted core: its loop, when data are durable, starting and stopping."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from echo2d.client import PeerFault
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import Epoch, GroupId, PeerId
from echo2d.core.cluster.events import Note, PeerRevoked, Persist, Reply, StopRun
from echo2d.core.coordinator.events import (
    CoordinatorAction,
    DeadlinePassed,
    EpochAsked,
    EpochOpened,
    Recovered,
    RequestGone,
    SessionAsked,
)
from echo2d.core.protocol.trajectory import PromptTag, Source, pack_tokens, unpack_tokens
from echo2d.core.work.events import DrawPrompt, PromptDrawn, SampleScored, ScoreSample
from echo2d.errors import Fault, OperatorFault
from echo2d.net.security.auth import read_token_file
from echo2d.runtime.coordinator import loop as coordinator_loop
from echo2d.runtime.coordinator import main as coordinator_module
from echo2d.runtime.coordinator.main import open_coordinator, run_coordinator
from echo2d.runtime.process.mailbox import EVENTS_PER_TURN_MAX
from echo2d.runtime.run_dir.run_directory import find_coordinator
from echo2d.tasks.sort_digits import answer
from tests.support.polling import HANG_S
from tests.support.scripted_core import (
    Script,
    config,
    learner,
    make_config,
    run_dir,
    script,
    serving,
)
from tests.support.shared_folder import shared_folder

__all__ = ["config", "run_dir", "script"]


async def asks_for_a_session(
    config: CoordinatorConfig, script: Script, fault: type[Fault], words: str
) -> None:
    """Serves until it has ended by itself; the caller was told `fault`."""
    async with (
        serving(config, script.make) as opened,
        learner(config.run.run_dir, opened) as client,
    ):
        with pytest.raises(fault, match=words):
            await client.open_session(0)


# --- the loop -------------------------------------------------------------------------------------------------------


async def test_the_rules_and_the_recovered_state_reach_the_core(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    async with serving(config, script.make) as opened:
        assert script.recovered == Recovered.nothing()
        rules = script.rules
        assert rules is not None
        assert (rules.tasks[0].stop_token_ids, rules.vocab_size) == ((1,), 17)
        assert rules.publish_every == "auto"
        found = await asyncio.to_thread(
            lambda: json.loads((run_dir / "coordinator.json").read_text())
        )
        assert (found["url"], found["pid"], found["run_id"]) == (
            opened.url,
            os.getpid(),
            rules.run_id,
        )
        assert await asyncio.to_thread(find_coordinator, run_dir) == (
            opened.url,
            run_dir / "tokens" / "viewer.token",
        )
    assert not (run_dir / "coordinator.json").exists()
    with pytest.raises(OperatorFault, match="no coordinator runs in"):
        find_coordinator(run_dir)


async def test_a_call_is_durable_before_it_is_answered(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
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


async def test_probes_report_a_disk_that_does_not_answer(
    config: CoordinatorConfig, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_loop, "_STUCK_S", 0.0)
    script.on[SessionAsked] = lambda event: [
        Persist(EpochOpened(Epoch(3), 7)),
        Reply(event.request, 200, {}),
    ]
    disk = threading.Event()
    async with serving(config, script.make) as opened, asyncio.TaskGroup() as tasks:
        coordinator = opened.coordinator
        stuck = tasks.create_task(coordinator._ledger._do(disk.wait))
        asked = tasks.create_task(
            coordinator.ask(lambda request: SessionAsked(request, 7), timeout_s=HANG_S)
        )
        await script.hears(SessionAsked)
        assert "for the disk of its ledger" in coordinator.unhealthy()
        assert coordinator.unready() == coordinator.unhealthy()
        disk.set()
        await asyncio.gather(stuck, asked)
        assert coordinator.unhealthy() == ""


async def test_the_coordinator_is_ready_when_it_serves_and_its_seed_has_joined(
    config: CoordinatorConfig, script: Script
) -> None:
    async with open_coordinator(config, make_machine=script.make) as opened:
        assert (opened.coordinator.unhealthy(), opened.coordinator.unready()) == ("", "starting")
    async with serving(config, script.make) as opened:
        # The first request is answered only after the loop has begun.
        await opened.coordinator.ask(
            lambda request: EpochAsked(request, Epoch(1)), timeout_s=HANG_S
        )
        assert opened.coordinator.unready() == "the seed is away"
        script.seed_is_here = True
        assert opened.coordinator.unready() == ""
        opened.coordinator.stop("SIGTERM")
        assert opened.coordinator.unready() == "stopping"


async def test_a_failing_ledger_ends_the_run_before_any_answer(
    config: CoordinatorConfig, script: Script
) -> None:
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

    def passed(event: DeadlinePassed) -> list[CoordinatorAction]:
        script.wake = None
        return [Note("woke", "once")]

    script.on[DeadlinePassed] = passed
    async with serving(config, script.make):
        assert await script.hears(DeadlinePassed) == DeadlinePassed()
        assert script.heard.empty()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_messages_waiting_in_sockets_are_handled_before_a_late_deadline(
    run: Callable[[Coroutine[Any, Any, None]], None], config: CoordinatorConfig, script: Script
) -> None:
    """Nobody is judged silent by a coordinator that stood still."""
    said = PeerRevoked(PeerId("box"))

    def passed(event: DeadlinePassed) -> list[CoordinatorAction]:
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
                theirs.send(
                    b"x"
                )  # in the socket, and unread, when the loop finds that its deadline has long passed
                script.wake, script.on[DeadlinePassed] = (
                    time.monotonic() - 2 * coordinator_loop.LOOP_LATE_S,
                    passed,
                )
                mailbox.wake()
                assert [await script.heard.get() for _ in range(2)] == [said, DeadlinePassed()]

    run(scenario())


async def hand_over(link: socket.socket, put: Callable[[], Awaitable[None]]) -> None:
    """When something comes."""
    await asyncio.get_running_loop().sock_recv(link, 1)
    await put()


async def test_prompts_are_drawn_and_outputs_scored(
    config: CoordinatorConfig, script: Script
) -> None:
    def drawn(event: PromptDrawn) -> list[CoordinatorAction]:
        right = pack_tokens(answer(unpack_tokens(event.tokens).tolist()))
        return [
            ScoreSample(GroupId(1), 0, event.cursor, right, "stop", "sort_digits"),
            ScoreSample(GroupId(1), 1, event.cursor, right[:-4], "length", "sort_digits"),
        ]

    script.on[DeadlinePassed] = lambda event: [DrawPrompt(5, "sort_digits")]
    script.on[PromptDrawn] = drawn
    script.wake = 0.0
    async with serving(config, script.make):
        await script.hears(DeadlinePassed)
        script.wake = None
        scored = sorted(
            [await script.hears(SampleScored) for _ in range(2)], key=lambda event: event.sample
        )
        assert scored == [
            SampleScored(GroupId(1), 0, 1.0, ""),
            SampleScored(GroupId(1), 1, 0.0, ""),
        ]


@pytest.mark.parametrize("killed", [(0,), (1,), (0, 1)], ids=["task", "guard", "both"])
async def test_a_prompt_is_drawn_again_if_its_process_is_killed(
    killed: tuple[int, ...], script: Script, tmp_path: Path
) -> None:
    with shared_folder() as folder:
        fifo = folder / "draw-5"
        os.mkfifo(fifo)
        await asyncio.to_thread(fifo.chmod, 0o666)

        def draw(event: DeadlinePassed) -> list[CoordinatorAction]:
            script.wake = None
            return [DrawPrompt(5, "nasty")]

        script.wake, script.on[DeadlinePassed] = 0.0, draw
        task = {
            "task.kind": "tests.support.nasty_task:NastyTask",
            "task.options": {"directory": str(folder)},
        }
        async with serving(make_config(tmp_path, **task, **{"task.timeout_s": 600.0}), script.make):
            processes = (await asyncio.to_thread(fifo.read_text)).split()
            await asyncio.to_thread(fifo.unlink)
            for each in killed:
                os.kill(int(processes[each]), signal.SIGKILL)
            tags = (PromptTag("index", "5"),)
            drawn = PromptDrawn(5, pack_tokens(range(5)), Source("nasty"), tags)
            assert await script.hears(PromptDrawn) == drawn


# --- starting and stopping ------------------------------------------------------------------------------------------


async def opens(config: CoordinatorConfig) -> str:
    with pytest.raises(OperatorFault) as caught:
        async with open_coordinator(config, make_machine=Script().make):
            pass
    return str(caught.value)


async def test_the_reason_why_a_coordinator_cannot_start_is_reported(
    config: CoordinatorConfig, script: Script, tmp_path: Path
) -> None:
    async with serving(config, script.make) as opened:
        port = int(opened.url.rpartition(":")[2])
        assert "in use: another coordinator" in await opens(config)
        # Not the port, which is in use because the run is.
        same = make_config(tmp_path, **{"link.port": port})
        assert "in use: another coordinator" in await opens(same)
        other = {"run.run_dir": str(tmp_path / "other")}
        assert "coordinator.port" in await opens(
            make_config(tmp_path, **other, **{"coordinator.port": port})
        )
        assert f"link.port: {port}" in await opens(
            make_config(tmp_path, **other, **{"link.port": port})
        )
    assert "can dial" in await opens(make_config(tmp_path, **{"link.host": "0.0.0.0"}))
    assert "link.host" in await opens(make_config(tmp_path, **{"link.host": "198.51.100.1"}))
    for root in (tmp_path / "file" / "out", Path("/proc/nix")):
        (tmp_path / "file").touch()
        assert (await opens(make_config(tmp_path, **{"run.snapshot_root": str(root)}))).startswith(
            f"run.snapshot_root: cannot make {root}: "
        )
    for kind, words in (
        ("nothing", "task nothing: expected a task of echo2d (rows, gym, "),
        ("my_package.parity", "or yours as package.module:Class"),
        ("nowhere.parity:Parity", "there is no module 'nowhere.parity'; put it beside run.toml"),
        ("tests.support.paths:Parity", "tests/support/paths.py, has no 'Parity'"),
    ):
        assert words in await opens(make_config(tmp_path, **{"task.kind": kind}))
    model = {"run.base_model": str(tmp_path), "sampling.vocab_size": 0}
    nowhere = {**model, "run.base_model": str(tmp_path / "nix")}
    assert (
        f"run.base_model: there is no directory {tmp_path}/nix; expected the directory of a model; to"
        in (await opens(make_config(tmp_path, **nowhere)))
    )
    assert f"{tmp_path} has no config.json" in await opens(make_config(tmp_path, **model))
    (tmp_path / "config.json").write_text("[]")
    assert "must hold a JSON object" in await opens(make_config(tmp_path, **model))
    (tmp_path / "config.json").write_text("{}")
    assert "vocab_size" in await opens(make_config(tmp_path, **model))
    (tmp_path / "config.json").write_text('{"vocab_size": "many"}')
    assert "'many'" in await opens(make_config(tmp_path, **model))
    assert "cannot listen" in await opens(
        make_config(tmp_path, **{"coordinator.host": "127.0.0.1.nowhere"})
    )


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


async def test_calls_from_before_the_stop_are_committed_and_answered(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    """Also if it is more than one turn takes."""
    script.on[SessionAsked] = lambda event: [
        Persist(EpochOpened(Epoch(3), 7)),
        Reply(event.request, 200, {}),
    ]
    async with serving(config, script.make) as opened, asyncio.TaskGroup() as tasks:
        for _ in range(EVENTS_PER_TURN_MAX):
            await opened.coordinator._mailbox.put(PeerRevoked(PeerId("box")))
        last = tasks.create_task(
            opened.coordinator.ask(lambda request: SessionAsked(request, 7), timeout_s=HANG_S)
        )
        await asyncio.sleep(0)
        opened.coordinator.stop("SIGTERM")
        answer = await last
        assert (answer and answer.status) == 200
    again = Script()
    async with serving(config, again.make):
        assert again.recovered is not None
        assert again.recovered.epoch == 3


async def test_a_caller_that_hangs_up_is_not_answered(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        calling = asyncio.create_task(client.open_session(0))
        asked = await script.hears(SessionAsked)
        calling.cancel()
        assert await script.hears(RequestGone) == RequestGone(asked.request)


async def test_the_coordinator_serves_until_a_signal(
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

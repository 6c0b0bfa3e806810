"""The owner of a box pauses and resumes its worker, and limits its working hours."""

import asyncio
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.config.worker import WorkerConfig
from echo2d.core.protocol.control_messages import Goodbye
from echo2d.engines.base import Engine
from echo2d.errors import OperatorFault
from echo2d.runtime.coordinator.main import core_machine
from echo2d.runtime.worker import main as worker_main
from echo2d.runtime.worker.main import run_worker
from echo2d.runtime.worker.owner import GPU_FREE_S, GPU_LOOK_S, Owner, set_paused
from tests.support.control_link import worker_token
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import config_of
from tests.support.polling import HANG_S, poll
from tests.support.processes import children, is_running
from tests.support.scripted_core import make_config, serving
from tests.support.service import ServiceManager

PAUSED = "paused by its owner"


async def until(condition: Callable[[], bool]) -> None:
    """Waits in a thread, so that the loop goes on."""
    await asyncio.to_thread(poll, condition)


def owner_says(order: str, state_dir: Path, *more: str, code: int = 0) -> str:
    told = CliRunner().invoke(main, ["worker", order, f"--state-dir={state_dir}", *more])
    assert told.exit_code == code, told.output
    return told.output


class Box:
    """A real `echo2d join` with a fake engine, as a service."""

    def __init__(self, folder: Path, token: Path, manager: ServiceManager) -> None:
        self.state_dir, self._log = folder / "state", folder / "box.log"
        words = ["-m", "echo2d", "join", f"--token-file={token}", f"--state-dir={self.state_dir}"]
        with self._log.open("wb") as sink:
            self.program = subprocess.Popen(
                [sys.executable, *words, "--engine=fake"],
                stderr=sink,
                env={**os.environ, **manager.environment(watchdog_s=60.0)},
            )

    def waited(self, times: int) -> bool:
        return self._log.read_text().count(f"waiting {PAUSED}") == times

    def mapped(self) -> int:
        """How much is mapped into its memory: programs, libraries and what they hold."""
        return len(Path(f"/proc/{self.program.pid}/maps").read_text())

    def kill(self) -> None:
        self.program.kill()
        self.program.wait()


async def test_a_paused_worker_gives_its_work_back_and_resumes_in_the_same_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with ServiceManager(str(tmp_path / "notify")) as manager:
        async with serving(make_config(tmp_path), core_machine) as opened:

            def states() -> Sequence[str]:
                return [each["state"] for each in opened.coordinator.status()["workers"]]

            token = tmp_path / "box.token"
            await asyncio.to_thread(worker_token, tmp_path / "run", opened.url, out=token)
            box = await asyncio.to_thread(Box, tmp_path, token, manager)
            try:
                await until(lambda: states() == ["joined"])
                worked = box.mapped()
                told = await asyncio.to_thread(owner_says, "pause", box.state_dir, "--json")
                assert json.loads(told) == {"state_dir": str(box.state_dir), "paused": True}
                await until(lambda: states() == ["gone"])
                await until(lambda: box.waited(1))
                assert any(PAUSED in each for each in caplog.messages if "disconnected" in each)
                assert box.mapped() < worked
                assert children(box.program.pid) == set()
                manager.until("STATUS", PAUSED)

                assert await asyncio.to_thread(owner_says, "resume", box.state_dir) == "resumed\n"
                await until(lambda: states() == ["joined"])
                assert is_running(box.program.pid)
                said = {key for each in iter(manager.told, None) for key in each}
                assert "STOPPING" not in said

                await asyncio.to_thread(owner_says, "pause", box.state_dir)
                await until(lambda: box.waited(2))
                manager.collect()
                box.program.terminate()
                assert await asyncio.to_thread(box.program.wait, HANG_S) == 0
                assert "STOPPING" in manager.until("STOPPING")
            finally:
                await asyncio.to_thread(box.kill)


async def test_a_goodbye_gives_the_reason_and_a_signal_ends_a_paused_worker(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    config = await config_of(double, tmp_path / "one")
    began: list[int] = []
    for number, told_to_end in enumerate((False, True)):
        async with asyncio.TaskGroup() as tasks:
            daemon = tasks.create_task(run_worker(config, again=lambda: began.append(1)))
            peer = (await double.peers(1))["one"]
            await asyncio.to_thread(set_paused, config.state_dir, paused=True)
            goodbye = await double.until_said(Goodbye, count=number + 1)
            assert goodbye.reason == PAUSED
            if told_to_end:
                os.kill(os.getpid(), signal.SIGTERM)
            double.sessions.close(double.connected[peer])
            assert await daemon == 0
        assert began == [1], "only where no signal came"
        await asyncio.to_thread(set_paused, config.state_dir, paused=False)


async def test_a_pause_does_not_wait_for_a_slow_start(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, goes_on = threading.Event(), threading.Event()

    def slowly(config: WorkerConfig) -> list[Engine]:
        loads.set()
        goes_on.wait(HANG_S)
        return []

    monkeypatch.setattr(worker_main, "make_engines", slowly)
    config = await config_of(double, tmp_path / "one")
    began: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        daemon = tasks.create_task(run_worker(config, again=lambda: began.append(1)))
        await asyncio.to_thread(loads.wait, HANG_S)
        await asyncio.to_thread(set_paused, config.state_dir, paused=True)
        assert await daemon == 0
    goes_on.set()
    assert began == [1]
    assert double.hellos == {}


async def test_a_worker_outside_its_hours_waits(
    double: CoordinatorDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hour = (time.localtime().tm_hour + 2) % 24
    hours = f"{hour:02}:00-{(hour + 1) % 24:02}:00"
    config = dataclasses.replace(await config_of(double, tmp_path / "one"), hours=hours)
    async with asyncio.TaskGroup() as tasks:
        daemon = tasks.create_task(run_worker(config))
        words = f"waiting outside its hours; starts again at {hour:02}:00"
        await until(lambda: words in caplog.messages)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await daemon == 0
    assert double.hellos == {}


def test_only_a_directory_of_a_worker_can_be_paused(tmp_path: Path) -> None:
    assert "is not the state directory of a worker" in owner_says("pause", tmp_path, code=2)


class FakeGpus:
    """A `nvidia-smi` on the path that names the processes of this test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._told = folder / "told"
        program = folder / "nvidia-smi"
        program.write_text(
            '#!/bin/sh\n[ "$1" = --query-compute-apps=pid,used_memory ] || exit 9\n'
            f"[ -e {self._told} ] && cat {self._told}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def use(self, *pids: int) -> None:
        self._told.write_text("".join(f"{pid}, 512 MiB\n" for pid in pids))

    def hang(self) -> None:
        self._told.unlink()


def test_the_key_only_when_idle_needs_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = WorkerConfig(token_file=tmp_path / "t", state_dir=tmp_path, only_when_idle=True)
    with pytest.raises(OperatorFault, match="install the NVIDIA driver, or leave only_when_idle"):
        Owner(config)


def test_a_worker_pauses_while_another_program_uses_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, now = FakeGpus(tmp_path, monkeypatch), 0.0
    gpus.use(os.getpid())
    config = WorkerConfig(token_file=tmp_path / "t", state_dir=tmp_path, only_when_idle=True)
    owner = Owner(config, clock=lambda: now)
    assert owner.look() == ""
    with subprocess.Popen(["sleep", "1000"]) as engine:
        gpus.use(os.getpid(), engine.pid)
        now += GPU_LOOK_S
        assert owner.look() == "", "its own servers do not count"
        gpus.use(engine.pid, os.getppid())
        now += GPU_LOOK_S / 2
        assert owner.look() == "", "it is not asked all the time"
        now += GPU_LOOK_S / 2
        assert owner.look() == f"another program is on a GPU: process {os.getppid()}"
        gpus.hang()
        now += 2 * GPU_FREE_S
        assert "another program" in owner.look(), "no answer changes nothing"
        gpus.use(os.getppid())
        now += GPU_LOOK_S
        assert owner.look()
        gpus.use()
        now += GPU_LOOK_S
        assert owner.look(), "its next part may follow"
        now += GPU_FREE_S
        assert owner.look() == ""
        engine.kill()

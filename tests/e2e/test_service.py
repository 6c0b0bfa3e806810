"""The programs as services: they report their state to the service manager, and end in order within a bounded time.

The manager is a socket of this test (`tests/support/service.py`); the programs are the real ones.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from echo2d.client import Coordinator
from echo2d.demo.processes import Program, Programs
from echo2d.runtime.process.lifecycle import STOP_S_MAX
from echo2d.runtime.run_dir.run_directory import RunDirectory
from tests.support.polling import START_S, poll
from tests.support.programs import Site, run
from tests.support.service import ServiceManager

pytestmark = [pytest.mark.timeout(900)]

WATCHDOG_S = 0.5
SILENCE_S = 1.5  # six times as long as a loop may take to say that it turns
LONG = 1000  # steps of a run that does not end by itself

# A bug of ours that never comes back, on demand: the handler runs in the main thread, which is the loop's.
MAIN_THREAD_HANGS = """
import runpy, signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: time.sleep(3600))
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""

# A driver that never answers, on demand: the engine's own thread hangs in its step.
ENGINE_HANGS = """
import signal, sys, time
from echo2d.engines.torch_engine.batch import DecodeBatch
step, hangs = DecodeBatch.step, []
DecodeBatch.step = lambda *arguments: time.sleep(3600) if hangs else step(*arguments)
signal.signal(signal.SIGUSR2, lambda *_: hangs.append(True))
sys.argv = sys.argv[2:]
from echo2d.cli import main
main()
"""

# A disk with a large version on it, which takes long to be checked.
DISK_IS_SLOW = """
import sys, time
from echo2d.runtime.peer.state_dir import StateDir
StateDir.frames = lambda self: print("it reads", flush=True) or time.sleep(3600)
sys.argv = sys.argv[2:]
from echo2d.cli import main
main()
"""

Service = Callable[[str], ServiceManager]


class Hanging(Programs):
    """Programs that hang, each in its way, after SIGUSR2."""

    def __init__(self, logs: Path, script: str) -> None:
        super().__init__(logs)
        self._script = script

    def start(self, name: str, *arguments: str) -> Program:
        return super().start(name, "-c", self._script, *arguments)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Programs that are started from now on tell this manager."""
    with ExitStack() as managers:

        def begin(address: str) -> ServiceManager:
            manager = managers.enter_context(ServiceManager(address))
            for name, value in manager.environment(watchdog_s=WATCHDOG_S).items():
                monkeypatch.setenv(name, value)
            return manager

        yield lambda name: begin(f"{'' if name == 'coordinator' else '@'}{tmp_path}/{name}.socket")


def ends_in_order(*programs: Program, told: Sequence[ServiceManager] = ()) -> None:
    """After SIGTERM, each within the bound. told: by these programs; none of their messages is lost."""

    def ended() -> bool:
        for manager in told:
            manager.collect()
        return all(program.returncode is not None for program in programs)

    ended()
    for program in programs:
        program.terminate()
    poll(ended, timeout_s=STOP_S_MAX)
    for program in programs:
        assert program.wait(0.0) == 0, program.tail()


def says_last(manager: ServiceManager) -> None:
    assert "SIGTERM" in manager.until("STOPPING")["STATUS"]
    while message := manager.told():
        assert not {"READY", "WATCHDOG"} & message.keys()


def test_services_report_each_stage_of_their_life(site: Site, service: Service) -> None:
    of_coordinator = service("coordinator")
    coordinator = site.coordinate()
    assert "no version published" in of_coordinator.until("READY")["STATUS"]
    assert (site.run_dir / "coordinator.json").exists(), "it listens when it says so"
    of_box = service("box")
    box = site.join("box", "--engines=2", "--threads=2")
    of_box.until("READY")
    of_box.until("STATUS", "no version served, 0 samples running, connected to")
    of_learner = service("learner")
    learner = site.learn(LONG)
    of_learner.until("STATUS", "loading the model")
    assert f"step 0 of {LONG} done" in of_learner.until("READY")["STATUS"]
    of_learner.until("STATUS", r"step ([2-9]|\d\d+) of")
    of_box.until("STATUS", r"version [1-9]\d* served")
    of_coordinator.until("STATUS", r"step ([2-9]|\d\d+) committed, 1 workers")
    for manager in (of_coordinator, of_box, of_learner):
        for _ in range(3):
            manager.until("WATCHDOG")
    for program, manager in ((learner, of_learner), (box, of_box), (coordinator, of_coordinator)):
        ends_in_order(program, told=[manager])
        says_last(manager)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["coordinator", "box", "learner"])
def test_a_program_that_hangs_stops_its_watchdog_messages(
    site: Site, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Then the service manager sends SIGABRT, and the log has the line."""
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # as the units do
    with Hanging(tmp_path / "hanging", MAIN_THREAD_HANGS) as programs:
        if name != "coordinator":
            site.coordinate()
            site.url()
        manager = service(name)
        site.programs, others = programs, site.programs
        starts = {"coordinator": site.coordinate, "box": lambda: site.join("box", "--engine=fake")}
        program = starts.get(name, lambda: site.learn(LONG))()
        site.programs = others
        manager.until("READY")
        manager.until("WATCHDOG")
        os.kill(program.pid, signal.SIGUSR2)
        manager.until_silent(SILENCE_S, messages_max=100)
        assert program.returncode is None
        os.kill(program.pid, signal.SIGABRT)
        assert program.wait(START_S) == -signal.SIGABRT
        assert 'File "<string>", line 3 in <lambda>' in program.log.read_text()


@pytest.mark.nightly
def test_programs_start_and_end_without_a_coordinator(site: Site, service: Service) -> None:
    coordinator, url = site.coordinate(), site.url()
    of_box = service("box")
    box = site.join("box", "--engine=fake")
    of_box.until("READY")
    ends_in_order(box)
    site.learn(LONG).terminate()  # it leaves its part of the config
    ends_in_order(coordinator)
    arguments = (
        url,
        f"--token-file={site.directory}/box.token",
        f"--state-dir={site.directory}/box",
        "--engine=fake",
    )
    box = site.programs.start("again", "-m", "echo2d", "join", *arguments)
    assert "waiting for" in of_box.until("READY")["STATUS"]
    of_learner = service("learner")
    learner = site.programs.start("learner", "-m", "echo2d", "learn", "--config", str(site.config))
    of_learner.until("STATUS", "opening a session")
    ends_in_order(box, learner, told=[of_box, of_learner])
    says_last(of_box)
    says_last(of_learner)
    assert "Traceback" not in box.log.read_text() + learner.log.read_text()


@pytest.mark.nightly
def test_programs_end_while_the_coordinator_hangs(site: Site, service: Service) -> None:
    """Nobody's end takes another's word; the learner's last step is on disk and counts."""
    coordinator = site.coordinate()
    of_box = service("box")
    box = site.join("box", "--threads=1")
    of_learner = service("learner")
    learner = site.learn(LONG)
    of_learner.until("STATUS", r"step [1-9]\d* of")
    of_box.until("STATUS", r"version \d+ served")
    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        ends_in_order(learner, box, told=[of_learner, of_box])
    finally:
        os.kill(coordinator.pid, signal.SIGCONT)
    says_last(of_learner)
    says_last(of_box)
    (saved,) = (site.directory / "learner" / "checkpoints").iterdir()
    steps = int(saved.name.split("-")[1])
    assert steps >= 1
    site.join("other", "--threads=1")
    assert site.learn(steps + 2, "--resume").wait(START_S) == 0
    facts = site.status()
    assert (facts["committed_step"], facts["epoch"]) == (steps + 2, 2)
    rows = [
        json.loads(line)["step"]
        for line in (site.directory / "learner" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[-2:] == [steps + 1, steps + 2]


@pytest.mark.nightly
def test_a_worker_ends_while_its_engine_hangs(site: Site, service: Service, tmp_path: Path) -> None:
    with Hanging(tmp_path / "hanging", ENGINE_HANGS) as programs:
        site.coordinate()
        site.url()
        of_box = service("box")
        site.programs, others = programs, site.programs
        box = site.join("box", "--threads=1")
        site.programs = others
        service("learner")
        learner = site.learn(LONG)
        of_box.until("STATUS", r"version [1-9]\d* served")
        os.kill(box.pid, signal.SIGUSR2)
        poll(lambda: " 0 samples" not in of_box.until("STATUS")["STATUS"])
        assert box.returncode is None
        ends_in_order(box)
        assert "engines left behind" in box.log.read_text()
    who_is_fenced_stays_down(site, learner)


def who_is_fenced_stays_down(site: Site, learner: Program) -> None:
    """Its unit does not restart on 2: the two would take the run from each other for ever."""
    with Coordinator(site.url(), token_file=site.run_dir / "tokens" / "learner.token") as newer:
        newer.open_session(newer.status()["checkpoint_step"], take_over=True)
    assert learner.wait(START_S) == 2
    assert "learner: " in learner.tail().splitlines()[-1]
    assert "Traceback" not in learner.log.read_text()


@pytest.mark.nightly
def test_a_coordinator_ends_while_a_worker_hangs(site: Site, service: Service) -> None:
    of_coordinator = service("coordinator")
    coordinator = site.coordinate()
    box = site.join("box", "--engine=fake")
    of_coordinator.until("STATUS", "1 workers")
    os.kill(box.pid, signal.SIGSTOP)
    try:
        ends_in_order(coordinator)
    finally:
        os.kill(box.pid, signal.SIGCONT)
    ends_in_order(box)


@pytest.mark.nightly
def test_a_worker_that_is_still_starting_ends_at_once(site: Site, tmp_path: Path) -> None:
    """By the signal, which a service manager takes for an end in order."""
    token = site.directory / "box.token"
    RunDirectory(site.run_dir)
    run(
        "token",
        "create",
        "box",
        "--role=worker",
        f"--run-dir={site.run_dir}",
        "--url=http://[::1]:1",
        f"--out={token}",
    )
    with Hanging(tmp_path / "hanging", DISK_IS_SLOW) as programs:
        arguments = (
            "http://[::1]:1",
            f"--token-file={token}",
            f"--state-dir={tmp_path}/box",
            "--engine=fake",
        )
        box = programs.start("box", "-m", "echo2d", "join", *arguments)
        poll(lambda: "it reads" in box.log.read_text())
        box.terminate()
        assert box.wait(STOP_S_MAX) == -signal.SIGTERM


@pytest.mark.nightly
def test_a_second_signal_right_after_the_first_changes_nothing(
    site: Site, service: Service
) -> None:
    coordinator = site.coordinate()
    of_box = service("box")
    box = site.join("box", "--engine=fake")
    of_box.until("STATUS", "connected to")
    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        of_box.collect()
        box.terminate()
        of_box.until("STOPPING")
        box.terminate()
        assert box.wait(STOP_S_MAX) == 0
    finally:
        os.kill(coordinator.pid, signal.SIGCONT)

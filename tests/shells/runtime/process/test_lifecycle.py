"""A process always ends: real processes, each with a part that does not end."""

import resource
import signal
import subprocess
import sys

import pytest

from echo2d.runtime.process.lifecycle import OPEN_FILES_MAX
from tests.support.polling import HANG_S, poll

BOUND_S = 0.5  # in place of STOP_S_MAX and EXIT_S_MAX

PROGRAM = """
import asyncio, sys, time
from echo2d.runtime.process import lifecycle
lifecycle.STOP_S_MAX = lifecycle.EXIT_S_MAX = %g

async def program():
    stopped = asyncio.Event()
    with lifecycle.Ending() as ending:
        ending.by_signals(lambda reason: (print(reason, flush=True), stopped.set()))
        print("ready", flush=True)
        %s
    %s

sys.exit(lifecycle.run_daemon(program))
"""
ENDS = ("await stopped.wait()", "return 0")
NEVER = ("await asyncio.Event().wait()", "return 0")
BLOCKED = ("await stopped.wait(); time.sleep(3600)", "return 0")
THREAD = (
    "await stopped.wait()",
    "asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600); return 0",
)
DISK = ("await stopped.wait(); await asyncio.to_thread(time.sleep, 3600)", "return 0")


def started(parts: tuple[str, str], bound_s: float = BOUND_S) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM % (bound_s, *parts)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("parts", "code"),
    [(ENDS, 0), (THREAD, 0), (NEVER, 1), (BLOCKED, 1)],
    ids=["in order", "a thread hangs", "it waits for ever", "the loop hangs"],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_after_one_signal(
    parts: tuple[str, str], code: int, number: signal.Signals
) -> None:
    process = started(parts)
    process.send_signal(number)
    out, _ = process.communicate(timeout=HANG_S)
    assert (out, process.returncode) == (f"{number.name}\n", code)


def test_a_daemon_raises_its_limit_of_open_files_to_the_systems() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}));"
    said = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    program = few + PROGRAM % (BOUND_S, "pass", f"{said}; return 0")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[1] == f"{min(OPEN_FILES_MAX, hard)} {hard}"


@pytest.mark.parametrize(
    "parts",
    [NEVER, BLOCKED, DISK],
    ids=["it waits for ever", "the loop hangs", "it waits for the disk"],
)
def test_a_later_second_signal_ends_a_process_at_once(parts: tuple[str, str]) -> None:
    process = started(parts, bound_s=2 * HANG_S)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGINT\n"
    # One that comes at once is the same.
    poll(lambda: ended_by_a_signal(process))
    assert process.wait(HANG_S) == -signal.SIGTERM
    process.stdout.close()


def ended_by_a_signal(process: subprocess.Popen[str]) -> bool:
    process.send_signal(signal.SIGTERM)
    return process.poll() is not None


def test_two_signals_at_once_count_as_one() -> None:
    """As torchrun sends its own after that of a service manager."""
    process = started(("await stopped.wait(); await asyncio.sleep(0.3)", "return 0"), 2 * HANG_S)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGTERM\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 0
    process.stdout.close()

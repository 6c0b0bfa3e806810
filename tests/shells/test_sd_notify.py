"""The messages to a service manager, over real sockets."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.sd_notify import STATUS_S, WORDS_MAX, Notifier
from tests.support.service import ServiceManager


def words() -> str:
    return "all is\nwell"


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    address = str(tmp_path / "notify")
    with ServiceManager(address if request.param == "path" else f"@{address}") as manager:
        yield manager


def test_a_program_reports_start_readiness_and_stop(manager: ServiceManager) -> None:
    notifier = Notifier(manager.environment())
    notifier.starting("reading")
    assert manager.told() == {"STATUS": "reading"}
    notifier.turned(words)
    assert manager.told() == {"READY": "1", "WATCHDOG": "1", "STATUS": "all is well"}
    notifier.turned(words)
    assert manager.told() is None, "once in a while is enough"
    notifier.alive("starting")
    assert manager.told() == {"WATCHDOG": "1", "STATUS": "starting"}
    notifier.stopping("SIGTERM")
    assert manager.told() == {"STOPPING": "1", "STATUS": "SIGTERM"}


def test_the_loop_turns_at_least_twice_in_the_watchdogs_time(manager: ServiceManager) -> None:
    now_s = 100.0
    notifier = Notifier(manager.environment(watchdog_s=0.4), clock=lambda: now_s)
    assert notifier.wait_s(None) == 0.0, "at once: it has not started yet"
    notifier.turned(words)
    assert notifier.wait_s(None) == pytest.approx(0.2)
    assert notifier.wait_s(0.01) == 0.01
    now_s += 0.2
    notifier.turned(words)
    assert [manager.told() is not None for _ in range(3)] == [True, True, False]


def test_a_program_that_stops_does_not_become_ready_again(manager: ServiceManager) -> None:
    notifier = Notifier(manager.environment())
    notifier.stopping("SIGTERM")
    notifier.turned(words)
    assert manager.told() == {"STOPPING": "1", "STATUS": "SIGTERM"}
    assert manager.told() is None
    assert notifier.wait_s(None) is None, "nothing is due any more"


def test_a_long_status_is_shortened(manager: ServiceManager) -> None:
    Notifier(manager.environment()).starting("w" * 9999)
    assert manager.told() == {"STATUS": "w" * WORDS_MAX}


@pytest.mark.parametrize(
    ("change", "every_s"),
    [
        ({}, STATUS_S),
        ({"WATCHDOG_USEC": "0"}, STATUS_S),
        ({"WATCHDOG_USEC": "soon"}, STATUS_S),
        ({"WATCHDOG_USEC": "60000000"}, STATUS_S),
        ({"WATCHDOG_USEC": "2000000"}, 1.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 1.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, STATUS_S),
    ],
)
def test_a_watchdog_for_another_process_is_ignored(
    manager: ServiceManager, change: dict[str, str], every_s: float
) -> None:
    notifier = Notifier({**manager.environment(), **change})
    notifier.turned(words)
    assert notifier.wait_s(None) == pytest.approx(every_s, abs=0.5)


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1234"])
def test_without_an_address_nothing_is_sent(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1"})
    notifier.starting("x")
    notifier.turned(lambda: pytest.fail("words that nobody reads"))
    notifier.stopping("x")
    assert notifier.wait_s(None) is None
    assert notifier.wait_s(3.0) == 3.0


def test_a_manager_that_is_gone_or_does_not_read_costs_nothing(tmp_path: Path) -> None:
    with ServiceManager(str(tmp_path / "notify")) as manager:
        notifier = Notifier(manager.environment())
        for _ in range(2000):  # more than a socket queues
            notifier.starting("x")
    notifier.turned(words)
    notifier.stopping("x")

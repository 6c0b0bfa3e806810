"""When bbr is set again: a real socket that records which algorithms it was given."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.net.peer.congestion import LINK_QUIET_S, Congestion

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
pytestmark = pytest.mark.skipif(
    not AVAILABLE.exists() or "bbr" not in AVAILABLE.read_text().split(),
    reason="this kernel has no bbr",
)


class Recording(socket.socket):
    """A TCP socket that keeps what it is given as congestion control."""

    def __init__(self) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.given: list[bytes] = []

    def setsockopt(self, level: int, option: int, value: Any, *rest: Any) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        self.given.append(value)
        super().setsockopt(level, option, value, *rest)


@pytest.fixture
def sock() -> Iterator[Recording]:
    with Recording() as made:
        yield made


def send(congestion: Congestion, start: float, end: float) -> None:
    """A frame every 0.1 s."""
    for tenth in range(round(start * 10), round(end * 10)):
        congestion.sending(tenth / 10)


def test_the_first_frame_after_a_pause_sets_bbr_again(sock: Recording) -> None:
    congestion = Congestion(sock)
    send(congestion, 0, 5)
    assert sock.given == [b"bbr", b"reno", b"bbr"]
    send(congestion, 5 + LINK_QUIET_S, 7)
    assert sock.given == [b"bbr"] + [b"reno", b"bbr"] * 2
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")


def test_a_link_that_sends_keeps_its_bbr(sock: Recording) -> None:
    congestion = Congestion(sock)
    send(congestion, 0, 30)
    assert sock.given == [b"bbr", b"reno", b"bbr"]


def test_a_kernel_without_bbr_keeps_its_own_algorithm(sock: Recording) -> None:
    congestion = Congestion(sock)
    sock.close()
    congestion.sending(0)
    assert sock.given == [b"bbr", b"reno"]

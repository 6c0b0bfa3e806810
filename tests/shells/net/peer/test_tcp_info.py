"""The kernel's facts about a real connection over loopback."""

import socket
from collections.abc import Iterator

import pytest

from echo2d.net.peer.tcp_info import TcpInfo, tcp_info

DATA = bytes(1 << 20)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


def known(sock: socket.socket) -> TcpInfo:
    info = tcp_info(sock)
    assert info is not None
    return info


def move(sender: socket.socket, receiver: socket.socket) -> None:
    """All of DATA, in pieces that fit into the buffers; then one byte back."""
    piece = 1 << 14
    for start in range(0, len(DATA), piece):
        sender.sendall(DATA[start : start + piece])
        receiver.recv(piece, socket.MSG_WAITALL)
    # With this byte comes the acknowledgement of all that was sent before.
    receiver.sendall(b"!")
    sender.recv(1)


def test_a_new_connection_reports_no_sent_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    info = known(pair[0])
    assert (info.sent, info.again, info.in_flight) == (0, 0, 0)


def test_sent_and_acknowledged_bytes_are_counted(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    move(one, other)
    info = known(one)
    assert info.sent - info.again == len(DATA)
    assert len(DATA) <= info.acknowledged <= len(DATA) + 1, "the kernel may count the SYN as a byte"
    assert info.in_flight == 0


def test_each_end_counts_only_its_own_sent_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    move(one, other)
    assert known(other).sent == 1


def test_the_shortest_round_trip_is_known_and_none_is_shorter(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    move(one, other)
    info = known(one)
    assert 0 < info.least_trip_s < 1
    assert 0 < info.trip_s < 1


def test_nothing_is_known_about_a_closed_socket(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].close()
    assert tcp_info(pair[0]) is None


def test_a_kernel_with_fewer_fields_gives_no_facts() -> None:
    """A datagram socket has no such figures at all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        assert tcp_info(sock) is None

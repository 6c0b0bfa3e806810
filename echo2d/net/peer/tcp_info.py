"""Reads what the kernel knows of a TCP connection: bytes sent, sent again and acknowledged, and round trips."""

import contextlib
import socket
import struct
from dataclasses import dataclass

# Offsets of the fields in Linux's struct tcp_info, and its size up to the last field that is read here
# (since Linux 4.19).
_UNACKED, _RTT, _ACKED, _LEAST_RTT, _SENT, _AGAIN, _SIZE = 24, 68, 120, 148, 200, 208, 216
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """The state of a connection. Bytes count from its start."""

    sent: int  # bytes, those sent again included
    again: int  # bytes
    acknowledged: int  # bytes
    in_flight: int  # packets that are not acknowledged yet
    trip_s: float  # the round trip; 0: not known
    least_trip_s: float  # the shortest round trip of the last minutes; 0: not known


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """None: the kernel does not report all of it."""
    info = b""
    with contextlib.suppress(OSError):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    if len(info) < _SIZE:
        return None

    def number(fmt: struct.Struct, place: int) -> int:
        return int(fmt.unpack_from(info, place)[0])

    return TcpInfo(
        number(_U64, _SENT),
        number(_U64, _AGAIN),
        number(_U64, _ACKED),
        number(_U32, _UNACKED),
        number(_U32, _RTT) / 1e6,
        number(_U32, _LEAST_RTT) / 1e6,
    )

"""What the kernel knows of a TCP connection: bytes sent, sent again and acknowledged, and round trips."""

import contextlib
import socket
import struct
from dataclasses import dataclass

# Linux's struct tcp_info: the places of its fields, and the size up to the last one that is read here
# (since Linux 4.19).
_UNACKED, _RTT, _ACKED, _LEAST_RTT, _SENT, _AGAIN, _SIZE = 24, 68, 120, 148, 200, 208, 216
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Bytes since the connection began: sent (again included), sent again, acknowledged.

    in_flight: packets that are not acknowledged yet. trip_s, least_trip_s: the round trip, and the
    shortest of the last minutes; 0: not known.
    """

    sent: int
    again: int
    acknowledged: int
    in_flight: int
    trip_s: float
    least_trip_s: float


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """None: the kernel does not tell all of it."""
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

"""Draws a free port: for a program that is started again at the same address, or for an address without a listener."""

import random
import socket
from contextlib import suppress
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_000
_draw = random.SystemRandom()


def free_port() -> int:
    """A port of 127.0.0.1 that is free, as is the next one, which is the default of link.port.

    It lies below the ports that the kernel gives to those who ask for any: one of these would
    soon belong to another test.
    """
    first_of_kernel = int(RANGE.read_text().split()[0])
    while True:
        port = _draw.randrange(LOWEST, max(first_of_kernel - 1, 2 * LOWEST))
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port

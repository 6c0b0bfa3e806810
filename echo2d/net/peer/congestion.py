"""Selects bbr congestion control for a peer link, where the kernel has it, and avoids bbr's pauses.

If for 10 s no round trip is as short as the shortest one that bbr has seen, bbr sends next to nothing
for 0.2 s to measure again (PROBE_RTT). In a chain or tree these pauses happen at different times, and
each delays all peers below: a version that takes 6 s to send over 8 links was delayed
by up to 1 s.
Selecting bbr again restarts the 10 s, with the shortest round trip that TCP itself knows (of the
last 5 minutes). But bbr also starts by doubling its rate, which fills the queue before a link. So it is
selected again only before a version's first frame.
"""

import socket

# After this long without a frame, everything that was in flight has arrived.
LINK_QUIET_S = 0.5
BBR, RENO = b"bbr", b"reno"


def kernel_has_bbr() -> bool:
    """Whether this process may select bbr."""
    with socket.socket() as sock:
        return _select(sock, BBR)


def _select(sock: socket.socket, algorithm: bytes) -> bool:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
    except OSError:
        return False
    return True


class Congestion:
    """The congestion control of one socket, from its start."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sent_at = float("-inf")
        # A kernel without bbr keeps its own default.
        self._has_bbr = _select(sock, BBR)

    def sending(self, now: float) -> None:
        """Record that a frame is sent now, and select bbr again if the link was quiet before."""
        quiet_s, self._sent_at = now - self._sent_at, now
        # Selecting the current algorithm changes nothing, so switch to another one in between.
        if quiet_s > LINK_QUIET_S and self._has_bbr and _select(self._socket, RENO):
            _select(self._socket, BBR)

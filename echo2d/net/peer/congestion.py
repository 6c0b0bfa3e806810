"""The congestion control of a peer link: bbr where the kernel has it, without the pauses that it makes.

10 s after bbr last saw a round trip as short as its shortest, it sends next to nothing for 0.2 s and looks again
(PROBE_RTT). On the links of a chain or of a tree these pauses come at different times, and each holds up everybody
below: they cost a version of 6 s on 8 links up to 1 s. bbr that is set anew begins with the shortest round trip that
TCP itself knows (of the last 5 minutes) and another 10 s. It begins by doubling its rate, too, which fills the queue
before a link of unknown rate; so that is done before a version's first frame, and later where a pace is the limit.
"""

import socket

QUIET_S = 0.5  # without a frame: whatever was in flight has arrived
RENEW_S = 8.0  # bbr's 10 s less what it may take until the next frame


class Congestion:
    """Of one socket, from its start."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.sent_at = self._renewed_at = float("-inf")
        self._has_bbr = self._use(b"bbr")  # a kernel without it keeps its own choice
        self.paced = False  # no more is sent than the link is thought to take

    def sending(self, now: float) -> None:
        """A frame goes out now."""
        quiet_s, self.sent_at = now - self.sent_at, now
        if quiet_s > QUIET_S or (self.paced and now - self._renewed_at > RENEW_S):
            self._renewed_at = now
            if self._has_bbr and self._use(b"reno"):  # the same again would change nothing
                self._use(b"bbr")

    def _use(self, algorithm: bytes) -> bool:
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
        except OSError:
            return False
        return True

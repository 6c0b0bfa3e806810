"""Notifies the service manager (sd_notify(3)): started, alive, stopping, and one line of status.

    starting --turned--> serving --turned--> serving ... --stopping--> over

The main loop of the program calls `turned` in each turn. If the loop hangs, no more notifications are sent, and the
watchdog of the service manager ends the process. Without NOTIFY_SOCKET in the environment, nothing is sent. No function
here waits or fails: a datagram that cannot be sent is dropped, and the next datagram has all facts again.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping

# The status line of `systemctl status` is no older than this.
STATUS_S = 10.0
# A status line has at most this many characters; a terminal shows fewer.
WORDS_MAX = 400

StatusText = Callable[[], str]


class Notifier:
    """Sends notifications. environment: the variables of this process. clock: monotonic seconds."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        variables = environment or {}
        self._address = _address(variables.get("NOTIFY_SOCKET", ""))
        # Two notifications are at most half of the watchdog's time apart, as sd_watchdog_enabled(3) advises.
        self._every_s = min(STATUS_S, 0.5 * _watchdog_s(variables))
        self._clock = clock
        self._due_at = 0.0
        self._over = False

    def wait_s(self, timeout_s: float | None) -> float | None:
        """How long the loop may wait: `timeout_s` seconds (None: without a limit), or less if a notification is due
        earlier.
        """
        if not self._address or self._over:
            return timeout_s
        left_s = max(0.0, self._due_at - self._clock())
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def turned(self, words: StatusText) -> None:
        """Report one more turn of the loop. The first call reports that the process has started."""
        if self._address and not self._over and self._clock() >= self._due_at:
            self._due_at = self._clock() + self._every_s
            self._tell("READY=1", "WATCHDOG=1", _status(words()))

    def starting(self, words: str) -> None:
        """Say why the start takes long. For the watchdog this is no sign of life."""
        self._tell(_status(words))

    def alive(self, words: str) -> None:
        """Say that the program is still starting. The service was ready before, so its watchdog runs and needs this."""
        self._tell("WATCHDOG=1", _status(words))

    def stopping(self, words: str) -> None:
        """Say that the process is ending. This is the last notification."""
        self._over = True
        self._tell("STOPPING=1", _status(words))

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as manager:
            # An OSError means that no service manager listens, or that it does not read fast enough.
            manager.sendto("\n".join(lines).encode(), self._address)


def _address(name: str) -> str:
    """The address of a socket: a path, or after an @ a name in the abstract namespace.

    Other forms (vsock) are for whole machines; the result is then empty.
    """
    return name.replace("@", "\0", 1) if name.startswith(("/", "@")) else ""


def _watchdog_s(variables: Mapping[str, str]) -> float:
    """The watchdog's time in seconds; infinite if this process has no watchdog."""
    # The variables may be inherited from a parent process. Then the watchdog watches that process and not this one.
    meant = variables.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    usec = variables.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if meant and usec.isdecimal() and int(usec) else float("inf")


def _status(words: str) -> str:
    """A STATUS field, on one line: a line break would begin another field."""
    return f"STATUS={' '.join(words.split())[:WORDS_MAX]}"

"""What a service manager is told of this process: started, alive, stopping, and a line of words. sd_notify(3).

    starting --turned--> serving --turned--> serving ... --stopping--> over

`turned` is called by the one loop without which the program is of no use, each time that loop has gone round: a loop
that hangs says nothing more, and the watchdog ends the process. A process that nobody asked to tell (no NOTIFY_SOCKET)
says nothing and waits as long as it likes. Nothing here waits or fails: a datagram that cannot go out is dropped, and
the next one says everything again.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping

STATUS_S = 10.0  # the words of `systemctl status` are no older than this
WATCHDOG_SHARE = 0.5  # of the watchdog's time may pass between two signs of life, as sd_watchdog_enabled(3) has it
WORDS_MAX = 400  # of one line of status; a terminal shows less

StatusText = Callable[[], str]


class Notifier:
    """environment: of this process, as its config has read it."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = environment or {}
        self._address = _address(variables.get("NOTIFY_SOCKET", ""))
        self._every_s = min(STATUS_S, WATCHDOG_SHARE * _watchdog_s(variables))
        self._due_at = 0.0
        self._over = False

    def wait_s(self, timeout_s: float | None) -> float | None:
        """How long the loop may wait that wants to wait so long (None: for ever)."""
        if not self._address or self._over:
            return timeout_s
        left_s = max(0.0, self._due_at - time.monotonic())
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def turned(self, words: StatusText) -> None:
        """The loop has gone round; the first time, the process has started."""
        if self._address and not self._over and time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + self._every_s
            self._tell("READY=1", "WATCHDOG=1", _status(words()))

    def starting(self, words: str) -> None:
        """It takes a while, because of this."""
        self._tell(_status(words))

    def stopping(self, words: str) -> None:
        """From now on the process is only ending."""
        self._over = True
        self._tell("STOPPING=1", _status(words))

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as manager:
            manager.sendto(
                "\n".join(lines).encode(), self._address
            )  # OSError: nobody listens, or not fast enough


def _address(name: str) -> str:
    """A path or, after an @, a name in the abstract namespace. Others (vsock) are for whole machines: no address."""
    return name.replace("@", "\0", 1) if name.startswith(("/", "@")) else ""


def _watchdog_s(variables: Mapping[str, str]) -> float:
    """Infinite without a watchdog for this very process."""
    meant = variables.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    usec = variables.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if meant and usec.isdecimal() and int(usec) else float("inf")


def _status(words: str) -> str:
    return f"STATUS={' '.join(words.split())[:WORDS_MAX]}"

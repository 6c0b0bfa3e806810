"""A service manager's end of sd_notify: a real datagram socket and the messages it receives."""

import re
import socket
import time
from collections import deque
from typing import Self

from tests.support.polling import START_S

Told = dict[str, str]

DATAGRAM_BYTES_MAX = 4096  # systemd takes no more either


class ServiceManager:
    """`address`: for NOTIFY_SOCKET, a path or an abstract name (@)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._collected: deque[Told] = deque()

    def environment(self, *, watchdog_s: float = 0.0) -> dict[str, str]:
        """The environment variables of a program that shall notify this manager."""
        watchdog = {"WATCHDOG_USEC": str(round(watchdog_s * 1e6))} if watchdog_s else {}
        return {"NOTIFY_SOCKET": self.address, **watchdog}

    def told(self, timeout_s: float = 0.0) -> Told | None:
        """The next message; None if none comes."""
        return self._collected.popleft() if self._collected else self._receive(timeout_s)

    def collect(self) -> None:
        """Read the arrived messages for `told`, because the kernel keeps ten and drops those after them."""
        while (message := self._receive(0.0)) is not None:
            self._collected.append(message)

    def _receive(self, timeout_s: float) -> Told | None:
        self._socket.settimeout(timeout_s)
        try:
            lines = self._socket.recv(DATAGRAM_BYTES_MAX).decode().split("\n")
        except (TimeoutError, BlockingIOError):
            return None
        return dict(line.split("=", 1) for line in lines)

    def until(self, key: str, words: str = "", *, timeout_s: float = START_S) -> Told:
        """Read up to the first message with this key, whose value matches the pattern `words`.

        Wait only for states that last: a program does not report each moment.
        """
        deadline = time.monotonic() + timeout_s
        while (message := self.told(max(0.0, deadline - time.monotonic()))) is not None:
            if key in message and re.search(words, message[key]):
                return message
        raise AssertionError(f"{key} {words!r} was not told within {timeout_s:g} s")

    def until_silent(self, silence_s: float, *, messages_max: int) -> None:
        """Read until nothing comes for `silence_s`. A program that hangs has at most `messages_max`
        under way.

        Messages are counted, not seconds: a busy machine delays messages, but does not add any.
        """
        for _ in range(messages_max + 1):
            if self.told(silence_s) is None:
                return
        raise AssertionError(f"it still speaks after {messages_max} messages")

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

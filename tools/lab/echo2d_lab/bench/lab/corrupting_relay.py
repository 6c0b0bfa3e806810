"""`echo2d join` that corrupts frames after a SIGUSR2: `python -m ...corrupting_relay SHARE join ...`

An enemy for measurements: it has a valid credential and keeps the protocol, but SHARE of the frames that it passes on
have a wrong bit.
"""

import runpy
import signal
import sys
from collections.abc import Callable

from echo2d.net.peer.links import PeerLinks

SendFrameCall = Callable[..., bool]


class CorruptingRelay:
    """Corrupts `share` of the payloads, at equal distances, once it is awake."""

    def __init__(self, share: float, send_frame: SendFrameCall) -> None:
        self._every, self._send_frame = round(1 / share), send_frame
        self._awake = False
        self._sent = 0

    def wake(self, *_: object) -> None:
        """Begin to corrupt payloads; a signal handler."""
        self._awake = True

    def spoilt(self, payload: memoryview | None) -> memoryview | None:
        """The payload, or a copy whose last bit is wrong."""
        if payload is None or not self._awake:
            return payload
        self._sent += 1
        if self._sent % self._every:
            return payload
        changed = bytearray(payload)
        changed[-1] ^= 1
        return memoryview(changed)

    def install(self) -> None:
        """Corrupt the payloads of all links of this process."""
        enemy, honest = self, self._send_frame

        def send_frame(links: PeerLinks, *about: object) -> bool:
            *others, payload = about
            assert payload is None or isinstance(payload, memoryview)
            return honest(links, *others, enemy.spoilt(payload))

        PeerLinks.send_frame = send_frame  # type: ignore[assignment, method-assign]
        signal.signal(signal.SIGUSR2, self.wake)


if __name__ == "__main__":
    CorruptingRelay(float(sys.argv.pop(1)), PeerLinks.send_frame).install()
    runpy.run_module("echo2d", run_name="__main__")

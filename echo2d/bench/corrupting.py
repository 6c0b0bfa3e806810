"""`python -m echo2d.bench.corrupting SHARE join ...`: `echo2d join`, but a share of the frames it passes on is spoilt.

An enemy for measurements: it holds a valid credential and keeps the protocol, only a bit is wrong here and there.
"""

import sys

from echo2d.cli import main as run_cli
from echo2d.core.ids import FrameId, PeerId
from echo2d.core.link_messages import StreamId
from echo2d.net.peers import PeerLinks


def corrupt(share: float) -> None:
    """From now on this process's links spoil every so many-th payload."""
    every = round(1 / share)
    sent = 0
    honest = PeerLinks.send_frame

    def send_frame(
        self: PeerLinks, peer: PeerId, stream: StreamId, frame: FrameId, sequence: int, payload: memoryview | None
    ) -> bool:
        nonlocal sent
        sent += payload is not None
        if payload is not None and sent % every == 0:
            spoilt = bytearray(payload)
            spoilt[-1] ^= 1
            payload = memoryview(spoilt)
        return honest(self, peer, stream, frame, sequence, payload)

    PeerLinks.send_frame = send_frame  # type: ignore[method-assign]


if __name__ == "__main__":
    corrupt(float(sys.argv.pop(1)))
    run_cli()

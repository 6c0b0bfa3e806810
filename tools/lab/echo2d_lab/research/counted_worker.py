"""`python -m echo2d_lab.research.counted_worker FILE join ...`: `echo2d join`, which notes what it receives.

Each frame with a payload, over whichever link, becomes a line of FILE: its form, and its bytes. A
worker that is started again adds to the file.
"""

import runpy
import sys
from io import TextIOWrapper
from pathlib import Path

from echo2d.core.protocol.peer_messages import FrameReceived, StreamEnded
from echo2d.runtime.peer.receive_queue import ReceiveQueue


def count_into(file: TextIOWrapper) -> None:
    """From now on, for all links of this process."""
    put = ReceiveQueue.put

    def noted(queue: ReceiveQueue, event: FrameReceived | StreamEnded, *, now: float) -> None:
        if isinstance(event, FrameReceived) and event.payload is not None:
            file.write(f"{event.form} {event.payload.nbytes}\n")
        put(queue, event, now=now)

    ReceiveQueue.put = noted  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    # Line by line, because workers are killed.
    with Path(sys.argv.pop(1)).open("a", buffering=1, encoding="utf-8") as received:
        count_into(received)
        runpy.run_module("echo2d", run_name="__main__")

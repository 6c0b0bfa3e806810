"""`python -m echo2d_lab.research.counted_worker FILE join ...`: `echo2d join` that records what it receives.

Each frame with a payload, over any link, becomes a line of FILE: its form, and its bytes. A restarted
worker appends to the file.
"""

import runpy
import sys
from io import TextIOWrapper
from pathlib import Path

from echo2d.core.protocol.peer_messages import FrameReceived, StreamEnded
from echo2d.runtime.peer.receive_queue import ReceiveQueue


def count_into(file: TextIOWrapper) -> None:
    """Record the frames of all links of this process from now on."""
    put = ReceiveQueue.put

    def noted(queue: ReceiveQueue, event: FrameReceived | StreamEnded, *, now: float) -> None:
        if isinstance(event, FrameReceived) and event.payload is not None:
            file.write(f"{event.form} {event.payload.nbytes}\n")
        put(queue, event, now=now)

    ReceiveQueue.put = noted  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    # The file is written line by line, because workers are killed.
    with Path(sys.argv.pop(1)).open("a", buffering=1, encoding="utf-8") as received:
        count_into(received)
        runpy.run_module("echo2d", run_name="__main__")

"""Stands in for the seed's program: tells what it was handed through a pipe in the run directory, ends or waits."""

import json
import signal
import sys
from pathlib import Path

from echo2d.runtime.seed.supervisor import SeedHandover

if __name__ == "__main__":
    handover = SeedHandover.receive(sys.stdin.buffer)
    run_dir = Path(handover.run_dir)
    stays = (
        run_dir / "stay"
    ).exists()  # before it tells: whoever is not heard ends, and another one tells
    with (run_dir / "seen").open("a") as file:
        file.write(json.dumps({"argv": sys.argv, "peer": handover.identity().peer}) + "\n")
    if stays:
        signal.pause()
    sys.exit(3)

"""A stand-in for the seed's program: it writes what it got by the pipe into the run directory, and ends or waits."""

import json
import signal
import sys
from pathlib import Path

from echo2d.runtime.seed.supervisor import SeedHandover

if __name__ == "__main__":
    handover = SeedHandover.receive(sys.stdin.buffer)
    run_dir = Path(handover.run_dir)
    # Looked up before the report: if a test makes the file after a report, it is the next process that stays.
    stays = (run_dir / "stay").exists()
    with (run_dir / "seen").open("a") as file:
        file.write(json.dumps({"argv": sys.argv, "peer": handover.identity().peer}) + "\n")
    if stays:
        signal.pause()
    sys.exit(3)

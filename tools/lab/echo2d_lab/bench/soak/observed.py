"""Runs an echo2d command as usual; when asked, it counts what its process holds.

python -m echo2d_lab.bench.soak.observed PATH coordinate --config run.toml
"""

import runpy
import sys
from pathlib import Path

from echo2d_lab.bench.soak.counts import CountQuestion

if __name__ == "__main__":
    CountQuestion(Path(sys.argv.pop(1))).answer_in_a_thread()
    runpy.run_module("echo2d", run_name="__main__")

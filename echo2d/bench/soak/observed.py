"""Runs an echo2d command as usual, and counts what its process holds when it is asked.

python -m echo2d.bench.soak.observed PATH coordinate --config run.toml
"""

import sys
from pathlib import Path

from echo2d.bench.soak.counts import Question
from echo2d.cli import main

if __name__ == "__main__":
    Question(Path(sys.argv.pop(1))).answer_in_a_thread()
    main()

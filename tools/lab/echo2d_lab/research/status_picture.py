"""Draws a picture of `echo2d status` for the docs, from a status on stdin; the page on operating names the run.

echo2d status --run-dir RUN_DIR --json | python -m echo2d_lab.research.status_picture docs/figures/status.svg
"""

import argparse
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from echo2d.core.status.json_form import read_status
from echo2d.views.status import status_picture

COLUMNS = 112  # of the terminal


def svg(facts: dict[str, Any]) -> str:
    """The picture. The same facts give the same picture, because rich names its styles after a hash of the content."""
    console = Console(
        record=True, width=COLUMNS, highlight=False, force_terminal=True, file=io.StringIO()
    )
    console.print(status_picture(read_status(facts)))
    drawn = console.export_svg(title="echo2d status --watch", unique_id="status")
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(svg(json.load(sys.stdin)))


if __name__ == "__main__":
    main()

"""Rent "boxes" that are processes on this machine, to see renting work without a cloud.

A pattern for a provider of kind "exec" of your own:

    [[provider]]
    name = "here"
    kind = "exec"
    start = ["python", "examples/local_boxes.py", "start"]
    stop = ["python", "examples/local_boxes.py", "stop"]
    list = ["python", "examples/local_boxes.py", "list"]

A box is a folder in $BOXES_DIR (by default boxes/). It is named by its label and holds the pid and
the log of its `echo2d join`. As on a real box, `timeout` ends the worker when its time is over,
even if nobody stops it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

BOXES = Path(os.environ.get("BOXES_DIR", "boxes")).resolve()
FLAGS = os.environ.get("BOXES_FLAGS", "--engine=fake").split()


def start() -> None:
    label, box = os.environ["ECHO2D_LABEL"], BOXES / os.environ["ECHO2D_LABEL"]
    box.mkdir(parents=True, mode=0o700)
    token = shutil.copy(os.environ["ECHO2D_TOKEN_FILE"], box / "join.token")
    join = [
        *(
            sys.executable,
            "-m",
            "echo2d",
            "join",
            os.environ["ECHO2D_COORDINATOR_URL"],
            f"--token-file={token}",
        ),
        *(f"--state-dir={box / 'state'}", f"--name={label}", *FLAGS),
    ]
    with (box / "log").open("wb") as log:
        process = subprocess.Popen(
            ["timeout", os.environ["ECHO2D_LIFE_S"], *join],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (box / "pid").write_text(str(process.pid))


def stop() -> None:
    """End the box and delete its folder. A box that does not exist is no error."""
    box = BOXES / os.environ["ECHO2D_LABEL"]
    if (box / "pid").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int((box / "pid").read_text()), signal.SIGKILL)
    shutil.rmtree(box, ignore_errors=True)


def runs(box: Path) -> bool:
    try:
        stat = Path(f"/proc/{(box / 'pid').read_text()}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def show() -> None:
    for box in sorted(BOXES.glob("echo2d-*")):
        if runs(box):
            print(json.dumps({"label": box.name, "id": (box / "pid").read_text()}))


if __name__ == "__main__":
    {"start": start, "stop": stop, "list": show}[sys.argv[1]]()

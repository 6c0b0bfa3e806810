"""The recipes of examples/boxes are whole programs and documents. No cloud gets a request."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO

BOXES = REPO / "examples" / "boxes"
SCRIPTS = sorted(BOXES.glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_valid_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which("shellcheck")
    if shellcheck is not None:
        done = subprocess.run(
            [shellcheck, str(script)], capture_output=True, text=True, check=False
        )
        assert done.stdout == ""
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("usage: ")) == (2, True)


def test_the_recipe_for_vast_passes_the_script_as_a_file(tmp_path: Path) -> None:
    """A program in the place of `vastai` shows the words that it is given."""
    stand_in = tmp_path / "vastai"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    done = subprocess.run(
        ["bash", str(BOXES / "vast.sh"), "123", "dir/box-1.sh"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split()
    assert words[:3] == ["create", "instance", "123"]
    assert words[words.index("--label") + 1] == "box-1"
    assert words[words.index("--onstart") + 1] == "dir/box-1.sh"


def test_the_recipe_for_runpod_passes_the_script_as_a_variable(tmp_path: Path) -> None:
    """A module in the place of `runpod`; the container's command then runs the script."""
    (tmp_path / "runpod.py").write_text(
        "import subprocess\n"
        "def create_pod(*, env, docker_args, **more):\n"
        "    assert more['name'] == 'box-1' and more['gpu_type_id'] == 'GPU'\n"
        "    return {'id': subprocess.run(docker_args, shell=True, env=env, text=True,"
        " capture_output=True, check=True).stdout}\n"
    )
    (tmp_path / "box-1.sh").write_text("echo joined\n")
    done = subprocess.run(
        ["bash", str(BOXES / "runpod.sh"), "GPU", str(tmp_path / "box-1.sh")],
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(tmp_path),
            "RUNPOD_API_KEY": "x",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "joined"


def test_the_task_of_skypilot_runs_the_script_that_it_is_given() -> None:
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((BOXES / "skypilot.yaml").read_text())
    assert task.keys() == {"name", "resources", "envs", "run"}
    assert "$ECHO2D_BOX" in task["run"]
    assert task["envs"] == {"ECHO2D_BOX": ""}

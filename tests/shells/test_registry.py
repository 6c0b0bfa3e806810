"""Every name that an operator can choose exists, and every place that shows the names shows all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.registry import ENGINES, PROVIDERS, SHAPES, TASKS, load, one_of

FACTORIES = [kind.factory for kind in PROVIDERS.values()]
ENTRIES = [*ENGINES.values(), *FACTORIES, *SHAPES.values(), *TASKS.values()]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_of_the_registry_can_be_loaded(entry: str) -> None:
    assert callable(load(entry))


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (("bench", "broadcast"), SHAPES),
        (("bench", "coordinator"), SHAPES),
        (("join",), ENGINES),
    ],
)
def test_the_help_lists_the_names(command: tuple[str, ...], names: dict[str, object]) -> None:
    shown = CliRunner().invoke(main, [*command, "--help"]).output
    assert f"[{'|'.join(names)}]" in shown


def test_names_are_joined_into_a_sentence() -> None:
    assert one_of({"a": 1}) == '"a"'
    assert one_of({"a": 1, "b": 2, "c": 3}) == '"a", "b" or "c"'


def test_an_entry_point_adds_a_name_and_replaces_none(tmp_path: Path) -> None:
    """A distribution of a stranger, as pip leaves it beside echo2d."""
    about = tmp_path / "parrot-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot\nVersion: 1.0\n")
    points = "[echo2d.engines]\nparrot = parrot:make\ntorch = parrot:make\n"
    (about / "entry_points.txt").write_text(points)
    (tmp_path / "parrot.py").write_text("def make(options):\n    return []\n")
    program = "from echo2d.registry import ENGINES, load; print(ENGINES['torch'], load(ENGINES['parrot']))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.startswith(f"{ENGINES['torch']} <function make at ")

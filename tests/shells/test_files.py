"""`echo2d files` finds and copies the files that the documents use."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.cli.files import SHARE
from tests.support.paths import REPO


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["files", *arguments])
    return result.exit_code, result.output


def test_every_folder_that_a_page_copies_from_exists() -> None:
    for folder in ("examples", "grafana", "scenarios", "systemd"):
        if (REPO / folder).is_dir():
            assert (SHARE / folder).resolve() == (REPO / folder).resolve()


def test_a_folder_is_copied_once_and_never_over_a_file_that_differs(tmp_path: Path) -> None:
    code, said = run("systemd", "--to", str(tmp_path))
    target = tmp_path / "systemd" / "run.toml"
    assert (code, str(target) in said.splitlines()) == (0, True)
    assert target.read_bytes() == (REPO / "systemd" / "run.toml").read_bytes()
    assert run("systemd", "--to", str(tmp_path))[0] == 0, "they are there already"
    target.write_text("mine")
    code, said = run("systemd/run.toml", "--to", str(tmp_path))
    assert (code, target.read_text()) == (2, "mine")
    assert said == f"echo2d: {target} exists already and differs; choose another --to\n"


def test_the_files_are_listed_with_their_paths() -> None:
    assert run("systemd") == (0, f"{SHARE / 'systemd'}\n")
    code, said = run()
    assert code == 0
    assert f"systemd/run.toml  {SHARE / 'systemd' / 'run.toml'}" in said.splitlines()


@pytest.mark.parametrize("name", ["", "..", "../core", "/etc", "systemd/none", "nothing"])
def test_a_wrong_name_gives_one_line(name: str) -> None:
    code, said = run(name)
    assert code == 2
    assert said.startswith(f"echo2d: no file or folder is called {name!r}; found: examples, ")


def test_the_copy_command_needs_a_name(tmp_path: Path) -> None:
    code, said = run("--to", str(tmp_path))
    assert code == 2
    assert said.startswith("echo2d: --to: say which files to copy: examples, ")

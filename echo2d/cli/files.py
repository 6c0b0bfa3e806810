"""The command `echo2d files`: the units, examples and scenarios that came with this installation."""

import filecmp
import shutil
from pathlib import Path

import click

from echo2d.cli.parts import DIRECTORY
from echo2d.errors import OperatorFault, path_fault

SHARE = Path(__file__).parents[1] / "share"


@click.command()
@click.argument("name", required=False)
@click.option("--to", type=DIRECTORY, help="Copy NAME into this directory, under the same name.")
def files(name: str | None, to: Path | None) -> None:
    """Find or copy the files that the documents use: systemd units, examples, scenarios, boards.

    NAME is a folder or a file in one, such as `systemd` or `systemd/run.toml`; without NAME the
    command lists all files. `echo2d files systemd --to .` makes a folder `systemd` here.
    """
    if name is None:
        if to is not None:
            raise OperatorFault(f"--to: say which files to copy: {', '.join(_folders())}")
        for folder in _folders():
            for each in _files_in(SHARE / folder):
                click.echo(f"{each.relative_to(SHARE)}  {each}")
        return
    source = _found(name)
    if to is None:
        click.echo(source)
        return
    for each in _files_in(source):
        click.echo(_copied(each, to / each.relative_to(SHARE)))


def _folders() -> list[str]:
    if not SHARE.is_dir():
        raise OperatorFault("this installation came from a coordinator and has no such files")
    return sorted(each.name for each in SHARE.iterdir() if each.is_dir())


def _found(name: str) -> Path:
    """OperatorFault: no file or folder has this name."""
    wanted = Path(name)
    source = SHARE / wanted
    if wanted.is_absolute() or ".." in wanted.parts or not wanted.parts or not source.exists():
        raise OperatorFault(f"no file or folder is called {name!r}; found: {', '.join(_folders())}")
    return source


def _files_in(source: Path) -> list[Path]:
    """The file itself, or every file of the folder, sorted."""
    if source.is_file():
        return [source]
    found: list[Path] = []
    for each in sorted(source.iterdir()):
        if each.name != "__pycache__":
            found += _files_in(each)
    return found


def _copied(source: Path, target: Path) -> Path:
    """Copy the file, unless the target has the same content. OperatorFault: the target has another content."""
    try:
        if target.exists():
            if target.is_file() and filecmp.cmp(source, target, shallow=False):
                return target
            raise OperatorFault(f"{target} exists already and differs; choose another --to")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    except OSError as error:
        raise path_fault(f"--to: cannot write {target}", error) from error
    return target

"""Says how to install the packages of an extra of echo2d into the environment of this process.

Messages name the packages themselves and not `echo2d[extra]`, because echo2d is on no package index.
"""

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from pathlib import Path

from echo2d.errors import OperatorFault

PICTURES = (".png", ".svg", ".pdf")


def install_command(extra: str) -> str:
    """The shell command. extra: an extra of pyproject.toml. The extra of an engine has the engine's name."""
    return shlex.join([*_installer(), *_requirements(extra)])


def check_plot(path: Path) -> None:
    """OperatorFault: no picture can be written to this file, which is the value of --plot."""
    if path.suffix not in PICTURES:
        raise OperatorFault(f"--plot {path}: expected a name that ends in {', '.join(PICTURES)}")
    if not path.absolute().parent.is_dir():
        raise OperatorFault(f"--plot {path}: there is no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise OperatorFault(f"--plot needs matplotlib: {install_command('plot')}")


def _installer() -> list[str]:
    if (Path(sys.prefix) / "pipx_metadata.json").exists():
        return ["pipx", "inject", Path(sys.prefix).name]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    # An environment that uv has made has no pip.
    return ["uv", "pip", "install", "--python", sys.executable]


def _requirements(extra: str) -> list[str]:
    try:
        lines = importlib.metadata.requires("echo2d") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    marked = re.compile(rf"""([^;]+?)\s*;.*\bextra == ["']{re.escape(extra)}["']""")
    found = [match[1] for line in lines if (match := marked.fullmatch(line))]
    # A checkout on PYTHONPATH was never installed, or was installed before it had this extra.
    return found or [f"{Path(__file__).parents[1]}[{extra}]"]

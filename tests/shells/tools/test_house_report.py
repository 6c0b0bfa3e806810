"""The report on the source tree counts what its head says, on a small tree that is written here."""

from pathlib import Path

import pytest

from tools.house_report import read_modules, report

FILES = {
    "echo2d/__init__.py": "",
    "echo2d/errors.py": '"""Errors."""\n\n\nclass Fault(Exception):\n    pass\n',
    "echo2d/core/first.py": (
        '"""First."""\n\nfrom echo2d.core import second  # a trailing comment\n\n'
        "# A comment on its own line.\nLIMIT = 3\n_HIDDEN = 4\n\n\n"
        'def use() -> int:\n    """Use it."""\n    return second.LIMIT\n'
    ),
    "echo2d/core/second.py": "from echo2d.errors import Fault\n\nLIMIT = 4\n\n\nclass Fault:\n    pass\n",
    "learner/loop.py": f"NAME = '{'x' * 100}'\n\n\ndef loop() -> None: ...\n",
    "tests/shells/test_first.py": "def test() -> None: ...\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_every_row_of_a_small_tree(checkout: Path) -> None:
    assert report(read_modules(checkout)) == {
        "modules: echo2d": 3,
        "modules: learner": 1,
        "modules: tools": 0,
        "modules: tests": 1,
        "lines: echo2d": 5 + 12 + 7,
        "lines: learner": 4,
        "lines: tools": 0,
        "lines: tests": 1,
        "largest flat folder: modules": 2,
        "largest flat folder: path": "echo2d/core",
        "longest import chain: echo2d.core": 2,
        "modules in import cycles: echo2d.core": 0,
        "longest import chain: echo2d": 3,
        "modules in import cycles: echo2d": 0,
        "public names at top level": 7,
        "public class names defined twice or more": 1,
        "own-line comments": 1,
        "own-line comments per 100 code lines": round(100 / 13, 2),
        "lines over 100 columns": 1,
        "functions": 2,
        "function lines: median": 2,
        "function lines: 90th percentile": 3,
        "function lines: longest": 3,
        "test lines per code line": round(1 / 28, 2),
    }


def test_an_import_cycle_is_found_and_counts_once_in_a_chain(checkout: Path) -> None:
    second = checkout / "echo2d/core/second.py"
    second.write_text("import echo2d.core.first\n" + second.read_text())
    figures = report(read_modules(checkout))
    assert figures["modules in import cycles: echo2d"] == 2
    assert figures["longest import chain: echo2d"] == 2

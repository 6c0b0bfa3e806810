"""The report on the source tree counts by the rules in its head, on a small tree that the test writes."""

from pathlib import Path

import pytest

from echo2d.cli import main
from tools.house_report import fragments, offered, read_modules, report

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


def test_the_report_has_every_row_of_a_small_tree(checkout: Path) -> None:
    assert report(read_modules(checkout)) == {
        "modules: echo2d": 3,
        "modules: learner": 1,
        "modules: tools": 0,
        "modules: tests": 1,
        "lines: echo2d": 5 + 12 + 7,
        "lines: learner": 4,
        "lines: tools": 0,
        "lines: tests": 1,
        "code lines: echo2d": 2 + 5 + 4,
        "code lines: learner": 2,
        "commands": 0,
        "options": 0,
        "keys": 0,
        "keys: of simulations": 0,
        "constants": 4,
        "modules of at most 75 lines with one importer or none": 4,
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


def test_commands_options_keys_and_constants_are_counted_as_they_are_written(
    checkout: Path,
) -> None:
    (checkout / "echo2d/cli.py").write_text(
        "import click\n\nshared = click.option('--json')\nTYPED: int = 3\n\n\n"
        "@click.group()\ndef main() -> None: ...\n\n\n"
        "@main.command('a')\n@click.option('--x')\n@shared\ndef a() -> None: ...\n\n\n"
        "@click.command()\n@click.option('--y')\ndef b() -> None: ...\n"
    )
    (checkout / "echo2d/sim").mkdir()
    (checkout / "echo2d/sim/fleet.py").write_text(
        "class Table:\n    hours: int = key('hours', 1)\n    NAME = key\n"
    )
    found = report(read_modules(checkout))
    names = ("commands", "options", "keys", "keys: of simulations", "constants")
    assert [found[name] for name in names] == [2, 2, 1, 1, 4]


def test_a_fragment_is_a_small_module_that_only_one_importer_finds(
    checkout: Path,
) -> None:
    def found() -> list[str]:
        product = [each for each in read_modules(checkout) if each.area in ("echo2d", "learner")]
        return [each.imported_as for each in fragments(product)]

    four = ["echo2d.core.first", "echo2d.core.second", "echo2d.errors", "echo2d.learner.loop"]
    assert found() == four
    (checkout / "learner/__main__.py").write_text("from echo2d.learner.loop import loop\n")
    assert found() == four, "one program starts the loop"
    (checkout / "learner/main.py").write_text(
        "def main() -> None:\n    import echo2d.learner.loop\n"
    )
    assert found() == four[:3], "another one imports it, too"
    (checkout / "echo2d/core/second.py").write_text("\n" * 74 + "LIMIT = 4\n")
    assert found() == four[:3]
    (checkout / "echo2d/core/second.py").write_text("\n" * 75 + "LIMIT = 4\n")
    assert found() == ["echo2d.core.first", "echo2d.errors"], "it is larger"
    (checkout / "echo2d/registry.py").write_text(
        "X = 'echo2d.core.first:use'\n" + "\n" * 75 + "Y = 1\n"
    )
    assert found() == ["echo2d.errors"], "the registry names the first"


def test_click_offers_the_counted_options(capsys: pytest.CaptureFixture[str]) -> None:
    """The options of one command are also counted in its help."""
    join = main.commands["join"]
    join.main(["--help"], standalone_mode=False)
    shown = {line.split()[0] for line in capsys.readouterr().out.splitlines() if "  --" in line}
    assert offered(join) == {
        "commands: offered by click": 1,
        "options: offered by click": len(shown - {"--help"}),
    }


def test_an_import_cycle_is_found_and_counts_once_in_a_chain(checkout: Path) -> None:
    second = checkout / "echo2d/core/second.py"
    second.write_text("import echo2d.core.first\n" + second.read_text())
    figures = report(read_modules(checkout))
    assert figures["modules in import cycles: echo2d"] == 2
    assert figures["longest import chain: echo2d"] == 2

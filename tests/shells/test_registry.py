"""What an operator can choose by name exists, and every place that shows the names shows all of them."""

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.registry import ENGINES, PROVIDERS, SHAPES, TASKS, load, one_of

FACTORIES = [kind.factory for kind in PROVIDERS.values()]
ENTRIES = [*ENGINES.values(), *FACTORIES, *SHAPES.values(), *TASKS.values()]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_can_be_loaded(entry: str) -> None:
    assert callable(load(entry))


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (("bench", "broadcast"), SHAPES),
        (("bench", "coordinator"), SHAPES),
        (("join",), ENGINES),
    ],
)
def test_help_lists_the_names(command: tuple[str, ...], names: dict[str, object]) -> None:
    shown = CliRunner().invoke(main, [*command, "--help"]).output
    assert f"[{'|'.join(names)}]" in shown


def test_names_in_a_sentence() -> None:
    assert one_of({"a": 1}) == '"a"'
    assert one_of({"a": 1, "b": 2, "c": 3}) == '"a", "b" or "c"'

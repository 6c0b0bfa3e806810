"""The number of things that a newcomer must learn has limits: a change that adds something removes something.

The figures and the rules of counting are those of `tools/house_report.py`. The seconds of the suites are limited where
they are measured.
"""

from pathlib import Path

from echo2d.cli import main
from tests.support.paths import REPO
from tools.house_report import Module, offered, read_modules, surface

# A commit that raises a limit does nothing else, and says why.
BUDGET = {
    "code lines: echo2d": 65_820,
    "code lines: learner": 8_570,
    "commands": 30,
    "commands: offered by click": 30,
    "options": 98,
    "options: offered by click": 184,
    "keys": 270,
    "keys: of simulations": 42,
    "constants": 1_281,
    "modules of at most 75 lines with one importer or none": 17,
}
TO_DO = "Remove something, or raise the limit in a commit of its own that says why"


def over_budget(figures: dict[str, int]) -> list[str]:
    """A line for each figure above its limit. KeyError: a limit without its figure."""
    return [
        f"{what}: expected at most {limit:,}; found {figures[what]:,}. {TO_DO}"
        for what, limit in BUDGET.items()
        if figures[what] > limit
    ]


def wheel() -> list[Module]:
    return [module for module in read_modules(REPO) if module.area in ("echo2d", "learner")]


def test_the_wheel_keeps_its_budget() -> None:
    assert over_budget(surface(wheel()) | offered(main)) == []


def test_a_planted_breach_names_its_figure_and_its_limit() -> None:
    most = BUDGET["constants"]
    planted = "".join(f"PLANTED_{n} = {n}\n" for n in range(most + 1))
    found = surface([Module.parse(Path("echo2d/planted.py"), planted)])
    assert over_budget({**dict.fromkeys(BUDGET, 0), **found}) == [
        f"constants: expected at most {most:,}; found {most + 1:,}. {TO_DO}"
    ]

"""Draws what versions scored on held-out questions: a table, with a bar for each score."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from echo2d.client import AsyncCoordinator, Evaluation
from echo2d.views.status import bar, plain_console, scored_words

_ANSWER_S = 10.0
BAR_CHARS = 20
PARTS_SHOWN = 6  # of a reward; --json has all of them


async def ask_evaluations(find: Callable[[], tuple[str, Path]]) -> list[Evaluation]:
    """All evaluations of a run. OperatorFault: no coordinator answers, or it refuses the token."""
    url, token_file = find()
    async with AsyncCoordinator(url, token_file=token_file, timeout_s=_ANSWER_S) as client:
        return await client.evaluations()


def print_evaluations(found: Sequence[Evaluation]) -> None:
    console = plain_console()
    if not found:
        console.print("no version is evaluated yet")
    for name in dict.fromkeys(each.name for each in found):
        console.print(_table(name, [each for each in found if each.name == name]))


def _table(name: str, found: Sequence[Evaluation]) -> Table:
    best = max((each.mean for each in found if each.mean is not None), default=0.0)
    most = max(found, key=lambda each: each.samples)
    ks, parts = [k for k in most.pass_at if k != "1"], list(most.parts)[:PARTS_SHOWN]
    table = Table(title=name, title_justify="left", title_style="bold", box=None, pad_edge=False)
    of_both = [*(f"pass@{k}" for k in ks), *parts]
    for head in ("version", "score", "", *of_both, "cut off", "tokens", "questions"):
        table.add_column(head, justify="left" if not head else "right")
    for each in found:
        mean = each.mean or 0.0
        table.add_row(
            str(each.version),
            scored_words(each.mean, each.se),
            bar(max(0.0, mean), max(best, 1.0), BAR_CHARS),
            *(_number(each.pass_at.get(k), ".3f") for k in ks),
            *(_number(each.parts.get(name), ".3f") for name in parts),
            _number(each.truncated, ".1%"),
            _number(each.tokens, ".0f"),
            str(each.rows) if each.rows == each.of else f"{each.rows} of {each.of}",
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

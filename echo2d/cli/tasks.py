"""`echo2d tasks`: the kinds of tasks and the scorers, with their options."""

import inspect
import json
from typing import Any

import click

from echo2d.cli.parts import json_option
from echo2d.registry import SCORERS, TASKS, load


@click.command("tasks")
@json_option("Print one JSON object.")
def tasks(*, as_json: bool) -> None:
    """List the kinds of tasks and the scorers that a config can name, with their options."""
    kinds = {name: _about(load(entry)) for name, entry in TASKS.items()}
    scorers = {name: _about(load(entry)) for name, entry in SCORERS.items()}
    if as_json:
        click.echo(json.dumps({"tasks": kinds, "scorers": scorers}))
        return
    for title, found in (("task.kind", kinds), ("scorer", scorers)):
        for name, facts in found.items():
            click.echo(f'\n{title} = "{name}"\n')
            click.echo("\n".join(f"    {line}".rstrip() for line in facts["about"].splitlines()))
            for option, default in facts["options"].items():
                click.echo(f"      {option}" + ("" if default is None else f" = {default}"))


def _about(made_by: Any) -> dict[str, Any]:
    """What its docstring says, and its options with their defaults; null: it is required."""
    options = {
        name: None if each.default is inspect.Parameter.empty else json.dumps(each.default)
        for name, each in inspect.signature(made_by).parameters.items()
    }
    return {"about": inspect.getdoc(made_by) or "", "options": options}

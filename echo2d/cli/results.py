"""`echo2d export`: takes a trained version out of the run directory."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from echo2d.cli.parts import DIRECTORY, json_option, progress_bar, run_dir_option
from echo2d.errors import OperatorFault

if TYPE_CHECKING:
    from echo2d.runtime.run_dir.results import Result


@click.command()
@click.argument("directory", metavar="[DIR]", type=DIRECTORY, required=False)
@run_dir_option
@click.option("--version", type=click.IntRange(0), help="This version.")
@click.option("--best", metavar="EVAL", help="The version with the best score in this [[eval]].")
@click.option("--last", is_flag=True, help="The last version.")
@json_option("Print JSON: the exported version, or each that is there.")
def export(
    directory: Path | None,
    run_dir: Path,
    *,
    version: int | None,
    best: str | None,
    last: bool,
    as_json: bool,
) -> None:
    """Copy a trained version to DIR, which transformers and SGLang load.

    Without DIR, list the versions that are there. It works with and without a running coordinator,
    and needs no torch. Every copied byte is verified. For a LoRA run DIR is an adapter in PEFT's
    format; `echo2d learn --export` can merge it into the base model.
    """
    from echo2d.runtime.run_dir import results

    found = results.find_results(run_dir)
    chosen = [version is not None, best is not None, last]
    if directory is None:
        if any(chosen):
            raise OperatorFault("export: name the directory to write, as in `echo2d export DIR`")
        _list(found, as_json=as_json)
        return
    if sum(chosen) != 1:
        raise OperatorFault("export: expected one of --version N, --best EVAL and --last")
    result = results.choose(found, version=version, best=best)
    with progress_bar(f"exporting version {result.version}", size=result.size) as tell:
        results.export(run_dir, result, directory, tell)
    if as_json:
        click.echo(json.dumps({**result.as_dict(), "directory": str(directory)}))
        return
    what = "adapter" if result.is_adapter else "model"
    click.echo(f"version {result.version} is in {directory}: {what}, {_size(result.size)}")
    click.echo(_how_to_load(result, directory))


def _list(found: "list[Result]", *, as_json: bool) -> None:
    if as_json:
        for each in found:
            click.echo(json.dumps(each.as_dict()))
        return
    from rich.table import Table

    from echo2d.views.status import plain_console, scored_words

    names = list(dict.fromkeys(name for each in found for name in each.scores))
    table = Table(box=None, pad_edge=False)
    for head in ("version", "size", *names, ""):
        table.add_column(head, justify="right" if head else "left")
    for each in found:
        scores = (each.scores.get(name) for name in names)
        words = [f"best {name}" for name in sorted(each.best)]
        table.add_row(
            str(each.version),
            _size(each.size),
            *("-" if score is None else scored_words(score.mean, score.se) for score in scores),
            ", ".join([*words, *(["last"] if each is found[-1] else [])]),
        )
    plain_console().print(table if found else "no version is published yet")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def _how_to_load(result: "Result", directory: Path) -> str:
    if result.is_adapter:
        return f"load it with peft: PeftModel.from_pretrained(BASE, {str(directory)!r})"
    return (
        f"load it with transformers: AutoModelForCausalLM.from_pretrained({str(directory)!r}); "
        f"or serve it: python -m sglang.launch_server --model-path {directory}"
    )

"""`echo2d envs`: plays episodes of another package's environment for a run."""

import json
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import FILE, json_option, log_options, serve


class JsonObject(click.ParamType[dict[str, Any]]):
    """An object, written as JSON."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"not JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail("expected a JSON object", param, ctx)
        return found


@click.command()
@click.argument("environment")
@click.option("--gateway", metavar="URL", required=True, help="URL of the run's coordinator.")
@click.option("--secret", type=FILE, required=True, help="Token file with the role agent.")
@click.option(
    "--tokenizer",
    metavar="MODEL",
    required=True,
    help="Model with the policy's tokenizer and chat format: a directory, or a name on the Hub.",
)
@click.option(
    "--renderer",
    type=JsonObject(),
    help='Renderer of the chat format, such as {"name": "qwen3"}; by default, the model\'s own.',
)
@click.option("--task", metavar="NAME", help="Play episodes of this [[task]] only.")
@click.option(
    "--episodes-at-once",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    help="Episodes that are played at the same time.",
)
@click.option(
    "--env-args",
    type=JsonObject(),
    default="{}",
    help="Arguments of the environment: its [env] table, or those of its function.",
)
@json_option("Print the progress as JSON objects, one per line.")
@log_options
def envs(
    environment: str,
    *,
    gateway: str,
    secret: Path,
    tokenizer: str,
    renderer: dict[str, Any] | None,
    task: str | None,
    episodes_at_once: int,
    env_args: dict[str, Any],
    as_json: bool,
    log_level: str,
    log_json: bool,
    log_file: Path | None,
) -> None:
    """Play episodes of a `verifiers` environment for a run.

    ENVIRONMENT is the name of an installed environment, or the MODULE:FUNCTION that makes one. The
    command needs the extra `verifiers`, in a Python environment of its own. The run's config must
    have a [[task]] of kind "agents".
    """
    from echo2d.runtime.envs.main import EnvsOptions, run_envs
    from echo2d.runtime.envs.playing import PlayedTotals

    options = EnvsOptions(
        environment, gateway, secret, tokenizer, task, episodes_at_once, env_args, renderer
    )

    def show(totals: PlayedTotals) -> None:
        click.echo(json.dumps(totals.fields()) if as_json else totals.line())

    serve(lambda: run_envs(options, show), log_level, log_json=log_json, log_file=log_file)

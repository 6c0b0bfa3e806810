"""The `echo2d` command: parses arguments, builds the config and starts the program.

Heavy imports happen inside the commands, so that --help is fast. Exit codes: 0 done, 1 failed while
running, 2 the operator's mistake (one clear line, no traceback).
"""

import difflib
from collections.abc import Iterator
from typing import Any

import click

from echo2d import __version__
from echo2d.cli.daemons import coordinate, join, learn, rented, run_all, tinker
from echo2d.cli.doctor import doctor
from echo2d.cli.envs import envs
from echo2d.cli.files import files
from echo2d.cli.foresight import plan, simulate
from echo2d.cli.keeping import keep
from echo2d.cli.parts import FullSentences
from echo2d.cli.recipes import init, try_run
from echo2d.cli.tokens import token
from echo2d.cli.watching import demo, samples, status
from echo2d.cli.workers import worker
from echo2d.errors import Fault, OperatorFault, of_the_host
from echo2d.registry import COMMANDS, load

# Commands that another distribution adds, and how to install that distribution.
ELSEWHERE = {
    "bench": "it comes with echo2d-lab, which `make setup` installs in a clone of the repository"
}

SECTIONS = {
    "Run": (init, try_run, run_all, coordinate, join, learn, tinker, envs, demo),
    "Look": (status, samples, doctor),
    "Operate": (token, worker, rented, keep, files),
    "Measure": (plan, simulate),
}


class Faultless(FullSentences):
    """Turns a fault or a wrong option into one line on stderr. The exit code says whose mistake it was. Other
    distributions add commands (`registry.COMMANDS`).
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """OperatorFault: the command's distribution is not installed, or is damaged."""
        if own := super().get_command(ctx, cmd_name):
            return own
        if entry := COMMANDS.get(cmd_name):
            try:
                added: click.Command = load(entry)
            except (ImportError, AttributeError) as error:
                raise OperatorFault(f"`echo2d {cmd_name}` cannot be loaded: {error}") from error
            return added
        if advice := ELSEWHERE.get(cmd_name):
            raise OperatorFault(f"`echo2d {cmd_name}` is not installed: {advice}")
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = {title: [each.name or "" for each in own] for title, own in SECTIONS.items()}
        sections["Measure"] += COMMANDS
        for title, names in sections.items():
            with formatter.section(title):
                formatter.write_dl(self.rows(ctx, names))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """UsageError: no command has this name; its text names the most similar command."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            paths = {path.rpartition(" ")[2]: path for path in (*_paths(self), *COMMANDS)}
            near = difflib.get_close_matches(args[0], paths, 1)
            hint = f" Did you mean `echo2d {paths[near[0]]}`?" if near else ""
            raise click.UsageError(f"No such command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (Fault, OSError) as error:
            fault = error if isinstance(error, Fault) else of_the_host(error)
            if fault is None:
                raise
            click.echo(f"echo2d: {fault}", err=True)
            ctx.exit(2 if isinstance(fault, OperatorFault) else 1)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            command = (error.ctx or ctx).command_path
            words = " ".join(error.format_message().split())
            click.echo(f"echo2d: {words} See `{command} --help`.", err=True)
            ctx.exit(2)


def _paths(group: click.Group, prefix: str = "") -> Iterator[str]:
    """All commands and groups, as they are typed after `echo2d`."""
    for name, each in group.commands.items():
        yield f"{prefix}{name}"
        if isinstance(each, click.Group):
            yield from _paths(each, f"{prefix}{name} ")


@click.group(
    cls=Faultless,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="echo2d")
def main() -> None:
    """RL post-training of LLMs: one busy learner, rollouts from GPU boxes anywhere.

    `echo2d demo` shows all of it on this machine. For a run of your own, `echo2d init` writes its
    config; then start `coordinate` and `learn` on the learner's host and `join` on each box.
    """


for section in SECTIONS.values():
    for command in section:
        main.add_command(command)

"""The `echo2d` command: parses arguments, builds the config and starts the program.

Heavy imports happen inside the commands, so that --help is fast. Exit codes: 0 done, 1 failed while
running, 2 the operator's mistake (one clear line, no traceback).
"""

from typing import Any

import click

from echo2d import __version__
from echo2d.cli.audits import audit
from echo2d.cli.boxes import box_script
from echo2d.cli.daemons import coordinate, join, rented
from echo2d.cli.doctor import doctor
from echo2d.cli.envs import envs
from echo2d.cli.evals import evaluations
from echo2d.cli.files import files
from echo2d.cli.foresight import plan, simulate
from echo2d.cli.keeping import backup, restore
from echo2d.cli.learning import learn
from echo2d.cli.parts import FullSentences
from echo2d.cli.recipes import init
from echo2d.cli.results import export
from echo2d.cli.samples import samples
from echo2d.cli.tasks import tasks
from echo2d.cli.tokens import token
from echo2d.cli.watching import demo, status, top
from echo2d.cli.workers import cordon, drain, uncordon
from echo2d.errors import Fault, OperatorFault
from echo2d.registry import COMMANDS, load

# Commands of other distributions, and how to get these.
ELSEWHERE = {
    "bench": "it comes with echo2d-lab, which `make setup` installs in a clone of the repository"
}


class Faultless(FullSentences):
    """Turns a fault, or a wrong option, into one line on stderr and the exit code that says whose
    mistake it was. Other distributions add commands (`registry.COMMANDS`).
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """OperatorFault: its distribution is not installed, or is damaged."""
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

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Fault as fault:
            click.echo(f"echo2d: {fault}", err=True)
            ctx.exit(2 if isinstance(fault, OperatorFault) else 1)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            command = (error.ctx or ctx).command_path
            words = " ".join(error.format_message().split())
            click.echo(f"echo2d: {words} See `{command} --help`.", err=True)
            ctx.exit(2)


@click.group(
    cls=Faultless,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="echo2d")
def main() -> None:
    """RL post-training of LLMs: one busy learner, rollouts from GPU boxes anywhere.

    `echo2d demo` shows all of it on this machine. For a run of your own, start `coordinate` on the
    learner's host and `join` on each box.
    """


for command in (
    init, coordinate, join, learn, envs, status, top, evaluations, samples, export, tasks, plan,
    simulate, demo, token, audit, box_script, rented, cordon, uncordon, drain, backup, restore,
    doctor, files,
):  # fmt: skip
    main.add_command(command)

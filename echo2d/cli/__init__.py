"""The `echo2d` command: parses arguments, builds the config and starts the program.

Heavy imports happen inside the commands, so that --help is fast. Exit codes: 0 done, 1 failed while
running, 2 the operator's mistake (one clear line, no traceback).
"""

from typing import Any

import click

from echo2d import __version__
from echo2d.cli.audits import audit
from echo2d.cli.benches import bench
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


class Faultless(FullSentences):
    """Turns a fault, or a wrong option, into one line on stderr and the exit code that says whose
    mistake it was.
    """

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
    doctor, bench, files,
):  # fmt: skip
    main.add_command(command)

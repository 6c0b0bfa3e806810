"""The command `echo2d learn`: the reference learner, which parses its own options."""

import sys

import click


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def learn(options: tuple[str, ...]) -> None:
    """Train the policy: take batches, train, publish versions.

    `echo2d learn --help` shows its options. On several GPUs start it as
    `python -m echo2d.learner.torchrun --standalone --nproc-per-node N -m echo2d.learner OPTIONS`.
    """
    if "" not in sys.path:
        # As under `python -m`: a loss of the user's own may lie in the current directory.
        sys.path.insert(0, "")
    from echo2d.learner.__main__ import end_with, main

    end_with(main(list(options)))

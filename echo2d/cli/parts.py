"""What commands of `echo2d` share: types of arguments, how a daemon logs, serves and ends, where a coordinator is."""

import gc
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from echo2d.errors import OperatorFault

FILE = click.Path(path_type=Path, dir_okay=False)
DIRECTORY = click.Path(path_type=Path, file_okay=False)


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """How a daemon logs."""
    level = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning"]),
        default="info",
        show_default=True,
        help="debug has a line for every sample.",
    )
    return level(click.option("--log-json", is_flag=True, help="One JSON object a line.")(command))


def serve(
    program: Callable[[], Coroutine[Any, Any, int]], log_level: str, *, log_json: bool
) -> None:
    """Run a daemon until it is told to stop, and end the process with its exit code."""
    from echo2d.runtime.process.lifecycle import run_daemon
    from echo2d.runtime.process.logs import LEVELS, start_logging

    start_logging(LEVELS[log_level], as_json=log_json)
    end(run_daemon(program))


def end(code: int) -> NoReturn:
    """Without a search for garbage in all that was loaded: with torch that takes a second, and the process ends."""
    gc.freeze()
    sys.exit(code)


def coordinator_at(
    run_dir: Path | None, url: str | None, token_file: Path | None
) -> Callable[[], tuple[str, Path]]:
    """Where to ask, each time anew: one that is started again may listen elsewhere."""
    if run_dir is not None:
        from echo2d.runtime.run_dir.credentials import find_coordinator

        return partial(find_coordinator, run_dir)
    if url is None or token_file is None:
        raise OperatorFault(
            "the coordinator's run directory is needed, or its URL and --token-file"
        )
    at = (url, token_file)
    return lambda: at

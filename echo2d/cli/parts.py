"""What the commands share: argument types, logging, running a daemon, finding a coordinator."""

import gc
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

import click

from echo2d.errors import OperatorFault

if TYPE_CHECKING:
    from echo2d.core.rules.table import Table

# If stderr is no terminal, a long command prints a line of progress after this many seconds.
_LINE_S = 10.0
# click does not check whether the file can be read. `errors.path_fault` reports that when the file is read, and says
# which user owns it.
FILE = click.Path(path_type=Path, dir_okay=False, readable=False)
DIRECTORY = click.Path(path_type=Path, file_okay=False)


class RunFolder(click.Path):
    """The type of a run's directory. If the folder of the run.toml is given, it finds the run's directory in there."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False, readable=False)

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        within = path / "coordinator"
        for folder in (path, within):
            with suppress(FileNotFoundError, NotADirectoryError):
                next(folder.iterdir(), None)
        return within if (within / "run.key").exists() and not (path / "run.key").exists() else path


RUN_FOLDER = RunFolder()
run_dir_option = click.option(
    "--run-dir",
    type=RUN_FOLDER,
    required=True,
    help="The run's directory (run.run_dir of its config), or the folder of its run.toml.",
)


class FullSentences(click.Group):
    """A group whose list of commands wraps long sentences instead of cutting them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.rows(ctx, self.list_commands(ctx)))

    def rows(self, ctx: click.Context, names: Iterable[str]) -> list[tuple[str, str]]:
        """The name and the first sentence of each command."""
        commands = ((name, self.get_command(ctx, name)) for name in names)
        # The list shows up to 200 characters of each command's first sentence.
        return [
            (name, each.get_short_help_str(limit=200))
            for name, each in commands
            if each is not None
        ]


class Sectioned(click.Command):
    """A command that shows its options under headings.

    sections: heading -> names of options. table: the options are keys of this table, which has their help. An option
    that is not typed is not among the arguments.
    """

    def __init__(
        self, *arguments: Any, sections: Mapping[str, str], table: type["Table"], **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self._section_of = {n: title for title, names in sections.items() for n in names.split()}
        own = {each.name for each in self.params}
        self.params += [key_option(table, name) for name in self._section_of if name not in own]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = [*dict.fromkeys(self._section_of.values()), "Other options"]
        found: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        for each in self.get_params(ctx):
            if isinstance(each, click.Option) and (record := each.get_help_record(ctx)):
                found[self._section_of.get(each.name or "", titles[-1])].append(record)
        for title, rows in found.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def key_option(table: type["Table"], name: str) -> click.Option:
    """The option that overrides a key of a table; its help is the key's meaning."""
    item = next(each for each in fields(table) if each.name == name)
    hint = get_type_hints(table)[name]
    kinds = [kind for kind in (Path, bool, int, float) if kind in (hint, *get_args(hint))]
    kind: Any = kinds[0] if kinds else str
    if kind is Path:
        kind = click.Path(path_type=Path)
    elif choices := item.metadata.get("choices"):
        kind = click.Choice(choices)
    about, default = item.metadata["doc"], item.default
    return click.Option(
        [f"--{name.replace('_', '-')}"],
        type=kind,
        is_flag=kind is bool,
        default=None,
        show_default=str(default) if default and type(default) in (int, str) else False,
        help=f"{about[0].upper()}{about[1:]}.",
    )


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --log-level, --log-json and --log-file, whose values are passed to `serve`."""
    level = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning"]),
        default="info",
        show_default=True,
        help="Log messages of at least this severity; debug logs every sample.",
    )
    as_json = click.option("--log-json", is_flag=True, help="Log one JSON object per line.")
    file = click.option(
        "--log-file",
        type=FILE,
        help="Log to this file instead of stderr. A full file becomes FILE.1; both together take at most 512 MiB.",
    )
    return level(as_json(file(command)))


def coordinator_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --run-dir, --url and --token-file, for `coordinator_at`."""
    for option in (
        click.option(
            "--token-file",
            type=FILE,
            help="Token file with the role learner, gateway, operator or viewer; with a worker's token, "
            "`echo2d status` shows the boxes of that token.",
        ),
        click.option("--url", help="URL of a coordinator elsewhere; needs --token-file."),
        click.option(
            "--run-dir", type=RUN_FOLDER, help="Run directory of a coordinator on this host."
        ),
    ):
        command = option(command)
    return command


def json_option(about: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the option --json, which the command gets as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=about)


def set_option(about: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the repeatable option --set, which the command gets as `settings`."""
    return click.option("--set", "settings", multiple=True, help=f"{about}; repeatable.")


def serve(
    program: Callable[[], Coroutine[Any, Any, int]],
    log_level: str,
    *,
    log_json: bool,
    log_file: Path | None = None,
    tell: Callable[[str], object] | None = None,
) -> None:
    """Run a daemon until it stops, and end the process with its exit code.

    tell: gets the lines of the log, unless they go to a file.
    """
    from echo2d.logs import LEVELS, start_logging
    from echo2d.runtime.process.lifecycle import run_daemon

    start_logging(LEVELS[log_level], as_json=log_json, file=log_file, tell=tell)
    end(run_daemon(program))


@contextmanager
def progress_bar(what: str, *, size: int = 0) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal, elsewhere a line on stderr every _LINE_S. Yields a function that takes the share
    that is done.

    size: bytes that are copied; if it is given, the bar and the lines show MB/s.
    """
    began_at = told_at = time.monotonic()

    def rate(share: float | None) -> str:
        took_s = time.monotonic() - began_at
        return f"{(share or 0.0) * size / took_s / 1e6:,.0f} MB/s" if size and took_s else ""

    if sys.stderr.isatty():
        with click.progressbar(
            length=1000, label=what, file=sys.stderr, item_show_func=rate
        ) as bar:
            yield lambda share: bar.update(max(0, int(1000 * min(share, 1.0)) - bar.pos), share)
        return

    def tell(share: float) -> None:
        nonlocal told_at
        now = time.monotonic()
        if now - told_at >= _LINE_S:
            told_at, took_s = now, now - began_at
            left = f", {took_s / share - took_s:.0f} s to go" if share else ""
            fast = f", {rate(share)}" if size else ""
            click.echo(f"{what}: {share:.0%} in {took_s:.0f} s{left}{fast}", err=True)

    yield tell


def end(code: int) -> NoReturn:
    """Exit the process with this code."""
    # If torch is loaded, the last garbage collection would take a second. After a freeze it has nothing to do.
    gc.freeze()
    sys.exit(code)


def coordinator_at(
    run_dir: Path | None, url: str | None, token_file: Path | None, *, role: str = "viewer"
) -> Callable[[], tuple[str, Path]]:
    """A function that finds the coordinator's URL and a token file.

    Call the function before every request, because a restarted coordinator may listen elsewhere. role: the role of the
    token that is taken from the run directory. OperatorFault: neither a run directory nor a URL with a token file was
    given.
    """
    if run_dir is not None:
        from echo2d.runtime.run_dir.run_directory import find_coordinator

        return partial(find_coordinator, run_dir, role)
    if url is None or token_file is None:
        raise OperatorFault(
            "expected the coordinator's run directory, or its URL together with --token-file"
        )
    at = (url, token_file)
    return lambda: at

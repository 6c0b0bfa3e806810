"""A provider that runs the operator's own commands: works with any cloud that has a command line.

A command is an argument list, not a shell line. It gets the operator's environment, and each of these variables
whose value is known:

    ECHO2D_LABEL            name of the box: `start` tags the box with it, `stop` stops the box that has it
    ECHO2D_LABEL_PREFIX     every label of this run begins with it; `list` may show others
    ECHO2D_OFFER            the operator's name for this kind of box
    ECHO2D_COORDINATOR_URL  the URL for the box's `echo2d join`
    ECHO2D_TOKEN_FILE       its token file: a secret that lets one worker join until the box's end
    ECHO2D_LIFE_S           seconds after which the box must end by itself
    ECHO2D_ID               the provider's own names for the box, if lists have shown any; separated
                            by blanks

Exit code 0 means success. `list` prints one JSON object per line, {"label": ..., "id": ...}; other
keys are ignored, and so are lines whose label does not have echo2d's form. A command that takes too
long or prints too much is killed with its process group; a process that it detached with `setsid`
stays. If this process dies, `timeout` (coreutils) kills the command instead.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo2d.core.renting.budget import Label
from echo2d.core.renting.events import Instance
from echo2d.errors import ProviderFault
from echo2d.providers.base import BoxOrder, ProviderOptions

# Most bytes of stdout, and of stderr: enough for a list of all boxes of a large account.
_OUTPUT_BYTES_MAX = 4 << 20
LINES_MAX = 20_000  # lines of a list; a run cannot have more boxes
_REASON_CHARS_MAX = 300
# `timeout` kills the command this long after its time, if this process has not done so.
WATCHDOG_S = 5.0
_READ_BYTES = 1 << 16
# Every cloud accepts this as a name or a tag.
LABEL = re.compile(r"[a-z][a-z0-9-]{0,62}")
ID = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(frozen=True, slots=True)
class Commands:
    """The argument lists of one provider.

    timeout_s: for each command. environment: for all of them; the ECHO2D_ variables are added to it.
    """

    start: Sequence[str]
    stop: Sequence[str]
    list: Sequence[str]
    timeout_s: float
    environment: Mapping[str, str]


def make_exec_provider(options: ProviderOptions) -> "ExecProvider":
    commands = Commands(
        options.start, options.stop, options.list, options.timeout_s, options.environment
    )
    return ExecProvider(commands, options.prefix)


class ExecProvider:
    """prefix: every label of this run begins with it."""

    def __init__(self, commands: Commands, prefix: str) -> None:
        self._commands = commands
        self._prefix = prefix

    async def start(self, order: BoxOrder) -> None:
        facts = {
            "ECHO2D_LABEL": order.label,
            "ECHO2D_OFFER": order.offer,
            "ECHO2D_COORDINATOR_URL": order.url,
            "ECHO2D_TOKEN_FILE": str(order.token_file),
            "ECHO2D_LIFE_S": str(int(order.life_s)),
        }
        await self._run(self._commands.start, facts)

    async def stop(self, label: Label, ids: tuple[str, ...]) -> None:
        await self._run(self._commands.stop, {"ECHO2D_LABEL": label, "ECHO2D_ID": " ".join(ids)})

    async def list(self) -> tuple[Instance, ...]:
        printed = await self._run(self._commands.list, {})
        lines = [line for line in printed.splitlines() if line.strip()]
        if len(lines) > LINES_MAX:
            raise ProviderFault(f"the list command printed more than {LINES_MAX} lines")
        return tuple(instance for line in lines if (instance := read_instance(line)) is not None)

    async def _run(self, command: Sequence[str], facts: Mapping[str, str]) -> str:
        environment = {**self._commands.environment, "ECHO2D_LABEL_PREFIX": self._prefix, **facts}
        return await run_command(command, environment, timeout_s=self._commands.timeout_s)


def read_instance(line: str) -> Instance | None:
    """Read one line of a list; None: its label is not echo2d's. ProviderFault: it is malformed."""
    try:
        facts = json.loads(line)
        label, name = facts["label"], facts["id"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProviderFault(f'expected {{"label": ..., "id": ...}}; found {line!r:.100}') from error
    if not isinstance(label, str) or LABEL.fullmatch(label) is None:
        return None
    if not isinstance(name, str) or ID.fullmatch(name) is None:
        raise ProviderFault(f"the id of {label} is not a valid id: {name!r:.100}")
    return Instance(Label(label), name)


async def run_command(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float
) -> str:
    """Run a command and return its stdout.

    ProviderFault: it could not be run, failed, took too long or printed too much.
    """
    guard = ("timeout", "--signal=KILL", str(timeout_s + WATCHDOG_S))
    try:
        process = await asyncio.create_subprocess_exec(
            *guard,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
            limit=_READ_BYTES,
        )
    except OSError as error:
        raise ProviderFault(
            f"cannot run {guard[0]} {command[0]}: {error.strerror or error}"
        ) from error
    try:
        async with asyncio.timeout(timeout_s):
            return await _output(process)
    except TimeoutError as error:
        raise ProviderFault(f"it took longer than {timeout_s:g} s") from error
    finally:
        _kill(process)
        await _ended(process)
        # A process that the command left running may still hold its output open.
        process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001


async def _output(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    printed, complained = bytearray(), bytearray()
    async with asyncio.TaskGroup() as readers:
        tasks = [
            readers.create_task(_read(process.stdout, printed, process)),
            readers.create_task(_read(process.stderr, complained, process)),
        ]
        code = await _ended(process)
        # A process that the command left running may keep its output open, so reading ends 1 s later.
        await asyncio.wait(tasks, timeout=1.0)
        for task in tasks:
            task.cancel()
    if max(len(printed), len(complained)) > _OUTPUT_BYTES_MAX:
        raise ProviderFault(f"it printed more than {_OUTPUT_BYTES_MAX} bytes")
    if code != 0:
        words = " ".join(complained[-4 * _REASON_CHARS_MAX :].decode(errors="replace").split())
        raise ProviderFault(f"it ended with {code}: {words[-_REASON_CHARS_MAX:]}")
    return printed.decode(errors="replace")


async def _ended(process: asyncio.subprocess.Process) -> int:
    """Wait for the exit code only. `process.wait()` would also wait for the end of the output."""
    while process.returncode is None:  # noqa: ASYNC110 - there is no event for it
        # Commands take seconds.
        await asyncio.sleep(0.02)
    return process.returncode


async def _read(
    stream: asyncio.StreamReader, into: bytearray, process: asyncio.subprocess.Process
) -> None:
    """Read the stream to its end; kill the process if it prints too much."""
    while data := await stream.read(_READ_BYTES):
        into += data
        if len(into) > _OUTPUT_BYTES_MAX:
            _kill(process)
            return


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

"""An SGLang server as a process of this worker, on loopback, with its own keys and a guard (`process_guard`).

Its keys go through a file that only this user can read and that is gone once the server has read it: argv shows to all.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from echo2d.errors import EngineFault, OperatorFault

HOST = "127.0.0.1"
STOP_S_MAX = 4.5  # the guard gives the server 3 s, and kills it then
STREAM_INTERVAL = 8  # tokens per chunk: each one costs both ends a message
LOG_TAIL_BYTES = 4096

OURS = {
    "host", "port", "api-key", "admin-api-key", "model-path", "model", "config", "weight-version", "trust-remote-code",
    "load-format", "skip-tokenizer-init", "incremental-streaming-output",
}  # fmt: skip
_TP = ("--tp", "--tp-size", "--tensor-parallel-size")


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started. python: of the environment that SGLang is in. arguments: the operator's flags.

    folder: for its log. environment: what of this process's the server is given.
    """

    python: Path
    arguments: Sequence[str]
    folder: Path
    environment: Mapping[str, str]


def launches(base: Launch, count: int) -> list[Launch]:
    """For `count` engines of one box: each has its folder and, on GPUs, those after the ones before it."""
    flags = base.arguments
    gpus = next((int(size) for flag, size in pairwise(flags) if flag in _TP and size.isdigit()), 1)
    placed = count > 1 and "cpu" not in flags and "--base-gpu-id" not in flags
    return [
        Launch(
            base.python,
            [*flags, *(("--base-gpu-id", str(index * gpus)) if placed else ())],
            base.folder / f"engine-{index}",
            base.environment,
        )
        for index in range(count)
    ]


def require_arguments(arguments: Sequence[str]) -> None:
    """OperatorFault: a flag that is not the operator's to set."""
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        if argument.startswith("--") and name in OURS:
            raise OperatorFault(f"worker.engine_args: --{name} is set by echo2d")


class ServerProcess:
    """One run of a server. `ended`: its guard has ended, and so has it."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.api_key, self.admin_key = secrets.token_hex(16), secrets.token_hex(16)
        self.url = ""
        self._guard: asyncio.subprocess.Process | None = None
        self._keys = (
            launch.folder / f"keys-{secrets.token_hex(4)}.yaml"
        )  # another server may just be ending
        self._wanted = True
        self._starting = asyncio.Lock()

    @property
    def ended(self) -> bool:
        return self._guard is None or self._guard.returncode is not None

    @property
    def log(self) -> Path:
        return self._launch.folder / "server.log"

    async def start(self, model: Path, label: str) -> None:
        """Begin to start it. EngineFault: this machine cannot."""
        async with self._starting:
            if not self._wanted:
                raise EngineFault("the SGLang server is not wanted any more")
            await self._start(model, label)

    async def _start(self, model: Path, label: str) -> None:
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        try:
            await asyncio.to_thread(self._write_keys)
            self._guard = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "echo2d.engines.server.process_guard",
                stdin=asyncio.subprocess.PIPE,
                env=dict(self._launch.environment),
                start_new_session=True,
            )
            assert self._guard.stdin is not None
            self._guard.stdin.write(json.dumps(self._told(model, label, port)).encode() + b"\n")
            await self._guard.stdin.drain()
        except OSError as error:
            raise EngineFault(f"the SGLang server cannot be started: {error}") from error

    async def started(self) -> None:
        """It has read its keys."""
        await asyncio.to_thread(self._keys.unlink, missing_ok=True)

    async def stop(self) -> None:
        """End it and all its children; one that is just being started, too."""
        self._wanted = False
        async with self._starting:
            await self._stop()

    async def _stop(self) -> None:
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await self._guard.wait()
        except TimeoutError:  # with it the server ends: it asked the kernel for that
            with contextlib.suppress(ProcessLookupError):
                self._guard.kill()
            await self._guard.wait()
        await self.started()

    def last_words(self) -> str:
        """The last line of its log. Blocking."""
        try:
            lines = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").split("\n")
        except OSError:
            return "it left no log"
        return next(
            (line.strip()[:300] for line in reversed(lines) if line.strip()), "its log is empty"
        )

    def _write_keys(self) -> None:
        self._launch.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._keys.touch(mode=0o600)
        self._keys.write_text(f"api-key: {self.api_key}\nadmin-api-key: {self.admin_key}\n")

    def _told(self, model: Path, label: str, port: int) -> Mapping[str, object]:
        argv = [
            str(self._launch.python), "-m", "sglang.launch_server", "--config", str(self._keys),
            "--model-path", str(model), "--weight-version", label, "--load-format", "auto",
            "--host", HOST, "--port", str(port),
            "--skip-tokenizer-init", "--skip-server-warmup",
            "--incremental-streaming-output", "--stream-interval", str(STREAM_INTERVAL),
            *self._launch.arguments,
        ]  # fmt: skip
        ours = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "PYTHONUNBUFFERED": "1",
        }
        given = {
            name: value
            for name, value in self._launch.environment.items()
            if not name.startswith("PYTHON")
        }
        return {
            "argv": argv,
            "environment": given | ours,
            "log": str(self.log),
            "keys": str(self._keys),
            "secrets": [self.api_key, self.admin_key],
        }


def _free_port() -> int:
    """One that was free a moment ago; a server that finds it taken ends, and is started again."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port

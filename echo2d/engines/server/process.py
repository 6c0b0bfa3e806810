"""Runs an inference server as a process of this worker: on loopback, with its own keys and a guard.

The keys go through a file that only this user can read, because any user can see a process's
arguments. The file is deleted once the server has read it. The guard is `process_guard`.
"""

import asyncio
import contextlib
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from echo2d.engines.server.launch import ServerLaunch
from echo2d.errors import EngineFault


class ServerProcess:
    """One run of a server."""

    def __init__(self, launch: ServerLaunch) -> None:
        self._launch = launch
        self.api_key, self.admin_key = secrets.token_hex(16), secrets.token_hex(16)
        self.url = ""
        # Sockets of the server, in a folder with a short path.
        self.private = Path()
        self._guard: asyncio.subprocess.Process | None = None
        # Each run has its own file, because the previous server may still be ending, and its guard deletes its file.
        self._keys = launch.folder / f"keys-{secrets.token_hex(4)}.yaml"
        self._closed = False
        self._starting = asyncio.Lock()

    @property
    def kind(self) -> str:
        """What kind of server it is."""
        return self._launch.name

    @property
    def ended(self) -> bool:
        """Whether the guard has ended, and the server with it."""
        return self._guard is None or self._guard.returncode is not None

    @property
    def log(self) -> Path:
        return self._launch.folder / "server.log"

    async def start(self, model: Path, label: str) -> None:
        """Begin to start the server. EngineFault: this machine cannot."""
        async with self._starting:
            if self._closed:
                raise EngineFault(f"the {self._launch.name} server was closed while starting")
            await self._start(model, label)

    async def _start(self, model: Path, label: str) -> None:
        try:
            self.private = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="echo2d-server-"))
            self.url = await asyncio.to_thread(self._launch.url, self.private)
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
            self._guard.stdin.write(json.dumps(self._order(model, label)).encode() + b"\n")
            await self._guard.stdin.drain()
        except OSError as error:
            raise EngineFault(
                f"the {self._launch.name} server cannot be started: {error}"
            ) from error

    async def started(self) -> None:
        """Delete the file with the keys, which the server has read."""
        await asyncio.to_thread(self._keys.unlink, missing_ok=True)

    async def stop(self) -> None:
        """End the server and all its children, even while it is being started."""
        self._closed = True
        async with self._starting:
            await self._stop()

    async def _stop(self) -> None:
        if self._guard is not None:
            await self._end(self._guard)
        await self.started()
        if self.private != Path():
            await asyncio.to_thread(shutil.rmtree, self.private, ignore_errors=True)

    async def _end(self, guard: asyncio.subprocess.Process) -> None:
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            # The guard gives the server 3 s before it kills it.
            async with asyncio.timeout(4.5):
                await guard.wait()
        except TimeoutError:
            # The kernel kills the server with its guard, because the server asked for that.
            with contextlib.suppress(ProcessLookupError):
                guard.kill()
            await guard.wait()

    def last_words(self) -> str:
        """The last line of its log. Blocking."""
        try:
            lines = self.log.read_bytes()[-4096:].decode(errors="replace").split("\n")
        except OSError:
            return "it left no log"
        # pydantic's last line names a page.
        said = (line.strip()[:300] for line in reversed(lines) if "further information" not in line)
        return next((line for line in said if line), "its log is empty")

    def _write_keys(self) -> None:
        self._launch.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._keys.touch(mode=0o600)
        self._keys.write_text(self._launch.keys_text(self.api_key, self.admin_key))

    def _order(self, model: Path, label: str) -> Mapping[str, object]:
        argv = self._launch.command(model, label, url=self.url, keys=self._keys)
        given = {
            name: value
            for name, value in self._launch.environment.items()
            if not name.startswith("PYTHON")
        }
        return {
            "argv": argv,
            "environment": given
            | dict(self._launch.settings(self.api_key))
            | {"ECHO2D_MEMORY": str(self.private)},
            "log": str(self.log),
            "keys": str(self._keys),
            "secrets": [self.api_key, self.admin_key],
        }

"""Runs a child process of the coordinator, and restarts it whenever it ends.

The child is `python -m MODULE`; the kernel kills it if the coordinator dies. It receives its
credentials as one JSON line on stdin, never in argv or the environment, where other processes could
read them. On a mistake of the operator, the child writes the reason to stdout and ends with exit code MISTAKE.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.errors import Fault, OperatorFault
from echo2d.logs import present, start_logging
from echo2d.net.backoff import Backoff
from echo2d.net.control.client import Identity
from echo2d.net.security.auth import public_bytes
from echo2d.net.security.tls import Tls
from echo2d.runtime.process.lifecycle import outcome
from echo2d.runtime.run_dir.run_directory import RunDirectory

# A child that has not ended this long after SIGTERM is killed.
_STOP_S = 5.0
# The exit code of an operator's mistake, which a restart does not correct.
MISTAKE = 2
_PR_SET_PDEATHSIG = 1

log = logging.getLogger("echo2d.coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The settings that the coordinator gives to each of its children."""

    url: str
    private_key: str  # Ed25519, hex
    run_key: str  # hex
    run_id: str
    certificate: str  # PEM
    authority: str  # PEM
    run_dir: str
    parent_pid: int
    log_level: int
    log_json: bool
    log_file: str | None

    @classmethod
    def make(cls, url: str, key: Ed25519PrivateKey, run: RunDirectory, **more: Any) -> Self:
        """The handover from this process. It includes the pid and the logging settings of this process."""
        log_level, log_json, log_file = present()
        return cls(
            url=url,
            private_key=key.private_bytes_raw().hex(),
            run_key=run.public_key.hex(),
            run_id=run.run_id,
            certificate=run.authority.certify_peer(public_bytes(key)),
            authority=run.authority.certificate,
            run_dir=str(run.path),
            parent_pid=os.getpid(),
            log_level=log_level,
            log_json=log_json,
            log_file=None if log_file is None else str(log_file),
            **more,
        )

    def identity(self) -> Identity:
        """The child's identity, with its certificate unless the URL is http://. Blocking."""
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.private_key))
        tls = Tls.of(self.url, self.authority)
        if tls is not None:
            tls.present(key, self.certificate)
        return Identity(key, bytes.fromhex(self.run_key), tls, self.run_id)

    @classmethod
    def receive(cls, stdin: IO[bytes]) -> Self:
        """In the child: arrange to die with the parent, and read the handover from stdin.

        OperatorFault: stdin holds no handover, or the parent has ended already.
        """
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            handover = cls(**json.loads(stdin.readline()))
        except (ValueError, TypeError) as error:
            raise OperatorFault(
                "this program is started by `echo2d coordinate`, not by hand"
            ) from error
        # If the parent died before the prctl above, the kernel sends no signal.
        if os.getppid() != handover.parent_pid:
            raise OperatorFault("the coordinator has ended; start it again, and it starts this")
        return handover


H = TypeVar("H", bound=Handover)


def child_main(kind: type[H], serve: Callable[[H], Coroutine[Any, Any, None]]) -> int:
    """The child's program: it receives the handover, and serves until the coordinator ends this process.

    Returns the exit code.
    """
    start_logging()
    # Ctrl-C is for the coordinator, which ends its children itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        handover = kind.receive(sys.stdin.buffer)
        file = None if handover.log_file is None else Path(handover.log_file)
        start_logging(handover.log_level, as_json=handover.log_json, file=file)
        code: int = uvloop.run(_to_exit_code(serve(handover)))
    except Fault as fault:
        log.critical("%s", fault)
        if not isinstance(fault, OperatorFault):
            return 1
        # The coordinator reads this line, unless it has ended.
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(f"{fault}\n")
            sys.stdout.flush()
        return MISTAKE
    return code


async def _to_exit_code(served: Coroutine[Any, Any, None]) -> int:
    try:
        await served
    except BaseExceptionGroup as group:
        return outcome(group)
    return 0


async def supervise(
    module: str, handover: Handover, *, rng: random.Random, mistakes_end: bool
) -> None:
    """Keep one child running until cancelled.

    mistakes_end: whether a mistake of the operator is raised as an OperatorFault. If not, the child is
    restarted after a mistake, too.
    """
    backoff = Backoff(rng)
    loop = asyncio.get_running_loop()
    while True:
        started_at = loop.time()
        code, words = await _run_once(module, handover)
        if mistakes_end and code == MISTAKE and words:
            raise OperatorFault(words)
        # A child that lived for a while had started properly, so the next delay is the shortest again.
        if loop.time() - started_at > _STOP_S:
            backoff.reset()
        delay_s = backoff.next_s()
        log.warning("child ended module=%s code=%d restart_s=%.2f %s", module, code, delay_s, words)
        await asyncio.sleep(delay_s)


async def _run_once(module: str, handover: Handover) -> tuple[int, str]:
    """Run the child once; returns its exit code, and what it wrote to stdout."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        # A child that dies before it reads is reported by its exit code below.
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(asdict(handover)).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        words = (await process.stdout.read()).decode(errors="replace").strip()
        return await process.wait(), words
    finally:
        if process.returncode is None:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()

"""Runs the seed as a child process of the coordinator, and restarts it whenever it ends.

The child is `python -m echo2d.runtime.seed.main`; the kernel kills it if the coordinator dies.
It receives its credentials as one JSON line on stdin, never in argv or the environment, where other
processes could read them. The child calls `receive_handover` before anything else but logging.
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
from dataclasses import asdict, dataclass
from typing import IO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.config import DISK_BYTES_MAX
from echo2d.errors import OperatorFault
from echo2d.net.control.client import Backoff, Identity
from echo2d.net.security.auth import public_bytes
from echo2d.net.security.tls import Tls
from echo2d.runtime.process.logs import present
from echo2d.runtime.run_dir.run_directory import RunDirectory

SEED_MODULE = "echo2d.runtime.seed.main"
# A seed that has not ended this long after SIGTERM is killed.
STOP_S = 5.0
PR_SET_PDEATHSIG = 1

log = logging.getLogger("echo2d.seed")


@dataclass(frozen=True, slots=True)
class SeedHandover:
    """What the coordinator tells its seed.

    private_key, run_key: hex. certificate, authority: PEM. disk_bytes_max: of frames and kept
    deltas together, under run_dir/seed.
    """

    url: str
    private_key: str
    run_key: str
    certificate: str
    authority: str
    run_dir: str
    link_host: str
    link_port: int
    disk_bytes_max: int
    parent_pid: int
    log_level: int
    log_json: bool

    @staticmethod
    def make(
        url: str,
        key: Ed25519PrivateKey,
        *,
        run: RunDirectory,
        link_host: str,
        link_port: int,
        disk_bytes_max: int = DISK_BYTES_MAX,
    ) -> "SeedHandover":
        """The handover from this process, whose pid and logging settings the seed takes over."""
        private_key = key.private_bytes_raw().hex()
        return SeedHandover(
            url,
            private_key,
            run.public_key.hex(),
            run.authority.certify_peer(public_bytes(key)),
            run.authority.certificate,
            str(run.path),
            link_host,
            link_port,
            disk_bytes_max,
            os.getpid(),
            *present(),
        )

    def identity(self) -> Identity:
        """The seed's identity, with its certificate unless the URL is http://. Blocking."""
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.private_key))
        tls = Tls.of(self.url, self.authority)
        if tls is not None:
            tls.present(key, self.certificate)
        return Identity(key, bytes.fromhex(self.run_key), tls)


def receive_handover(stdin: IO[bytes]) -> SeedHandover:
    """In the child: arrange to die with the parent, and read the handover from stdin.

    OperatorFault: stdin holds no handover, or the parent has ended already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        handover = SeedHandover(**json.loads(stdin.readline()))
    except (ValueError, TypeError) as error:
        raise OperatorFault("the seed is started by `echo2d coordinate`, not by hand") from error
    # A parent that died before the prctl above sends no signal.
    if os.getppid() != handover.parent_pid:
        raise OperatorFault("the coordinator has ended; start it again, and it starts its seed")
    return handover


async def supervise_seed(handover: SeedHandover, *, rng: random.Random) -> None:
    """Keep one seed running until cancelled."""
    backoff = Backoff(rng)
    loop = asyncio.get_running_loop()
    while True:
        started_at = loop.time()
        code = await _run_once(handover)
        # A seed that lived for a while had started properly: begin again with the shortest delay.
        if loop.time() - started_at > STOP_S:
            backoff.reset()
        delay_s = backoff.next_s()
        log.warning("seed ended code=%d restart_s=%.2f", code, delay_s)
        await asyncio.sleep(delay_s)


async def _run_once(handover: SeedHandover) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", SEED_MODULE, stdin=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdin is not None
        # A child that dies before it reads is reported by its exit code below.
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(asdict(handover)).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        return await process.wait()
    finally:
        if process.returncode is None:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()

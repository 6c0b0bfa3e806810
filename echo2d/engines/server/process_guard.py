"""The process between a worker and its inference server: `python -m
echo2d.engines.server.process_guard`.

It starts the server in its own process group and writes the server's log (without the keys, which the
server prints). When its own stdin closes, as it does even if the worker is killed, it ends the whole
group and deletes the file with the keys, if it is still there. Its exit code is the server's.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# The server's main process may end while its children keep the pipe open, so the process is polled.
_LOOK_S = 0.2
SERVER_LOG_BYTES_MAX = 16 << 20  # bytes of one log file; the previous file is kept
_PR_SET_PDEATHSIG = 1


class Log:
    """A log file that is rotated when it is full. Secrets in it are replaced by ***."""

    def __init__(self, path: Path, secrets: Sequence[str]) -> None:
        self._path, self._secrets = path, [secret.encode() for secret in secrets]
        self._rest = b""
        self._open()

    def _open(self) -> None:
        if self._path.exists():
            self._path.replace(self._path.with_suffix(".log.1"))
        self._file = self._path.open("wb", buffering=0)

    def write(self, received: bytes) -> None:
        """Write whole lines. On a full disk lines are lost, but the server goes on."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        with contextlib.suppress(OSError):
            for line in lines:
                for secret in self._secrets:
                    line = line.replace(secret, b"***")
                self._file.write(line + b"\n")
            if self._file.tell() > SERVER_LOG_BYTES_MAX:
                self._file.close()
                self._open()
        if len(self._rest) > SERVER_LOG_BYTES_MAX:
            self._rest = b""

    def close(self) -> None:
        self._file.close()


def main() -> int:
    os.umask(0o077)
    # A terminal sends these signals to every process at once. They are ignored here, because the worker decides
    # when the server ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.stdin.buffer.readline())
    log = Log(Path(order["log"]), order["secrets"])
    try:
        return _guard(order["argv"], order["environment"], log)
    finally:
        log.close()
        Path(order["keys"]).unlink(missing_ok=True)


def _guard(argv: Sequence[str], environment: dict[str, str], log: Log) -> int:
    try:
        server = _start(argv, environment)
    except OSError as error:
        log.write(f"{argv[0]}: {error}\n".encode())
        return 1
    try:
        _watch(server, log)
    finally:
        _end(server)
    return server.wait()


def _start(argv: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=_prepare,
    )


def _prepare() -> None:
    """Let signals end the server, and have the kernel kill it when this process dies."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(server: subprocess.Popen[bytes], log: Log) -> None:
    """Copy the server's output to the log until it ends, or the worker closes stdin."""
    assert server.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(server.stdout, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(_LOOK_S)}
            if server.stdout.fileno() in ready:
                received = os.read(server.stdout.fileno(), 1 << 16)
                log.write(received)
                if not received:
                    return
            elif server.poll() is not None:
                return
            if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1 << 16):
                return


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server's process group, its main process first."""
    # The server has three seconds to end by itself; it holds nothing worth waiting for.
    deadline = time.monotonic() + 3.0
    with contextlib.suppress(ProcessLookupError):
        server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(max(0.0, deadline - time.monotonic()))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

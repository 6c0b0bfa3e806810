"""Confines a task process: its own user, the kernel's limits, and the files that it may read.

    root, in our namespaces --unshare, bind mounts--> its files are readable
                            --setuid--> a user who can read little, for good

A task runs as a user of its own. If Python or the task's files are in a home directory that other users may not
enter, such as root's on a rented box, the process gets its own view of the disk, in which that directory holds
these files only. If the kernel does not allow this, or a file is readable for its owner only, the start fails
with a sentence that says what to do. The process also gets its own small directories in place of those that all
users may write to: files that it left there would belong to its user id, which another process gets later.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from echo2d.errors import OperatorFault

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWNET = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
OTHERS_MAY_ENTER = 0o001
# Directories that all users may write to. A task process has its own, with at most SCRATCH_FILES_MAX files.
SCRATCH = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))  # noqa: S108
SCRATCH_FILES_MAX = 4096


def confine(
    limits: Mapping[str, Any],
    uid: int | None,
    reads: Iterable[str] = (),
    modules: Iterable[str] = (),
) -> None:
    """Limit this process and all that it starts, and change to user `uid` if given.

    From then on it cannot gain privileges, and it dies with the guard. reads: files and directories
    that it needs, besides Python's. modules: folders that it can do without. OperatorFault: it cannot
    read a file that it needs.
    """
    os.umask(0o077)
    # A current directory from before the confinement would be a way around it.
    os.chdir("/")
    if not limits["network"]:
        # Only root may take the network away. For another user the call fails, and the process keeps the network.
        libc().unshare(CLONE_NEWNET | CLONE_NEWIPC)
    own = str(Path(__file__).parents[2])
    pythons = (*sys.path, sys.prefix, sys.base_prefix)
    # The operator's own folders, such as the one where the coordinator was started, may be closed to
    # other users.
    spare = {
        *modules,
        *(each for each in pythons if not each.startswith((sys.prefix, sys.base_prefix, own))),
    }
    needed = [path for path in map(Path, pythons) if path.exists() and str(path) not in spare]
    needed += map(Path, reads)
    if uid is not None:
        shown = [path for each in map(Path, spare) for path in _modules_in(each)]
        _change_view([*needed, *shown], limits["file_bytes_max"])
    for what, limit in (
        (resource.RLIMIT_AS, limits["memory_bytes_max"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes_max"]),
        (resource.RLIMIT_NOFILE, limits["files_max"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    # The kernel counts processes per user. If the task had no user of its own, the operator's processes
    # would count too.
    if uid is not None:
        resource.setrlimit(
            resource.RLIMIT_NPROC, (limits["processes_max"], limits["processes_max"])
        )
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    # If memory runs out, the kernel kills this process first. No privilege is needed to ask for that.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # No other process of this user may read its memory.
    prctl(PR_SET_DUMPABLE, 0)
    # This comes after setuid, which would clear it.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A detached grandchild becomes a child, so that the end of a call can see it.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for path in needed:
        _require_readable(path, uid)


def _modules_in(folder: Path) -> list[Path]:
    """The folder, or only the modules in it if it is one of SCRATCH or closed to other users."""
    if not folder.is_dir():
        return []
    if folder not in SCRATCH and folder.stat().st_mode & OTHERS_MAY_ENTER:
        return [folder]
    return [*folder.glob("*.py"), *(each.parent for each in folder.glob("*/__init__.py"))]


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    libc().prctl(option, value, 0, 0, 0)


def _change_view(paths: Iterable[Path], scratch_bytes: int) -> None:
    """Make these paths visible to other users even below closed directories, and replace the directories of SCRATCH.

    It needs root. scratch_bytes: the size of each of SCRATCH. If the kernel does not allow this, nothing changes.
    """
    hidden: dict[Path, set[Path]] = {path: set() for path in SCRATCH if path.is_dir()}
    given = {
        each if ".." not in each.parts else each.parent.resolve() / each.name for each in paths
    }
    for path in {each for name in given for each in (name, name.resolve()) if each.exists()}:
        above = [
            each
            for each in path.parents
            if each in SCRATCH or not each.stat().st_mode & OTHERS_MAY_ENTER
        ]
        if above:
            hidden.setdefault(above[-1], set()).add(path)
    if libc().unshare(CLONE_NEWNS) != 0:
        return
    # A file system that the host unmounts is unmounted here too.
    _mount("none", Path("/"), MS_REC | MS_SLAVE)
    for closed, below in hidden.items():
        shown = [path for path in below if not below.intersection(path.parents)]
        sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in sorted(shown)}
        room = (
            f"mode=1777,size={scratch_bytes},nr_inodes={SCRATCH_FILES_MAX}"
            if closed in SCRATCH
            else "mode=0755,size=1m"
        )
        _mount("tmpfs", closed, MS_NOSUID | MS_NODEV, "tmpfs", room)
        for path, source in sources.items():
            # Other users must be able to enter the parents, whatever our umask is.
            before = os.umask(0o022)
            path.parent.mkdir(parents=True, exist_ok=True)
            origin = Path(f"/proc/self/fd/{source}")
            path.mkdir() if origin.is_dir() else path.touch()
            os.umask(before)
            _mount(str(origin), path, MS_BIND | MS_REC)
            _mount("none", path, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
            os.close(source)


def _mount(source: str, target: Path, flags: int, kind: str = "none", data: str = "") -> None:
    """Mount a file system. OperatorFault: the kernel refuses."""
    arguments = (source.encode(), os.fsencode(target), kind.encode(), flags, data.encode())
    if libc().mount(*arguments) != 0:
        raise OperatorFault(
            f"the task's files cannot be shown to its user: mount on {target}: "
            f"{os.strerror(ctypes.get_errno())}"
        )


def _exists(path: Path) -> bool:
    """Whether the path exists, or may exist where this user cannot look."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _require_readable(path: Path, uid: int | None) -> None:
    if os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        return
    if not _exists(path):
        raise OperatorFault(f"there is no {path}")
    who = "this user" if uid is None else f"the task's user {uid}"
    raise OperatorFault(
        f"{who} cannot read {path}: make it readable for others (chmod o+rX), or move it to a "
        "directory that others may enter"
    )

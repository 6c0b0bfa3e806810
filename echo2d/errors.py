"""The faults of echo2d. The class says who or what is at fault, and that decides how the program reacts.

    Fault
     +-- OperatorFault    the person who runs this program made a mistake: print one clear line, exit code 2
     +-- PeerFault        another process broke the protocol: drop that peer
     +-- IntegrityFault   bytes do not verify: drop the chunk, blame its source
     +-- EngineFault      the engine failed: keep serving the old version
     +-- ProviderFault    a provider's command failed: trust only what the next list of boxes shows
     +-- StoreFault       this machine's disk failed (full, read-only): report it, try again later

Catch a fault only where you react to it. Any other exception is a bug of echo2d and ends the
process.
"""

import errno
import os
from pathlib import Path
from typing import TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)

# For each error of a system call: what the host lacks, and what its owner can do.
HOST_LACKS = {
    errno.EMFILE: "this program may open no more files: raise LimitNOFILE= of its unit, or `ulimit -n`",
    errno.ENFILE: "this host can open no more files",
    errno.ENOMEM: "this host has no memory left",
    errno.EAGAIN: "this host allows no more processes or threads",
    errno.ENOSPC: "a disk of this host is full: make room",
    errno.EFBIG: "this host limits the size of files: raise LimitFSIZE= of its unit, or `ulimit -f`",
    errno.EDQUOT: "a quota of this host's disk is used up: make room",
    errno.EROFS: "a disk of this host is mounted read-only",
    errno.EIO: "a disk of this host fails",
    errno.ESTALE: "a network disk of this host is away",
}


class Fault(Exception):  # noqa: N818 - "fault" is the house's word
    """Base of all faults. Its text is one line that a person can act on."""


class OperatorFault(Fault):
    """Wrong configuration, arguments, files or credentials."""


class PeerFault(Fault):
    """A remote process sent what the protocol does not allow."""


class IntegrityFault(Fault):
    """Bytes do not have the digest, the signature or the structure that was announced for them."""


class EngineFault(Fault):
    """An engine refused, failed or died."""


class ProviderFault(Fault):
    """A provider's command failed, hung or printed nonsense. What it did is unknown."""


class StoreFault(Fault):
    """The local disk refused (no space, I/O error). Nothing half-written is ever used.

    full: the disk has no space left; freeing some would help.
    """

    def __init__(self, text: str, *, full: bool = False) -> None:
        super().__init__(text)
        self.full = full


def first_fault(group: BaseExceptionGroup[ErrorT]) -> ErrorT:
    """The first error in a group, however deeply it is nested."""
    inner = group.exceptions[0]
    return first_fault(inner) if isinstance(inner, BaseExceptionGroup) else inner


def path_fault(text: str, error: OSError) -> Fault:
    """The fault for an error of a path or an address that the operator named, or of this host. text: what failed."""
    lacks = HOST_LACKS.get(error.errno or 0)
    if lacks is None:
        return OperatorFault(f"{text}: {error.strerror or error}{_whose(error)}")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return StoreFault(f"{text}: {error.strerror}: {lacks}", full=full)


def of_the_host(error: OSError) -> Fault | None:
    """The fault for an OSError that no code has handled, if this host or another user's path is the cause.

    None: the error is a bug of echo2d.
    """
    found = path_fault(str(error.filename or "this host"), error)
    return found if isinstance(found, StoreFault) or _whose(error) else None


def _whose(error: OSError) -> str:
    """Names the owner of a path that this user may not use, and says what to do. Empty: this user owns the path, or the
    owner is not known.
    """
    if not isinstance(error, PermissionError) or error.filename is None:
        return ""
    given = Path(os.fsdecode(error.filename)).absolute()
    # `Path.exists` raises an error for files in a folder that this user may not enter; `os.path.exists` does not.
    path = next(each for each in (given, *given.parents) if os.path.exists(each))  # noqa: PTH110
    if path.stat().st_uid == os.geteuid():
        return ""
    try:
        user = path.owner()
    except KeyError:
        user = f"#{path.stat().st_uid}"
    return f"; {path} belongs to the user {user}: type this as that user, with sudo -u {user}"

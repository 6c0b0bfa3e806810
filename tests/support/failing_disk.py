"""A disk on which one chosen call fails, or kills the process."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

READS = ("pread", "stat", "listdir", "scandir")
WRITES = (
    "open",
    "pwrite",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "replace",
    "unlink",
    "mkdir",
    "rmdir",
)
REFUSALS = {"ENOSPC": (errno.ENOSPC, WRITES), "EIO": (errno.EIO, (*READS, *WRITES))}


class Killed(BaseException):
    """Simulates kill -9: no later call reaches the disk."""


@dataclass
class FailingDisk:
    """Counts the calls to the disk by name. Call number `at` fails with `fault`; after Killed all later ones fail, too.

    torn: call number `at` is a write, half of which is done before it fails. names: the calls that are counted.
    """

    at: int | None = None
    fault: BaseException | None = None
    torn: bool = False
    names: Sequence[str] = (*READS, *WRITES)
    calls: list[str] = field(default_factory=list)
    struck: bool = False

    @contextmanager
    def mounted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            for name in self.names:
                patched.setattr(os, name, self._wrap(name, getattr(os, name)))
            yield

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            if self.fault is not None and (
                number == self.at or (self.struck and isinstance(self.fault, Killed))
            ):
                if self.torn and not self.struck:
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                self.struck = True
                raise self.fault
            return real(*args, **kwargs)

        return call

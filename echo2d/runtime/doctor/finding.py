"""The findings of `echo2d doctor`, one for each check."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error", "skipped"]


@dataclass(frozen=True, slots=True)
class HostFinding:
    """The result of one check. todo: what to do about it; empty: nothing.

    Levels: warning: the run works here, but less well than it could. error: it will not work. skipped: the
    check could not be made here, and the text says why.
    """

    check: str
    level: Level
    text: str
    todo: str = ""


def ok(check: str, text: str) -> HostFinding:
    return HostFinding(check, "ok", text)


def warning(check: str, text: str, todo: str) -> HostFinding:
    return HostFinding(check, "warning", text, todo)


def error(check: str, text: str, todo: str) -> HostFinding:
    return HostFinding(check, "error", text, todo)


def skipped(check: str, text: str) -> HostFinding:
    return HostFinding(check, "skipped", text)


def exit_code(findings: Iterable[HostFinding]) -> int:
    """The exit code of the command: 1 if something must be done, else 0."""
    return int(any(each.level == "error" for each in findings))

"""The environment variables of this process. In echo2d's daemons only this module reads `os.environ`."""

import os
from collections.abc import Collection

from echo2d.sd_notify import Notifier


def notifier() -> Notifier:
    """A notifier for the service manager that started this process, if there is one."""
    return Notifier(os.environ)


def engine_environment() -> dict[str, str]:
    """The environment variables for the servers that a worker starts."""
    return dict(os.environ)


def task_environment(names: Collection[str]) -> dict[str, str]:
    """The environment variables of a task: those with these names, as far as they exist, without PYTHON*."""
    given = [name for name in names if name in os.environ and not name.startswith("PYTHON")]
    return {name: os.environ[name] for name in given}


def command_environment() -> dict[str, str]:
    """The environment variables for a provider's commands: all except those of the service manager."""
    ours = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID")
    return {name: value for name, value in os.environ.items() if name not in ours}

"""torchrun, but for how it ends: `python -m learner.torchrun --nproc-per-node 8 -m learner --config run.toml`.

torchrun exits with 1 whatever happened, and a service manager would start again what the operator has to mend. This
takes torchrun's arguments, and ends as the learner does: 0 done, 2 where a process on this host had the operator's
mistake, else 1; told to stop, by that signal. What processes on other hosts say is theirs. Where the network to the
host that keeps torchrun's store drops everything, torchrun asks it for ever: once its processes have ended it is ended
too (Linux).
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

OPERATORS_MISTAKE = 2
STUCK_S_MAX = 60.0  # torchrun looks at its processes ten times a second, and waits as long for one answer of its store
TASKS = Path("/proc/self/task")


def main(arguments: list[str] | None = None) -> int:
    if TASKS.exists():
        threading.Thread(target=_end_if_stuck, name="stuck", daemon=True).start()
    try:
        torchrun(arguments)
    except ChildFailedError as failed:
        return OPERATORS_MISTAKE if OPERATORS_MISTAKE in [each.exitcode for each in failed.failures.values()] else 1
    except SignalException as told:  # the processes have ended
        signal.signal(told.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), told.sigval)
    return 0


def _end_if_stuck() -> None:
    """End this process if torchrun has not looked for so long at those of its own that have all ended."""
    since, codes = time.monotonic(), list[int | None]()
    while time.monotonic() < since + STUCK_S_MAX:
        time.sleep(1.0)
        try:
            codes = list(_not_waited_for())
        except OSError:  # one has been waited for meanwhile
            codes = []
        if not codes or None in codes:
            since = time.monotonic()
    print("learner: torchrun is stuck: its store does not answer", file=sys.stderr)  # noqa: T201 - it is a program
    os._exit(OPERATORS_MISTAKE if OPERATORS_MISTAKE in codes else 1)


def _not_waited_for() -> Iterator[int | None]:
    """Exit codes of the children, which are left to be waited for. None: it runs. Negative: it ended by that signal."""
    for pid in [pid for task in TASKS.iterdir() for pid in (task / "children").read_text().split()]:
        found = os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        yield None if found is None else found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


if __name__ == "__main__":
    sys.exit(main())

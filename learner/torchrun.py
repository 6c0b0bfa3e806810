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
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

OPERATORS_MISTAKE = 2
LOOK_S = 1.0
LOOKS_MAX = 60  # torchrun looks at its processes ten times a second, and waits a minute for one answer of its store
TASKS = Path("/proc/self/task")


def main(arguments: list[str] | None = None) -> int:
    if TASKS.exists():
        threading.Thread(target=_end_if_stuck, name="stuck", daemon=True).start()
    try:
        torchrun(arguments)
    except ChildFailedError as failed:
        return _code_of([each.exitcode for each in failed.failures.values()]) or 1
    except SignalException as told:  # the processes have ended
        signal.signal(told.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), told.sigval)
    return 0


def _end_if_stuck() -> None:
    """End this process if torchrun has not looked for so long at those of its own that have all ended.

    Time is counted in looks, as by `rank_watchdog`: a pause of this process is not torchrun's.
    """
    looks, codes = 0, list[int | None]()
    while looks < LOOKS_MAX:
        time.sleep(LOOK_S)
        try:
            codes = list(_not_waited_for())
        except OSError:  # one has been waited for meanwhile
            codes = []
        looks = looks + 1 if codes and None not in codes else 0
    print("learner: torchrun is stuck: its store does not answer", file=sys.stderr)  # noqa: T201 - it is a program
    os._exit(_code_of(codes))


def _code_of(codes: Sequence[int | None]) -> int:
    """Of the processes of this host together."""
    return OPERATORS_MISTAKE if OPERATORS_MISTAKE in codes else int(any(codes))


def _not_waited_for() -> Iterator[int | None]:
    """Exit codes of the children, which are left to be waited for. None: it runs. Negative: it ended by that signal."""
    for pid in [pid for task in TASKS.iterdir() for pid in (task / "children").read_text().split()]:
        found = os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        yield (
            None
            if found is None
            else found.si_status
            if found.si_code == os.CLD_EXITED
            else -found.si_status
        )


if __name__ == "__main__":
    sys.exit(main())

"""Run torchrun with useful exit codes: `python -m echo2d.learner.torchrun --nproc-per-node 8
-m echo2d.learner --config run.toml`.

torchrun exits with 1 on every failure, so a service manager would restart a learner that only the
operator can repair. This program takes torchrun's arguments and exits as the learner does: 0 when
done, 2 if a process of this host exited with 2, else 1; after a signal, by that signal. The exit
codes of other hosts do not count.

If the network to the store's host drops all packets, torchrun asks its store for ever. So this program
ends torchrun (on Linux) once the learner processes of this host have ended.
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

OPERATOR_FAULT = 2  # exit code
CHECK_S = 1.0
# torchrun polls its processes ten times a second, but may wait a minute for an answer of its store.
CHECKS_MAX = 60
_TASKS = Path("/proc/self/task")


def main(arguments: list[str] | None = None) -> int:
    if _TASKS.exists():
        threading.Thread(target=_end_if_stuck, name="stuck", daemon=True).start()
    try:
        torchrun(arguments)
    except ChildFailedError as failed:
        return _code_of([each.exitcode for each in failed.failures.values()]) or 1
    except SignalException as stopped:
        # The learner processes have ended. This process ends by the same signal, so that its parent sees the signal.
        signal.signal(stopped.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), stopped.sigval)
    return 0


def _end_if_stuck() -> None:
    """End this process if all learner processes have ended and torchrun has not noticed for
    CHECKS_MAX checks.

    Time is counted in checks, as in `ranks.watchdog`, so that a pause of this process does not
    count.
    """
    checks, codes = 0, list[int | None]()
    while checks < CHECKS_MAX:
        time.sleep(CHECK_S)
        try:
            codes = list(_unreaped_children())
        except OSError:
            # torchrun has reaped one of them meanwhile, so it is not stuck.
            codes = []
        checks = checks + 1 if codes and None not in codes else 0
    print("learner: torchrun is stuck: its store does not answer", file=sys.stderr)  # noqa: T201
    os._exit(_code_of(codes))


def _code_of(codes: Sequence[int | None]) -> int:
    """One exit code for all processes of this host."""
    return OPERATOR_FAULT if OPERATOR_FAULT in codes else int(any(codes))


def _unreaped_children() -> Iterator[int | None]:
    """Yield each child's exit code without reaping it: None if it runs, -N if signal N ended it."""
    for pid in [
        pid for task in _TASKS.iterdir() for pid in (task / "children").read_text().split()
    ]:
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

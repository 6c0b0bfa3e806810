"""torchrun, but for how it ends: `python -m learner.torchrun --nproc-per-node 8 -m learner --config run.toml`.

torchrun exits with 1 whatever happened, and a service manager would start again what the operator has to mend. This
takes torchrun's arguments, and ends as the learner does: 0 done, 2 where a process on this host had the operator's
mistake, else 1; told to stop, by that signal. What processes on other hosts say is theirs.
"""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

OPERATORS_MISTAKE = 2


def main(arguments: list[str] | None = None) -> int:
    try:
        torchrun(arguments)
    except ChildFailedError as failed:
        return OPERATORS_MISTAKE if OPERATORS_MISTAKE in [each.exitcode for each in failed.failures.values()] else 1
    except SignalException as told:  # the processes have ended
        signal.signal(told.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), told.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())

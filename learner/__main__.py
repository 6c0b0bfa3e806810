"""`python -m learner --config run.toml [--resume]`: train until the last step.

On N GPUs, or with N processes on a CPU: `python -m learner.torchrun --nproc-per-node N -m learner ...`.
Exit code 0: done, or stopped by SIGINT or SIGTERM after the step at hand, checkpointed; 1: failed while running, and
`--resume` goes on; 2: the operator's mistake, or what would come again: a second learner (the older one ends, and to
start it again would end the newer one), a gradient that is no number. A second signal ends it at once.
"""

import argparse
import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from echo2d.client import (
    Coordinator,
    Fenced,
    IntegrityFault,
    OperatorFault,
    PeerFault,
    StoreFault,
)
from echo2d.config_tables import print_tables
from learner.batch_prefetch import BatchPrefetch
from learner.config import LearnerConfig, Place, notifier, place

if TYPE_CHECKING:
    from learner.ranks import Rendezvous

ASK_S_MAX = 5.0  # for torchrun's store to say who failed first: it answers within milliseconds, or its host is gone


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.print_config:
        print(print_tables(LearnerConfig), end="")  # noqa: T201 - it was asked for
        return 0
    here = place()
    which = f"rank={here.rank} " if here.rank else ""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s {which}%(message)s"
    )
    ranks = _OneLine(here)
    try:
        _run(options, here, ranks)
    except Fenced as fault:
        return ranks.last_word(f"a newer learner has the run ({fault}); this one is over", 2)
    except (OperatorFault, FloatingPointError) as fault:
        return ranks.last_word(str(fault), 2)
    except (PeerFault, IntegrityFault, StoreFault, OSError) as fault:
        return ranks.last_word(str(fault), 1)
    except Exception as error:  # noqa: BLE001 - the only one: nobody waits for a rank that has failed at anything
        if ranks.is_loss(error):
            return ranks.last_word(f"lost another rank: {error}", 1)
        traceback.print_exc()
        return ranks.last_word(f"{type(error).__name__}: {error}", 1)
    return 0


class _OneLine:
    """The last word is of the rank that failed first; before they have met, of the first on each host."""

    def __init__(self, here: Place) -> None:
        self._here = here
        self._code = 0  # of its own last word
        self.met: Rendezvous | None = None

    def last_word(self, line: str, code: int) -> int:
        self._code = self._code or code
        is_first = self._here.local_rank == 0 if self.met is None else self.met.first_to_say(line)
        if is_first:
            self._say(line)
        return code

    def lose(self, reason: str) -> None:
        """End at once: what waits for a lost rank may wait for ever, as may who asks a lost host.

        With the code of its own last word, if that has been said: what was lost since is not why it ends.
        """
        line = f"lost another rank: {reason}"
        asks = threading.Thread(target=self.last_word, args=(line, 1), daemon=True)
        asks.start()
        asks.join(ASK_S_MAX)
        if asks.is_alive():
            self._say(line)
        os._exit(self._code or 1)

    def _say(self, line: str) -> None:
        who = f"rank {self._here.rank}: " if self._here.rank else ""
        print(f"learner: {who}{' '.join(line.split())}", file=sys.stderr)  # noqa: T201

    def is_loss(self, error: Exception) -> bool:
        return self.met is not None and self.met.is_loss(error)


def _run(options: argparse.Namespace, here: Place, ranks: _OneLine) -> None:
    config, prefetch = LearnerConfig.load(options.config), BatchPrefetch()
    service = notifier(here)
    if here.size > 1:
        from learner.ranks import Rendezvous

        ranks.met = Rendezvous(here)
    with contextlib.ExitStack() as stack:
        coordinator = None
        if here.rank == 0:
            opened = Coordinator(
                config.url, token_file=config.token_file, timeout_s=config.patience_s
            )
            coordinator = stack.enter_context(opened)

        def stop(reason: str) -> None:
            service.stopping(f"stopping ({reason}) after the step at hand")
            if coordinator is not None:
                coordinator.hurry()
            prefetch.stop()

        stop_on_signals(stop)
        service.starting("loading the model")
        from learner.train import (
            Learner,
        )  # torch takes seconds; a wrong configuration is told before

        joined = None if ranks.met is None else ranks.met.join(config, lost=ranks.lose)
        learner = Learner(
            config,
            cast("Coordinator", coordinator),
            prefetch,
            resume=options.resume,
            service=service,
            ranks=joined,
        )
        learner.run()
        if ranks.met is not None:
            ranks.met.leave()
        if options.profile and here.rank == 0:
            print(f"profile: {learner.watch}")  # noqa: T201 - it was asked for


def stop_on_signals(stop: Callable[[str], None]) -> None:
    """The first SIGINT or SIGTERM calls `stop` with its name; the next one of either kind ends the process."""

    def first(number: int, _: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        stop(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, first)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m learner", description="Train a policy by GRPO."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, help="TOML file with a [learner] table")
    what.add_argument(
        "--print-config", action="store_true", help="print every key of that table, and end"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if there is one"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="at the end, print where the time of train steps went",
    )
    return parser.parse_args(arguments)


def end_with(code: int) -> NoReturn:
    """When all threads are done, and without what libraries do at the end: a board's waits for its network."""
    atexit.register(_end, code)  # whoever came last is called first
    sys.exit(code)


def _end(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    end_with(main())

"""`python -m learner --config run.toml [--resume]`: train until the last step.

Exit code 0: done, or stopped by SIGINT or SIGTERM after the step at hand, checkpointed; 1: failed while running, and
`--resume` goes on; 2: the operator's mistake, among them a second learner: the older one ends, and to start it again
would end the newer one. A second signal ends it at once.
"""

import argparse
import gc
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from echo2d.client import (
    Coordinator,
    Fenced,
    IntegrityFault,
    OperatorFault,
    PeerFault,
    StoreFault,
    print_tables,
)
from learner.config import LearnerConfig, notifier
from learner.intake import Intake


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.print_config:
        print(print_tables(LearnerConfig), end="")  # noqa: T201 - it was asked for
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        _run(options.config, resume=options.resume, profile=options.profile)
    except Fenced as fault:
        return _last_word(f"a newer learner has the run ({fault}); this one is over", 2)
    except OperatorFault as fault:
        return _last_word(str(fault), 2)
    except (PeerFault, IntegrityFault, StoreFault, OSError, FloatingPointError) as fault:
        return _last_word(str(fault), 1)
    return 0


def _last_word(line: str, code: int) -> int:
    print(f"learner: {line}", file=sys.stderr)  # noqa: T201
    return code


def _run(path: Path, *, resume: bool, profile: bool) -> None:
    config, service, intake = LearnerConfig.load(path), notifier(), Intake()
    with Coordinator(config.url, token_file=config.token_file, timeout_s=config.patience_s) as coordinator:

        def stop(reason: str) -> None:
            service.stopping(f"stopping ({reason}) after the step at hand")
            coordinator.hurry()
            intake.stop()

        stop_on_signals(stop)
        service.starting("loading the model")
        from learner.train import Learner  # torch takes seconds; a wrong configuration is told before

        learner = Learner(config, coordinator, intake, resume=resume, service=service)
        learner.run()
        if profile:
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
    parser = argparse.ArgumentParser(prog="python -m learner", description="Train a policy by GRPO.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, help="TOML file with a [learner] table")
    what.add_argument("--print-config", action="store_true", help="print every key of that table, and end")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--profile", action="store_true", help="at the end, print where the time of train steps went")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    code = main()
    gc.freeze()  # a search for garbage in all of torch takes a second, and the process ends
    sys.exit(code)

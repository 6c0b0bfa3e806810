"""`echo2d learn --config run.toml [--resume]`: train until the last step.

In a checkout `python -m learner` starts it too. On N GPUs, or with N processes on a CPU:
`python -m echo2d.learner.torchrun --nproc-per-node N -m echo2d.learner ...`. The first SIGINT or
SIGTERM stops the learner: it saves a checkpoint within learner.stop_within_s, in the middle of a
step if need be. A second one ends it at once.

Exit codes:
0   The last step is done, or a signal stopped the learner; a checkpoint has been saved.
1   The learner failed while running; start it again with `--resume`.
2   Starting it again would fail again: a mistake in the configuration, rows that do not fit (--plan),
    gradients that are not finite for any data, or another learner has the run (--take-over ends its
    session).
"""

import argparse
import atexit
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
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
from echo2d.config.checks import answer_tokens, file_cautions
from echo2d.config.run import module_folders
from echo2d.config.tables import folder_of, print_tables
from echo2d.extras import install_command
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig, Place, grow_memory_in_place, notifier, place
from echo2d.learner.notice import NoticeWatch, asker
from echo2d.learner.saving.identity import own
from echo2d.learner.saving.remote import RemoteCheckpoints
from echo2d.logs import LEVELS, start_logging
from echo2d.stop_signals import SIGNALS, stop_told

if TYPE_CHECKING:
    from echo2d.learner.ranks.ranks import Ranks, Rendezvous
    from echo2d.learner.sft import SftSource
    from echo2d.learner.tinker.serve import OperationSource
    from echo2d.learner.tinker.trainer import Trainer

# Each of these options needs one of the options to its right.
_GO_WITH = {
    "ranks": ("plan",),
    "gpu_gib": ("plan",),
    "merge": ("export",),
    "json": ("plan", "export"),
}
# --serve is refused with any of these.
_NOT_WITH_SERVE = ("resume", "sft", "plan", "export")

log = logging.getLogger("echo2d.learner")


def main(arguments: list[str] | None = None) -> int:
    grow_memory_in_place()
    options = _parse(arguments)
    if options.print_config:
        from echo2d.learner.sft import SftTable

        print(print_tables(LearnerConfig, SftTable), end="")  # noqa: T201 - it was asked for
        return 0
    here = place()
    failures = _FailureReport(here)
    try:
        start_logging(
            LEVELS[options.log_level],
            as_json=options.log_json,
            file=options.log_file,
            facts={"rank": here.rank} if here.rank else None,
        )
        if options.plan:
            return _plan(options)
        if options.export:
            return _export(options, here)
        _run(options, here, failures)
    except Fenced as fault:
        return failures.report(f"a newer learner has the run ({fault}); this one is over", 2)
    except (OperatorFault, FloatingPointError) as fault:
        return failures.report(str(fault), 2)
    except (PeerFault, IntegrityFault, StoreFault, OSError) as fault:
        return failures.report(str(fault), 1)
    except Exception as error:  # noqa: BLE001 - any failure must be reported to the other ranks
        if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers"):
            needs = f"the learner needs {error.name}: {install_command('torch')}"
            return failures.report(needs, 2)
        if failures.is_lost_rank(error):
            return failures.report(f"lost another rank: {error}", 1)
        traceback.print_exc()
        return failures.report(f"{type(error).__name__}: {error}", 1)
    return 0


class _FailureReport:
    """Prints one line for a failure of the whole job: the line of the rank that failed first.

    The other ranks fail because of that failure, and end without output. Before the ranks have met, the first
    rank of each host prints.
    """

    def __init__(self, here: Place) -> None:
        self._here = here
        self._code = 0  # exit code of this rank's own first failure
        self.rendezvous: Rendezvous | None = None

    def report(self, line: str, code: int) -> int:
        """Print the line if this rank is the first to fail. Returns `code`."""
        self._code = self._code or code
        if self._is_first(line):
            self._print(line)
        return code

    def _is_first(self, line: str) -> bool:
        if self.rendezvous is None:
            return self._here.local_rank == 0
        return self.rendezvous.is_first_failure(line)

    def lose(self, reason: str) -> None:
        """End the process at once, because another rank is lost.

        The process does not end in order, because a collective with a lost rank, or a call to a lost host,
        may block for ever. If this rank itself had failed before, the exit code is that of its own failure.
        """
        line = f"lost another rank: {reason}"
        report = threading.Thread(target=self.report, args=(line, 1), daemon=True)
        report.start()
        # torchrun's store answers within milliseconds which rank failed first, unless its host is lost.
        report.join(5.0)
        if report.is_alive():
            # The store does not answer. Then two ranks may print, which is better than none.
            self._print(line)
        os._exit(self._code or 1)

    def is_lost_rank(self, error: Exception) -> bool:
        return self.rendezvous is not None and self.rendezvous.is_lost_rank(error)

    def _print(self, line: str) -> None:
        who = f"rank {self._here.rank}: " if self._here.rank else ""
        print(f"learner: {who}{' '.join(line.split())}", file=sys.stderr)  # noqa: T201


def _load(options: argparse.Namespace) -> LearnerConfig:
    """Load the config, and make the operator's own functions that it names importable."""
    if options.sft:
        from echo2d.learner.sft import SftConfig

        config = SftConfig.load(options.config, options.settings).learner
    else:
        # The clients of --serve say how much is trained, so its file need not have learner.steps.
        given = ["learner.steps=1"] if options.serve else []
        config = LearnerConfig.load(options.config, [*given, *options.settings])
    if config.advantages or config.loss or config.notice:
        # These folders come after all installed modules, because a file in them must not replace a library.
        sys.path += map(str, module_folders(options.config, options.settings))
    return config


def _source(options: argparse.Namespace) -> "SftSource":
    from echo2d.learner.sft import SftConfig, SftSource

    return SftSource(SftConfig.load(options.config, options.settings))


def _plan(options: argparse.Namespace) -> int:
    """Print the plan. Returns the exit code: 2 if the rows do not fit."""
    config = _load(options)
    if options.ranks < 1 or options.gpu_gib < 0:
        raise OperatorFault("--ranks and --gpu-gib: expected positive numbers")
    from echo2d.learner.model.load import check_teacher
    from echo2d.learner.plan import as_json, device_for, lines, plan

    if config.teacher:
        check_teacher(config.model, config.teacher)
    device = device_for(config, options.ranks, options.gpu_gib)
    answer = _source(options).rules().answer_tokens if options.sft else 0
    answer = answer or answer_tokens(options.config, options.settings)
    found = plan(config, options.ranks, device, answer)
    model = json.loads((config.model / "config.json").read_text())
    cautions = file_cautions(options.config, options.settings, model)
    said = [*lines(found, config), *(f"CAUTION: {each}" for each in cautions)]
    print(as_json(found, cautions) if options.json else "\n".join(said))  # noqa: T201
    return 0 if found.fits else 2


def _export(options: argparse.Namespace, here: Place) -> int:
    """Write a checkpoint as a Hugging Face directory, and print what was written. Returns 0."""
    config, (step, directory) = _load(options), options.export
    if here.size > 1:
        raise OperatorFault("--export needs one process; start it without echo2d.learner.torchrun")
    from echo2d.learner.model import lora
    from echo2d.learner.model.load import empty_model
    from echo2d.learner.saving.export import ModelFacts, export
    from echo2d.learner.saving.layout import layout_of

    model = empty_model(config.model)
    layout = layout_of(model, config.model)
    if config.lora_rank:
        lora.attach(model, config)
    facts = ModelFacts(model.state_dict(), lora.trained(model), layout)
    done = export(config, step, Path(directory), facts, merge=options.merge)
    print(done.as_json() if options.json else done.line())  # noqa: T201 - it was asked for
    return 0


def _hand_over(options: argparse.Namespace, out_dir: Path, step: int) -> None:
    """Write the model of --sft after its last step, unless it is there, and say how a run begins with it."""
    model, folder = out_dir / f"model-{step}", folder_of(options.config)
    if not model.exists():
        options.export, options.merge = (str(step), model), bool(_load(options).lora_rank)
        _export(options, Place())
    path = model.relative_to(folder) if model.is_relative_to(folder) else model
    print(f'a run begins with it by: run.base_model = "{path}"')  # noqa: T201


def _run(options: argparse.Namespace, here: Place, failures: _FailureReport) -> None:
    config, prefetch = _load(options), BatchPrefetch()
    if here.rank == 0 and options.resume and config.checkpoint_url:
        RemoteCheckpoints(config.checkpoint_url).bring_identity(config.out_dir)
    source = _source(options) if options.sft and here.rank == 0 else None
    config = config if source is None else source.config
    service = notifier(here)
    if here.size > 1:
        from echo2d.learner.ranks.ranks import Rendezvous

        failures.rendezvous = Rendezvous(here)
    with contextlib.ExitStack() as stack:
        coordinator, identity = None, ""
        if here.rank == 0:
            identity = own(config.out_dir, stack, take_over=options.take_over)
            if source is None:
                opened = Coordinator(
                    config.url, token_file=config.token_file, timeout_s=config.patience_s
                )
                coordinator = stack.enter_context(opened)

        def stop(reason: str) -> None:
            service.stopping(f"stopping ({reason})")
            if coordinator is not None:
                coordinator.hurry()
            prefetch.stop()

        stop_on_signals(stop)
        _watch_notice(config, here, stack, stop)
        service.starting("loading the model")
        log.info("loading model=%s", config.model)
        # The import of torch takes seconds, so mistakes in the configuration are reported before it.
        rendezvous = failures.rendezvous
        joined = None if rendezvous is None else rendezvous.join(config, lost=failures.lose)
        if options.serve:
            from echo2d.learner.tinker.serve import serve

            serve(
                _trainer(config, coordinator, joined),
                cast("OperationSource | None", coordinator),
                stopped=lambda: prefetch.stopped,
                identity=identity,
                take_over=options.take_over,
                service=service,
            )
            _leave(rendezvous)
            return
        from echo2d.learner.sft_train import SftLearner
        from echo2d.learner.train import Learner

        learner = (SftLearner if options.sft else Learner)(
            config,
            cast("Coordinator", coordinator or source),
            prefetch,
            resume=options.resume,
            identity=identity,
            take_over=options.take_over,
            service=service,
            ranks=joined,
        )
        made = config.out_dir / f"model-{config.steps}"
        if source is not None and learner.step < config.steps and made.exists():
            raise OperatorFault(
                f"{made} is the model of another training; move it away, or use another sft.out_dir"
            )
        learner.run()
        _leave(rendezvous)
        if source is not None and learner.step >= config.steps:
            _hand_over(options, config.out_dir, learner.step)
        if options.profile and here.rank == 0:
            print(f"profile: {learner.watch}")  # noqa: T201 - it was asked for


def _leave(rendezvous: "Rendezvous | None") -> None:
    """End in order, if there are other ranks."""
    if rendezvous is not None:
        rendezvous.leave()


def _trainer(
    config: LearnerConfig, coordinator: Coordinator | None, ranks: "Ranks | None"
) -> "Trainer":
    """The trainer of --serve. coordinator: None on other ranks than 0."""
    from echo2d.learner.tinker.trainer import Trainer

    if coordinator is None:
        return Trainer(config, ranks=ranks)
    return Trainer(config, coordinator.publish, coordinator.run_id, ranks)


def _watch_notice(
    config: LearnerConfig, here: Place, stack: contextlib.ExitStack, stop: Callable[[str], None]
) -> None:
    """Call `stop` once it is known that this machine will be taken away, until `stack` ends. One rank of each
    host asks.
    """
    if config.notice and here.local_rank == 0:
        watch = NoticeWatch(asker(config.notice), lambda reason: stop(f"notice: {reason}"))
        stack.callback(watch.stop)
        watch.start()


def stop_on_signals(stop: Callable[[str], None]) -> None:
    """Call `stop` with the signal's name on the first SIGINT or SIGTERM. The next signal ends the process, unless
    it comes within SAME_STOP_S of the first (`stop_signals`).
    """

    def first(number: int, _: object) -> None:
        stop_told()
        stop(signal.Signals(number).name)

    for number in SIGNALS:
        signal.signal(number, first)


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"learner: {message}; see `{self.prog} --help`\n")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="echo2d learn", description="Train a policy by GRPO.", allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, help="TOML file with a [learner] table")
    what.add_argument(
        "--print-config", action="store_true", help="print every key of that table and exit"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="another value of a key, such as learner.lr=1e-5; may be given several times",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint, if any"
    )
    parser.add_argument(
        "--sft",
        action="store_true",
        help="train on the answers of the task's rows, without a coordinator (supervised fine-tuning)",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the training calls of the Tinker API for a coordinator started by `echo2d tinker`",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="end the session of another learner that has the run",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print how much memory the run needs and which answers fit, and exit",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="with --plan: how many GPUs or processes share a model"
    )
    parser.add_argument(
        "--gpu-gib",
        type=float,
        default=0.0,
        help="with --plan: plan for GPUs with this much memory",
    )
    parser.add_argument(
        "--export",
        nargs=2,
        metavar=("STEP", "DIR"),
        help="write the checkpoint of STEP, a number or `last`, to a Hugging Face directory, and exit",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="with --export: write the base model with the adapter added, instead of the adapter",
    )
    parser.add_argument(
        "--json", action="store_true", help="with --plan and --export: one JSON object"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print at the end how train steps spent their time"
    )
    parser.add_argument("--log-level", choices=sorted(LEVELS), default="info")
    parser.add_argument("--log-json", action="store_true", help="log one JSON object per line")
    parser.add_argument(
        "--log-file", type=Path, help="log to this file, of bounded size, instead of stderr"
    )
    options = parser.parse_args(arguments)
    for name, others in _GO_WITH.items():
        given = getattr(options, name) != parser.get_default(name)
        if given and not any(getattr(options, other) for other in others):
            needs = " or ".join(f"--{other}" for other in others)
            parser.error(f"--{name.replace('_', '-')} needs {needs}")
    if options.serve and (other := next(filter(partial(getattr, options), _NOT_WITH_SERVE), None)):
        parser.error(f"--serve does not go with --{other}")
    return options


def end_with(code: int) -> NoReturn:
    """Exit once all threads have ended, without the exit handlers of libraries: that of a tracker waits
    for its network.
    """
    # Handlers run in reverse order of registration, so this one runs first and ends the process.
    atexit.register(_exit_now, code)
    sys.exit(code)


def _exit_now(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    end_with(main())

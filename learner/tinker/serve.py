"""The loop of `echo2d learn --serve`: take a client's call from the coordinator, run it, answer, and so on.

    open a session --> take a call (a long poll) --> run it --> answer --> take the next one ... --> told to stop

The coordinator puts the calls in order and gives one at a time. A call that fails is answered with one line, and the
loop goes on. When it is told to stop, it finishes the call that it runs, and the states that it writes. The models in
memory end with the process; what clients saved stays, and so do the states of optimizer steps. From these, and from
the calls after them, the coordinator has the next learner make the models again.

Of several ranks rank 0 alone talks to the coordinator. It sends each call to the others, and all run it.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from echo2d.client import (
    Fenced,
    OperationFailed,
    OperationResult,
    Session,
    TinkerOperation,
    Unanswered,
    Unreachable,
)
from echo2d.learner.tinker.sums import WrongCall
from echo2d.learner.tinker.trainer import Trainer
from echo2d.sd_notify import Notifier
from echo2d.tinker.wire import Malformed

log = logging.getLogger("echo2d.learner")


class OperationSource(Protocol):
    """What the loop needs of `Coordinator`."""

    def open_session(
        self, resume_step: int, *, learner: str = "", take_over: bool = False, steps: int = 0
    ) -> Session: ...

    def take_operation(self, saved: Sequence[tuple[str, int]] = ()) -> TinkerOperation | None: ...

    def end_operation(self, operation: TinkerOperation, result: OperationResult) -> None: ...


def serve(
    trainer: Trainer,
    coordinator: OperationSource | None,
    *,
    stopped: Callable[[], bool],
    identity: str = "",
    take_over: bool = False,
    service: Notifier | None = None,
) -> None:
    """Serve calls until `stopped` returns True on any rank. coordinator: None on other ranks than 0."""
    service = service or Notifier()
    source = cast("OperationSource", coordinator)
    with contextlib.suppress(Unanswered):
        # Unanswered: it was told to stop while it waited.
        session = trainer.ranks.share(
            lambda: source.open_session(0, learner=identity, take_over=take_over)
        )
        log.info("session epoch=%d serves calls of the Tinker API", session.epoch)
        try:
            _serve(trainer, source, stopped, service)
        finally:
            trainer.states.settle()
    log.info("stopped; models that the next learner makes again: %d", trainer.models)


def _serve(
    trainer: Trainer, coordinator: OperationSource, stopped: Callable[[], bool], service: Notifier
) -> None:
    def take() -> TinkerOperation | None:
        saved = trainer.states.written()
        operation = coordinator.take_operation(saved)
        # Only now: if the call failed, the next one must report them again.
        trainer.states.forget(saved)
        return operation

    last: tuple[TinkerOperation, OperationResult] | None = None
    while not trainer.ranks.highest(int(stopped())):
        service.turned(lambda: f"serves calls of the Tinker API; {trainer.models} models in memory")
        operation = trainer.ranks.share(take)
        if operation is None:
            continue
        # The coordinator gives a call again if it did not receive the answer, and a gradient must not be added twice.
        # After the coordinator itself has begun again, calls that have run must run again: each model is first created
        # or loaded, and that call takes the place of the last one here.
        if last is None or last[0] != operation or not operation.model:
            last = operation, result_of(trainer, operation)
        answered = operation, last[1]
        trainer.ranks.share(lambda: coordinator.end_operation(*answered))  # noqa: B023 - called here


def result_of(trainer: Trainer, operation: TinkerOperation) -> OperationResult:
    """The result of a call, or why it has none. Any exception: the ranks are not in step any more."""
    try:
        return trainer.run(operation)
    except (WrongCall, Malformed) as wrong:
        level = logging.INFO if trainer.ranks.leads else logging.DEBUG
        log.log(level, "refused kind=%s model=%s: %s", operation.kind, operation.model, wrong)
        return OperationFailed(str(wrong))
    except (Fenced, Unanswered, Unreachable):
        raise
    except Exception as error:
        if trainer.broken:
            raise
        log.exception("failed kind=%s model=%s", operation.kind, operation.model)
        line = " ".join(str(error).split())
        return OperationFailed(f"{type(error).__name__}: {line}", "server")

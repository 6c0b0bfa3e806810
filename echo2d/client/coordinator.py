"""The client for programs without asyncio."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any, Self, TypeVar

from echo2d.client.async_coordinator import AsyncCoordinator, Evaluation, Published, Session
from echo2d.client.batches import Batch
from echo2d.client.faults import Unanswered
from echo2d.client.tinker import OperationResult, TinkerOperation
from echo2d.core.protocol.trajectory import Attachment, StepFigures, TrajectoryScore
from echo2d.net.security.auth import read_token_file

# A reachable coordinator answers a call within this time.
HURRY_S = 10.0

_Result = TypeVar("_Result")


class Coordinator:
    """A connection to a coordinator, for programs without asyncio.

    It runs an `AsyncCoordinator` in an event loop in its own thread. Threads may call it at
    the same time. The methods are those of `AsyncCoordinator`.
    """

    def __init__(self, url: str, *, token_file: Path, timeout_s: float = 60.0) -> None:
        # The file is read now, so that a wrong one is reported before the first call.
        self.run_id: str = read_token_file(token_file).run_id
        self._inner = AsyncCoordinator(url, token_file=token_file, timeout_s=timeout_s)
        self._hurried_at = float("inf")
        # Held while a call is passed to the loop, so that `close` cancels every call in the loop.
        self._submitting = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="echo2d-client", daemon=True
        )
        self._thread.start()

    def open_session(
        self, resume_step: int, *, learner: str = "", take_over: bool = False, steps: int = 0
    ) -> Session:
        opening = self._inner.open_session(
            resume_step, learner=learner, take_over=take_over, steps=steps
        )
        return self._wait(opening)

    def rules(self) -> Session:
        return self._wait(self._inner.rules())

    def publish(self, version: int, directory: Path, manifest: bytes | None = None) -> Published:
        return self._wait(self._inner.publish(version, directory, manifest))

    def take_batch(self, step: int) -> Batch:
        return self._wait(self._inner.take_batch(step))

    def commit(
        self,
        batch: Batch,
        *,
        t_train_s: float,
        scores: Sequence[TrajectoryScore] = (),
        figures: StepFigures | None = None,
    ) -> int:
        return self._wait(
            self._inner.commit(batch, t_train_s=t_train_s, scores=scores, figures=figures)
        )

    def attachment(self, wanted: Attachment) -> bytes:
        return self._wait(self._inner.attachment(wanted))

    def refuse(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        self._wait(self._inner.refuse(batch, reasons))

    def checkpoint(self, step: int) -> None:
        self._wait(self._inner.checkpoint(step))

    def evaluations(self, after: int = 0) -> list[Evaluation]:
        return self._wait(self._inner.evaluations(after))

    def evaluate(self, version: int, after: int = 0) -> tuple[list[Evaluation], list[str]]:
        return self._wait(self._inner.evaluate(version, after))

    def take_operation(self, saved: Sequence[tuple[str, int]] = ()) -> TinkerOperation | None:
        return self._wait(self._inner.take_operation(saved))

    def end_operation(self, operation: TinkerOperation, result: OperationResult) -> None:
        self._wait(self._inner.end_operation(operation, result))

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        return self._wait(self._inner.samples(step))

    def status(self) -> dict[str, Any]:
        return self._wait(self._inner.status())

    def role(self) -> str:
        return self._wait(self._inner.role())

    def own_status(self) -> dict[str, Any]:
        return self._wait(self._inner.own_status())

    def hurry(self) -> None:
        """Give each call, including those under way, HURRY_S before it raises Unanswered.

        A signal handler may call this.
        """
        self._hurried_at = time.monotonic()

    def close(self) -> None:
        """End the connection. Calls under way in other threads, and later ones, raise
        CancelledError.
        """
        with self._submitting:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._inner.close()

    def _wait(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        with self._submitting:
            if self._closed:
                call.close()
                raise CancelledError("the connection is closed")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        started_at = time.monotonic()
        # A waiting call notices `hurry` within 0.5 s.
        while not wait([future], 0.5).done:
            if time.monotonic() > max(started_at, self._hurried_at) + HURRY_S:
                future.cancel()
                raise Unanswered(f"the coordinator did not answer within {HURRY_S:g} s")
        return future.result()

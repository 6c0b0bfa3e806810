"""Batches, taken in a thread of their own while the learner trains; and the way to stop it from a signal handler.

At most one batch is asked for at a time. Not here: what is in a batch.
"""

import contextlib
import queue
import threading
from collections.abc import Callable

from echo2d.client import Batch


class BatchPrefetch:
    """`request` a step, later `wait` for its batch."""

    def __init__(self) -> None:
        self.stopped = False
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Batch | Exception | None] = queue.SimpleQueue()

    def start(self, take: Callable[[int], Batch]) -> None:
        """Take batches with `take`, which blocks; the thread does not outlive the process."""
        threading.Thread(target=self._run, args=(take,), name="intake", daemon=True).start()

    def request(self, step: int) -> None:
        self._wanted.put(step)

    def wait(self, alive: Callable[[], float | None]) -> Batch | None:
        """The batch of the last `request`, None if the learner is to stop; raises what taking it raised.

        alive: called at first, then now and then; it tells for how many seconds it need not be called (None: ever).
        """
        while not self.stopped:
            patience_s = alive()
            with contextlib.suppress(queue.Empty):
                arrived = self._arrived.get(timeout=patience_s)
                if isinstance(arrived, Exception):
                    raise arrived
                return arrived
        return None

    def stop(self) -> None:
        """Make `wait` return None, now and later. May be called from a signal handler."""
        self.stopped = True
        self._arrived.put(None)

    def _run(self, take: Callable[[int], Batch]) -> None:
        while True:
            step = self._wanted.get()
            try:
                self._arrived.put(take(step))
            except Exception as error:  # noqa: BLE001 - raised again where the batch is awaited
                self._arrived.put(error)

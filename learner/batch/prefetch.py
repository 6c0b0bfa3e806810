"""Fetch the next batch in a thread while the learner trains on the present one.

At most one batch is requested at a time. `stop` may be called from a signal handler and ends a
wait. Not here: what is in a batch (`checks`).
"""

import contextlib
import queue
import threading
from collections.abc import Callable

from echo2d.client import Batch


class BatchPrefetch:
    """`request` a step's batch, then `wait` for it."""

    def __init__(self) -> None:
        self.stopped = False
        # A SimpleQueue may be put to from a signal handler; a Queue could deadlock there.
        self._requested: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Batch | Exception | None] = queue.SimpleQueue()

    def start(self, take: Callable[[int], Batch]) -> None:
        """Start the thread that calls `take`, which may block. The thread is a daemon."""
        threading.Thread(target=self._run, args=(take,), name="batch-prefetch", daemon=True).start()

    def request(self, step: int) -> None:
        self._requested.put(step)

    def wait(self, alive: Callable[[], float | None]) -> Batch | None:
        """Return the batch of the last `request`, or None if the learner is to stop.

        An exception of `take` is raised here. `alive` is called at once and then again and again;
        it returns the seconds until it wants its next call (None: it wants none).
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
        # Wakes up a `wait` that has already begun.
        self._arrived.put(None)

    def _run(self, take: Callable[[int], Batch]) -> None:
        while True:
            step = self._requested.get()
            try:
                self._arrived.put(take(step))
            except Exception as error:  # noqa: BLE001 - raised again in `wait`
                self._arrived.put(error)

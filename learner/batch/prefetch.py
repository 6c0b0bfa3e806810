"""Fetch the next batch in a thread while the learner trains on the present one.

A step is fetched once, however often it is requested, until `forget` says that its batch has changed. So a
batch with refused groups can be fetched again while the next one is still under way. `stop` may be called
from a signal handler and ends a wait. Not here: what is in a batch (`checks`).
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from echo2d.client import Batch


class BatchPrefetch:
    """Fetches batches: call `start`, then `request` a step's batch and `wait` for it."""

    def __init__(self) -> None:
        # When `stop` was called first, in monotonic seconds; None: it was not.
        self.stopped_at: float | None = None
        self._take: Callable[[int], Batch] | None = None
        self._found: dict[int, Batch | Exception | None] = {}  # None: under way
        # A signal handler may put to a SimpleQueue; a Queue could deadlock there.
        self._arrived: queue.SimpleQueue[tuple[int, Batch | Exception] | None] = queue.SimpleQueue()

    @property
    def stopped(self) -> bool:
        return self.stopped_at is not None

    def start(self, take: Callable[[int], Batch]) -> None:
        """Set the call that takes a batch. It may block, and runs in a daemon thread of its own."""
        self._take = take

    def request(self, step: int) -> None:
        """Begin to take this step's batch, unless it was requested before."""
        if step not in self._found:
            self._found[step] = None
            threading.Thread(target=self._run, args=(step,), name="batch", daemon=True).start()

    def forget(self, step: int) -> None:
        """The batch of this step has changed: the next request takes it again."""
        self._found.pop(step, None)

    def wait(self, step: int, alive: Callable[[], float | None]) -> Batch | None:
        """Return the batch of a step that was requested, or None if the learner is to stop.

        An exception of `take` is raised here. While this waits it calls `alive`, which returns the seconds
        until its next call (None: it is not called again).
        """
        while not self.stopped:
            if (found := self._found[step]) is not None:
                # Later steps are kept.
                self._found = {key: each for key, each in self._found.items() if key >= step}
                if isinstance(found, Exception):
                    raise found
                return found
            patience_s = alive()
            with contextlib.suppress(queue.Empty):
                if (arrived := self._arrived.get(timeout=patience_s)) is not None:
                    key, found = arrived
                    self._found[key] = found
        return None

    def stop(self) -> None:
        """Make `wait` return None, now and later. May be called from a signal handler."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
        # Wakes up a `wait` that has already begun.
        self._arrived.put(None)

    def _run(self, step: int) -> None:
        assert self._take is not None
        try:
            self._arrived.put((step, self._take(step)))
        except Exception as error:  # noqa: BLE001 - raised again in `wait`
            self._arrived.put((step, error))

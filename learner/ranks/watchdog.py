"""Notice within a bounded time that another rank has disappeared without a message.

    heartbeat   every silence_s / CHECKS seconds each rank increments its counter in torchrun's
                store and reads the counter of the next rank
    loss        after CHECKS checks without a new count the watchdog calls `lost`, and this rank ends.
                Then the rank before it gets no new counts and ends too, and so on until all have ended

torch notices a connection that is reset. The watchdog covers failures that reset nothing: a host without
power, a network that drops packets, a stopped process, a store that does not answer. Invariants:

- A counter shows life, not progress: a rank may work on one thing for any length of time.
- Time is counted in checks, so that a pause of the whole machine is not a loss.
- A rank that has not started yet, or has left in order, is not missed.
- Once any rank has failed, the other ranks ignore heartbeats, so that those that wait for the failed rank
  end. A failed rank does not ignore them, because it may be saving a checkpoint with other failed ranks.
"""

import contextlib
import threading
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

CHECKS = 8  # per `silence_s`; several, because a thread may be scheduled too late for some
FIRST_FAILURE = "first failure"  # key in the store: rank and message of the rank that failed first


class RankWatchdog:
    """Sends this rank's heartbeats and checks those of the next rank, in two threads.

    store: on a connection of its own, because a call may block for ever.
    lost: called at most once, in a thread, with the reason.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, silence_s: float, lost: Callable[[str], object]
    ) -> None:
        self._store = store
        self._rank, self._next = rank, (rank + 1) % size
        self._silence_s = silence_s
        self._lost = lost
        self._heard = False
        self._failed = False
        self._left = threading.Event()
        self._heartbeats = threading.Thread(
            target=self._exchange_heartbeats, name="rank-heartbeats", daemon=True
        )
        self._heartbeats.start()
        # The timer has its own thread, because the other one hangs when the store does not answer.
        threading.Thread(target=self._watch, name="rank-watchdog", daemon=True).start()

    def fail(self) -> None:
        """This rank has failed and is shutting down: another rank's failure no longer ends it."""
        self._failed = True

    def leave(self) -> None:
        """End in order, so that the rank before this one does not miss this one."""
        self._left.set()
        self._heartbeats.join(self._silence_s)

    def _exchange_heartbeats(self) -> None:
        last_count = -1
        while not self._left.wait(self._silence_s / CHECKS):
            try:
                self._store.add(f"alive-{self._rank}", 1)
                count = self._store.add(f"alive-{self._next}", 0)
                # A count of 0 means that the rank has not started.
                alive = count != last_count or not count or self._has_left(self._next)
                self._heard |= alive and (self._failed or not self._store.check([FIRST_FAILURE]))
                last_count = count
            except RuntimeError:
                # torchrun, which keeps the store, has ended: the watchdog will see silence.
                return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left-{self._rank}", "")

    def _has_left(self, rank: int) -> bool:
        return self._store.check([f"left-{rank}"])

    def _watch(self) -> None:
        silent_checks = 0
        while not self._left.wait(self._silence_s / CHECKS):
            silent_checks = 0 if self._heard else silent_checks + 1
            self._heard = False
            if silent_checks > CHECKS:
                self._lost(f"nothing was heard of rank {self._next} for {self._silence_s:g} s")
                return

"""Whether the other ranks are there: one that is gone without a word is noticed in bounded time.

    every rank, LOOKS times in silence_s     counts up in torchrun's store, and reads the count of the next rank
    LOOKS times nothing new of that one      lost: whoever notices ends, and so do the others, one after the other

torch notices at once when a connection is reset. This is for what resets nothing: a host without power, a network that
drops everything, a process that stands still; and for a store that does not answer. What ranks do meanwhile, and how
long it takes, does not matter: a count is a sign of life, not of progress. Time is counted in looks, so a pause of all
of them is no loss. A rank that has not come yet, or has left in order, is not missed. After a rank's last word nothing
is news: who is still at work by then ends, for it may wait for one that is not. Who has had its own last word is left
to end by itself: it may be saving for minutes, in step with others that have had theirs.
"""

import contextlib
import threading
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

LOOKS = 8  # in `silence_s`: a thread may come late for some of them
LAST_WORD = "last word"  # in the store: of the rank that failed first


class RankWatchdog:
    """store: this one's own connection, which may block for ever. lost: called once, in a thread, with the reason."""

    def __init__(
        self, store: Store, rank: int, size: int, *, silence_s: float, lost: Callable[[str], object]
    ) -> None:
        self._store = store
        self._rank, self._next = rank, (rank + 1) % size
        self._silence_s = silence_s
        self._lost = lost
        self._news = False
        self._ending = False
        self._over = threading.Event()
        self._talk = threading.Thread(target=self._talks, name="vigil-talk", daemon=True)
        self._talk.start()
        threading.Thread(target=self._watches, name="vigil", daemon=True).start()

    def end(self) -> None:
        """This rank has had its own last word."""
        self._ending = True

    def leave(self) -> None:
        self._over.set()
        self._talk.join(self._silence_s)

    def _talks(self) -> None:
        heard = -1
        while not self._over.wait(self._silence_s / LOOKS):
            try:
                self._store.add(f"alive-{self._rank}", 1)
                count = self._store.add(f"alive-{self._next}", 0)
                there = count != heard or not count or self._store.check([f"left-{self._next}"])
                self._news |= there and (self._ending or not self._store.check([LAST_WORD]))
                heard = count
            except RuntimeError:
                return  # torchrun is gone: what follows is silence
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left-{self._rank}", "")

    def _watches(self) -> None:
        silent = 0
        while not self._over.wait(self._silence_s / LOOKS):
            silent = 0 if self._news else silent + 1
            self._news = False
            if silent > LOOKS:
                self._lost(f"nothing was heard of rank {self._next} for {self._silence_s:g} s")
                return

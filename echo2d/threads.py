"""Run the work on a snapshot's chunks in a few threads, in order and with little in memory.

Reading, hashing, encoding and writing a chunk release the GIL, so threads use the cores.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

# A chunk in work takes up to about 50 MB; 16 threads are faster than any disk here.
CHUNK_THREADS_MAX = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Buffers:
    """Buffers of one size for several threads; fresh memory costs more than decoding or reading."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[memoryview] = []

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """A buffer with whatever was in it before, for the block."""
        try:
            taken = self._free.pop()
        except IndexError:
            taken = memoryview(bytearray(self._size))
        try:
            yield taken
        finally:
            self._free.append(taken)


def chunk_threads() -> int:
    """How many chunks are in work at once: a core is left to the event loop, if there are three."""
    return max(2, min(CHUNK_THREADS_MAX, len(os.sched_getaffinity(0)) - 1))


def in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Generator[_Result, None, None]:
    """Yield `work(item)` of each item, in their order. A few results per thread wait to be taken.

    Raises what `work` raised, once the calls under way are over.
    """
    count = chunk_threads()
    with ThreadPoolExecutor(count, "echo2d-chunks") as pool:
        waiting = deque[Future[_Result]]()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                # Results per thread that wait to be taken, so that threads go on while their
                # consumer is busy.
                if len(waiting) > 4 * count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()

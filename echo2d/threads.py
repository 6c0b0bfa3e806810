"""Work on a snapshot's chunks in a few threads, in order and with little memory.

Reading, hashing, encoding and writing a chunk release the GIL, so threads use the cores.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

# Processing a chunk takes up to about 50 MB of memory. 16 threads are faster than any disk that was measured.
CHUNK_THREADS_MAX = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Buffers:
    """Buffers of one size that several threads reuse, because new memory takes longer than decoding or reading."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[memoryview] = []

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """A buffer for the block, with old content."""
        try:
            taken = self._free.pop()
        except IndexError:
            taken = memoryview(bytearray(self._size))
        try:
            yield taken
        finally:
            self._free.append(taken)


def chunk_threads() -> int:
    """How many chunks are processed at once. With three or more cores, one core is left to the event loop."""
    return max(2, min(CHUNK_THREADS_MAX, len(os.sched_getaffinity(0)) - 1))


def in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Generator[_Result, None, None]:
    """Yield `work(item)` for each item, in order. A few results per thread wait to be taken.

    Raises what `work` raised, after the running calls have ended.
    """
    count = chunk_threads()
    with ThreadPoolExecutor(count, "echo2d-chunks") as pool:
        waiting = deque[Future[_Result]]()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                # Up to four results per thread wait to be taken, so that threads go on while the caller is busy.
                if len(waiting) > 4 * count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()

"""Decides whether the owner of a box lets its worker work now.

    paused by the owner --> no     outside the hours --> no     another program on a GPU --> no

Times are the box's local times, so a window is an hour shorter or longer on a day on which the clocks
change. Not here: how the box learns of these conditions (`runtime/worker/owner.py`).
"""

from collections.abc import Sequence


def reason_to_wait(
    minute: int, windows: Sequence[tuple[int, int]], *, paused: bool, others: Sequence[int]
) -> str:
    """Why the worker must wait; empty: it may work.

    minute: minute of the local day. windows: the begin and end of each, as minutes of the day;
    empty: any time. others: process ids of other programs on the GPUs.
    """
    if paused:
        return "paused by its owner"
    if windows and not any(_holds(minute, *window) for window in windows):
        begin = min((begin for begin, _ in windows), key=lambda each: (each - minute) % (24 * 60))
        return f"outside its hours; starts again at {begin // 60:02}:{begin % 60:02}"
    if others:
        return f"another program is on a GPU: process {others[0]}"
    return ""


def _holds(minute: int, begin: int, end: int) -> bool:
    return begin <= minute < end if begin < end else minute >= begin or minute < end

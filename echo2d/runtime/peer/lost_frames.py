"""Frames that were held and are not what they were: they count against the disk, and have to come again."""

import logging
from collections.abc import Callable

from echo2d.core.base.ids import FormId, FrameId
from echo2d.core.relay import events as relay_events

LOST_FRAMES_MAX = 256  # of one form; a disk that damages more than a few keeps nothing

log = logging.getLogger("echo2d.peer")


class LostFrames:
    """`emit` takes FramesLost; `fail(form, reason)` is told of a form of which too many were lost."""

    def __init__(
        self, emit: Callable[[relay_events.RelayEvent], None], fail: Callable[[FormId, str], None]
    ) -> None:
        self._emit, self._fail = emit, fail
        self.counts: dict[FormId, int] = {}

    def note(self, form: FormId, lost: tuple[FrameId, ...]) -> None:
        """These have to come again."""
        log.warning("frames damaged on disk form=%s frames=%s", form, lost)
        count = self.counts[form] = self.counts.get(form, 0) + len(lost)
        if count > LOST_FRAMES_MAX:
            self._fail(form, f"this disk damages what is written to it: {count} frames")
        else:
            self._emit(relay_events.FramesLost(form, lost))

    def forget(self, form: FormId) -> None:
        self.counts.pop(form, None)

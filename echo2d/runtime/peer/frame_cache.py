"""Keeps frames in memory for a while after they arrive, because they are about to be forwarded."""

from echo2d.core.base.ids import FormId, FrameId

RECENT_BYTES_MAX = 32 << 20  # some seconds of a home uplink


class FrameCache:
    """The newest RECENT_BYTES_MAX bytes of verified frames, oldest evicted first."""

    def __init__(self) -> None:
        self._frames: dict[tuple[FormId, FrameId], memoryview] = {}
        self._bytes = 0

    def get(self, form: FormId, frame: FrameId) -> memoryview | None:
        return self._frames.get((form, frame))

    def put(self, form: FormId, frame: FrameId, payload: memoryview) -> None:
        if (form, frame) not in self._frames:
            self._frames[form, frame] = payload
            self._bytes += len(payload)
        while self._bytes > RECENT_BYTES_MAX:
            self._drop(next(iter(self._frames)))

    def forget(self, form: FormId) -> None:
        for key in [key for key in self._frames if key[0] == form]:
            self._drop(key)

    def _drop(self, key: tuple[FormId, FrameId]) -> None:
        self._bytes -= len(self._frames.pop(key))

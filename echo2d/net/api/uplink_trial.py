"""Measures how fast a box can send: the coordinator takes random bytes from it, and answers how
long that took.

    POST /v1/uplink   any body --read and thrown away--> {bytes, seconds}

Counted is what came after the first part of the body, from then to its end, or for UPLINK_S_MAX: a slow
uplink still has much in its buffers when the box has stopped.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

from aiohttp import web

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.net.http.json_fields import HttpRefusal

UPLINK_PATH = "/v1/uplink"
UPLINK_BYTES_MAX = 32 << 20
UPLINK_S_MAX = 15.0
# A token's boxes take their turns, so that the event loop has other things to do.
UPLINK_EVERY_S = 20.0
TRIAL_TOKENS_MAX = 10_000


class UplinkTrials:
    """See the module docstring. One trial at a time. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy = False
        self._again_at: dict[str, float] = {}

    async def take(self, request: web.Request, token: str) -> web.Response:
        """Read the request's body. HttpRefusal: not now, or more than UPLINK_BYTES_MAX bytes."""
        now = self._clock()
        if self._busy or now < self._again_at.get(token, now):
            raise HttpRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "busy",
                f"an uplink is tried every {UPLINK_EVERY_S:.0f} s for each token; try again",
            )
        self._busy = True
        self._again_at.pop(token, None)
        self._again_at[token] = now + UPLINK_EVERY_S
        keep_newest(self._again_at, TRIAL_TOKENS_MAX)
        try:
            counted, seconds = await self._read(request)
        finally:
            self._busy = False
        return web.json_response({"bytes": counted, "seconds": seconds})

    async def _read(self, request: web.Request) -> tuple[int, float]:
        began, counted = None, 0
        with suppress(TimeoutError):
            async with asyncio.timeout(UPLINK_S_MAX):
                async for part in request.content.iter_any():
                    if began is None:
                        began = self._clock()
                        continue
                    counted += len(part)
                    if counted > UPLINK_BYTES_MAX:
                        raise HttpRefusal(
                            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                            "too_large",
                            f"expected at most {UPLINK_BYTES_MAX} bytes",
                        )
        return counted, 0.0 if began is None else self._clock() - began

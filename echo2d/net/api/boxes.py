"""Answers a box before its worker runs: sends it this installation's wheel, and measures its uplink.

GET  /v1/wheel    the wheel, to a few boxes at a time
POST /v1/uplink   any body --read and thrown away--> {bytes, seconds}
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus

from aiohttp import web

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.net.http.json_fields import HttpRefusal, overloaded

# --- how fast a box can send

UPLINK_PATH = "/v1/uplink"
UPLINK_BYTES_MAX = 32 << 20
UPLINK_S_MAX = 15.0
# The boxes of one token wait this long between two trials, so that the event loop has time for other work.
UPLINK_EVERY_S = 20.0
TRIAL_TOKENS_MAX = 10_000


class UplinkTrials:
    """Reads random bytes from a box, and answers how long that took. Runs one trial at a time.

    Bytes and time are counted here, from after the first part of the body to its end, for at most UPLINK_S_MAX:
    when a box has sent everything, much of it may still be in the uplink's buffers. clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy = False
        self._again_at: dict[str, float] = {}

    async def take(self, request: web.Request, token: str) -> web.Response:
        """Read the request's body. HttpRefusal: it is too early, or the body has more than UPLINK_BYTES_MAX bytes."""
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


# --- the wheel

# Wheels being sent at the same time. A wheel has about 2 MB.
WHEELS_MAX = 16
# Wheels being sent to boxes of one token, so that one slow reader does not keep the others waiting.
WHEELS_PER_TOKEN_MAX = 2
WHEEL_S_MAX = 120.0  # for one wheel


class WheelDownloads:
    """The downloads that are under way."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()  # by the name of their token

    async def send(
        self,
        request: web.Request,
        token: str,
        make: Callable[[], Awaitable[tuple[str, bytes]]],
    ) -> web.StreamResponse:
        """Answer a box that holds this token. HttpRefusal: too many wheels are being sent.

        make: gives the file's name and bytes.
        """
        if self._under_way.total() >= WHEELS_MAX or self._under_way[token] >= WHEELS_PER_TOKEN_MAX:
            raise HttpRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE, "busy", "many boxes fetch the wheel; try again"
            )
        self._under_way[token] += 1
        response = web.StreamResponse()
        try:
            async with asyncio.timeout(WHEEL_S_MAX):
                name, wheel = await make()
                response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
                response.content_type = "application/octet-stream"
                response.content_length = len(wheel)
                await response.prepare(request)
                await response.write(wheel)
                await response.write_eof()
        except TimeoutError:
            # The reader is too slow. If the answer has begun, the connection can only be closed.
            if not response.prepared:
                raise overloaded() from None
            if request.transport is not None:
                request.transport.abort()
        finally:
            # This subtraction deletes the token's entry when its count becomes 0.
            self._under_way -= Counter([token])
        return response

"""Sends boxes the wheel of this installation, a few at a time."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from echo2d.net.http.json_fields import HttpRefusal, overloaded

# Wheels that are on their way at once, and how long each may take: about 2 MB.
WHEELS_MAX = 16
# Of these for boxes of one token, so that one slow reader does not keep the others waiting.
WHEELS_PER_TOKEN_MAX = 2
WHEEL_S_MAX = 120.0


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
        """Answer a box that holds this token. HttpRefusal: too many wheels are on their way.

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
            # The reader is too slow. Once the answer has begun, only closing the connection is left.
            if not response.prepared:
                raise overloaded() from None
            if request.transport is not None:
                request.transport.abort()
        finally:
            # Drops the name with its last wheel.
            self._under_way -= Counter([token])
        return response

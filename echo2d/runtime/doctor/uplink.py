"""How fast this box sends to the coordinator: what it can give of its uplink to other workers, at most."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from http import HTTPStatus

import aiohttp

from echo2d.net.api.uplink_trial import UPLINK_BYTES_MAX, UPLINK_PATH, UPLINK_S_MAX
from echo2d.net.security.auth import TokenFile
from echo2d.net.security.tls import Tls, in_words, to_coordinator
from echo2d.runtime.doctor.finding import HostFinding, ok, skipped, warning
from echo2d.runtime.doctor.host import size_words

SEND_S = 4.0
_PART_BYTES = 1 << 16
_ANSWER_S = UPLINK_S_MAX + 15.0
# From so slow an uplink others get little; its answers are a few KB each, and fit.
SLOW_BYTES_PER_S = 250_000


async def uplink(
    http: aiohttp.ClientSession, url: str, tls: Tls | None, token: TokenFile
) -> HostFinding:
    """Send random bytes for SEND_S."""
    try:
        async with http.post(
            url + UPLINK_PATH,
            data=_parts(),
            headers={"Authorization": f"Bearer {token.secret}"},
            timeout=aiohttp.ClientTimeout(total=_ANSWER_S),
            **to_coordinator(tls),
        ) as response:
            reply = await response.json(content_type=None)
        if response.status == HTTPStatus.OK:
            return _finding(float(reply["bytes"]), float(reply["seconds"]))
    except (aiohttp.ClientError, TimeoutError, OSError) as fault:
        return skipped("uplink", f"could not be measured: {in_words(fault)}")
    except (ValueError, TypeError, KeyError):
        return skipped("uplink", f"not measured: HTTP {response.status}, and no answer of echo2d")
    detail = reply.get("detail") if isinstance(reply, dict) else None
    return skipped("uplink", f"not measured: {detail or f'HTTP {response.status}'}")


def _finding(count: float, seconds: float) -> HostFinding:
    rate = count / max(seconds, 1e-3)
    text = (
        f"{size_words(rate)}/s to the coordinator over one connection ({size_words(count)} in "
        f"{seconds:.1f} s)"
    )
    if rate < SLOW_BYTES_PER_S:
        todo = (
            "nothing need be done: other workers pass versions on instead, this one gets them late"
        )
        return warning("uplink", text, todo)
    return ok("uplink", text)


async def _parts() -> AsyncIterator[bytes]:
    ends_at, sent, part = time.monotonic() + SEND_S, 0, os.urandom(_PART_BYTES)
    while sent + _PART_BYTES <= UPLINK_BYTES_MAX and time.monotonic() < ends_at:
        yield part
        sent += len(part)
        await asyncio.sleep(0)

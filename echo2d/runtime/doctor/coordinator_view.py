"""Checks a coordinator from this host: its port, its identity, its clock, and whether it is ready.

It only sends requests that any program may send: `GET /readyz`, and an enrolment without a proof. The
coordinator's refusal of such an enrolment shows whether a new machine can enrol with the secret.
"""

import asyncio
import email.utils
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp
from cryptography import x509

from echo2d.net.security.auth import ENROL_PATH, PEER_KEY_BYTES, TokenFile
from echo2d.net.security.tls import Tls, in_words, is_for_good, to_coordinator
from echo2d.runtime.doctor.finding import HostFinding, error, ok, warning

_ANSWER_S_MAX = 10.0
# A wrong clock breaks nothing, but the logs of several hosts cannot be compared.
CLOCK_S_MAX = 5.0


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S_MAX))


async def coordinator(http: aiohttp.ClientSession, url: str, tls: Tls | None) -> list[HostFinding]:
    """The first finding says whether the coordinator was reached; the others are about its clock and state."""
    began, began_s = time.monotonic(), time.time()
    try:
        async with http.get(f"{url}/readyz", **to_coordinator(tls)) as response:
            words = (await response.text()).strip()
            status, headers = response.status, response.headers
    except (aiohttp.ClientError, TimeoutError, OSError) as fault:
        return [_unreached(url, fault)]
    took_s = time.monotonic() - began
    under = "without TLS" if tls is None else "TLS shows that it is the coordinator of this run"
    found = [
        ok("coordinator", f"{url} answered in {took_s * 1e3:.0f} ms; {under}"),
        *_clock(headers, began_s + took_s / 2),
    ]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        todo = "wait a moment; if it stays so, its log says why"
        found.append(warning("ready", f"the coordinator is not ready: {words}", todo))
    elif status != HTTPStatus.OK:
        todo = "install the same build of echo2d on both hosts"
        found.append(warning("ready", f"/readyz gives HTTP {status}: another build?", todo))
    return found


def _unreached(url: str, fault: Exception) -> HostFinding:
    at = urlsplit(url)
    port = at.port or (443 if at.scheme == "https" else 80)
    # aiohttp wraps the error in a sentence with the address of its SSL context.
    cause = fault.os_error if isinstance(fault, aiohttp.ClientConnectorError) else fault
    words = (isinstance(cause, OSError) and cause.strerror) or in_words(cause)
    if is_for_good(fault):
        todo = "check URL and token file: they must be of the same run, https:// for TLS"
        return error("coordinator", f"{url}: {in_words(fault)}", todo)
    return error(
        "coordinator",
        f"cannot reach {url}: {words}",
        f"is `echo2d coordinate` running there, and does its firewall let in TCP port {port}?",
    )


def _clock(headers: Mapping[str, str], here_s: float) -> list[HostFinding]:
    try:
        there = email.utils.parsedate_to_datetime(headers["Date"])
    except (KeyError, ValueError):
        return []
    # A Date header has whole seconds, rounded down, so half a second is added.
    ahead_s = here_s - (there.timestamp() + 1.0 / 2)
    if abs(ahead_s) <= CLOCK_S_MAX:
        return [ok("clock", f"within {CLOCK_S_MAX:.0f} s of the coordinator's")]
    apart = f"{abs(ahead_s):.0f} s" if abs(ahead_s) < 7200 else f"{abs(ahead_s) / 3600:,.0f} hours"
    words = f"{apart} {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's"
    return [warning("clock", f"this host's is {words}", "start NTP here: timedatectl set-ntp true")]


async def credential(
    http: aiohttp.ClientSession, url: str, tls: Tls | None, token: TokenFile, *, new: bool
) -> HostFinding:
    """Whether the coordinator accepts the secret of this worker's token.

    new: this machine has not enrolled yet. An enrolled machine may return even after its token expired.
    """
    # The key is sent without its proof, so nothing is enrolled.
    body = {"key": secrets.token_hex(PEER_KEY_BYTES), "proof": bytes(2 * PEER_KEY_BYTES).hex()}
    try:
        async with http.post(
            url + ENROL_PATH,
            json=body if new else {},
            headers={"Authorization": f"Bearer {token.secret}"},
            **to_coordinator(tls),
        ) as response:
            reply = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as fault:
        return _unreached(url, fault)
    code = reply.get("error") if isinstance(reply, dict) else None
    # With a good secret the answer is that the body is malformed, or that the proof is wrong.
    if response.status == HTTPStatus.BAD_REQUEST or code == "proof":
        return ok("token", f"the coordinator knows {token.name}, of run {token.run_id}")
    detail = reply.get("detail") if isinstance(reply, dict) else None
    todo = "ask the run's operator for a new token file: echo2d token create"
    return error("token", str(detail or f"{token.name}: HTTP {response.status}"), todo)


def authority(pem: str) -> HostFinding:
    """Whether the authority's certificate, which signs all others of the run, is valid now."""
    try:
        found = x509.load_pem_x509_certificate(pem.encode())
    except ValueError:
        todo = "make a new token file with `echo2d token create`"
        return error("certificate", "the token file holds no certificate of an authority", todo)
    first, last = found.not_valid_before_utc, found.not_valid_after_utc
    if not first <= datetime.now(UTC) <= last:
        text = f"by this host's clock it is not valid: {first:%Y} to {last:%Y}"
        return error("certificate", text, "set the clock: timedatectl set-ntp true")
    return ok("certificate", f"of the run's authority, valid from {first:%Y} to {last:%Y}")


async def port_open(host: str, port: int) -> str:
    """Why no program answers at this TCP port. Empty: one does."""
    try:
        async with asyncio.timeout(_ANSWER_S_MAX):
            _, writer = await asyncio.open_connection(host, port)
        writer.transport.abort()
    except OSError as fault:
        return in_words(fault)
    return ""

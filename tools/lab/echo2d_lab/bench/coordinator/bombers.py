"""Workers with a valid token that attack: each sends a bomb whenever it is welcomed, and dials again at once.

A bomb is a message of the maximal size, made of nested lists. Meanwhile a probe asks for the status as a
browser does, and measures how long the answer takes.
"""

import asyncio
import random
import secrets
import time
from contextlib import suppress
from pathlib import Path

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.client import AsyncCoordinator
from echo2d.core.base.codec import MESSAGE_BYTES_MAX
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    Heartbeat,
    Hello,
    ToPeer,
    Welcome,
)
from echo2d.errors import Fault
from echo2d.net.control.client import ControlLink, Identity, enrol
from echo2d.net.security.auth import TokenFile

AGAIN_S = 0.02  # seconds from the end of a session to the next dial
PROBE_S = 0.1  # seconds between two requests for the status
_HEAD = b"\x94" + msgpack.packb("LeaseProgress") + b"\x01\x01\xdc\x1f\x40"
_ONE = b"\x91" * 500 + b"\x90"
BOMB = (_HEAD + _ONE * 8000)[:MESSAGE_BYTES_MAX]


class _BombLink(ControlLink):
    """A control link that does not back off between two dials."""

    def drop(self) -> None:
        if self._send_buffer is not None:
            self._send_buffer.put(BOMB)

    async def _wait(self, reason: str, *, retry_s: float = 0.0) -> None:  # noqa: ARG002 - as in ControlLink
        with suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), AGAIN_S)


class Bomber:
    """One attacker. sent: bombs. refused: dials after which it was not let in."""

    def __init__(self, name: str) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.sent = self.dials = 0
        self._left = False
        self._name = name
        self._boot_id = secrets.token_hex(8)
        self._link: _BombLink | None = None

    @property
    def refused(self) -> int:
        return self.dials - self.sent

    async def run(self, url: str, token: TokenFile) -> None:
        """Attack until `leave`."""
        identity = Identity.of(url, token, self.key)
        await enrol(url, token, identity, rng=random.Random(), patience_s=60.0)
        self._link = _BombLink(
            url, Identity(self.key, bytes.fromhex(token.run_key)), self, rng=random.Random()
        )
        if not self._left:
            await self._link.run()

    def leave(self) -> None:
        self._left = True
        if self._link is not None:
            self._link.leave()

    # --- callbacks of its link

    def hello(self) -> Hello:
        self.dials += 1
        return Hello(OURS, None, "worker", self._name, self._boot_id, 4, None, None, (), (), ())

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(0)

    async def connected(self, welcome: Welcome) -> None:  # noqa: ARG002 - a link owner's signature
        assert self._link is not None
        self.sent += 1
        self._link.drop()

    async def disconnected(self, reason: str) -> None:
        """The coordinator has ended the session, as expected."""

    async def received(self, message: ToPeer) -> None:
        """It ignores every message."""


class StatusProbe:
    """Asks for the status every PROBE_S while `measuring`. took_s: seconds until each answer."""

    def __init__(self, url: str, token_file: Path) -> None:
        self.measuring = False
        self.took_s: list[float] = []
        self.lapsed = 0
        self._url, self._token_file = url, token_file

    async def run(self) -> None:
        async with AsyncCoordinator(self._url, token_file=self._token_file) as coordinator:
            while True:
                began = time.monotonic()
                status = await coordinator.status()
                if self.measuring:
                    self.took_s.append(time.monotonic() - began)
                self.lapsed = sum(
                    fault["times"] for fault in status["faults"] if fault["kind"] == "lease"
                )
                await asyncio.sleep(PROBE_S)


async def attack(bombers: list[Bomber], url: str, token: TokenFile) -> None:
    """Run all attackers until they leave. A fault of one ends only its own attack."""
    async with asyncio.TaskGroup() as tasks:
        for bomber in bombers:
            tasks.create_task(_attack(bomber, url, token))


async def _attack(bomber: Bomber, url: str, token: TokenFile) -> None:
    with suppress(Fault):
        await bomber.run(url, token)

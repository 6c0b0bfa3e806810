"""Tickets: each lets a program outside the run play one episode, and no other.

    ticket = "ep_" + base64url(group, sample, nonce, MAC)

The MAC is made with a key of the run, so a ticket cannot be forged, and a ticket of another run or sample is
refused. Each time an episode is offered, its ticket has a new nonce, so the holder of the old ticket is refused.
"""

import base64
import binascii
import hmac
import secrets
import struct
from dataclasses import dataclass

from blake3 import blake3

from echo2d.core.base.ids import GroupId

TICKET_PREFIX = "ep_"
_NONCE_BYTES = 12
_MAC_BYTES = 16
_HEAD = struct.Struct(f"<QH{_NONCE_BYTES}s")
_CHARS = len(TICKET_PREFIX) + -(-(_HEAD.size + _MAC_BYTES) * 8 // 6)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket whose MAC is right."""

    group: GroupId
    sample: int
    nonce: bytes

    @property
    def at(self) -> tuple[GroupId, int]:
        return self.group, self.sample


def ticket_key(seed_key: bytes) -> bytes:
    """The key of a run's tickets, from the key of its seeds."""
    return blake3(seed_key, derive_key_context="echo2d 2026-11 tickets of episodes").digest()


def make_ticket(key: bytes, group: GroupId, sample: int) -> tuple[str, Ticket]:
    """A new ticket for this sample, as text and parsed."""
    ticket = Ticket(group, sample, secrets.token_bytes(_NONCE_BYTES))
    head = _HEAD.pack(*ticket.at, ticket.nonce)
    return _text(head + _mac(key, head)), ticket


def read_ticket(key: bytes, text: str) -> Ticket | None:
    """The parsed ticket. None: the text is no ticket of this run."""
    if len(text) != _CHARS or not text.startswith(TICKET_PREFIX) or not text.isascii():
        return None
    body = text[len(TICKET_PREFIX) :]
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    head, mac = data[: _HEAD.size], data[_HEAD.size :]
    # Only one text is valid for a ticket.
    if _text(data) != text or not hmac.compare_digest(mac, _mac(key, head)):
        return None
    group, sample, nonce = _HEAD.unpack(head)
    return Ticket(GroupId(group), sample, nonce)


def _text(data: bytes) -> str:
    return TICKET_PREFIX + base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _mac(key: bytes, head: bytes) -> bytes:
    return blake3(head, key=key).digest(_MAC_BYTES)

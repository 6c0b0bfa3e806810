"""Seals what is sent over a peer link, with keys that a TLS handshake has protected.

TLS 1.3 proves the certificates of both ends. Then each end draws its sending key and sends it to the
other end. Only these keys go through TLS:

    TLS handshake --> MAGIC and a key, through TLS, both ways --> units sealed with AES-256-GCM

A unit of the link (`core/protocol/peer_messages`) has a readable header and an encrypted payload. A tag
after the payload shows that neither was changed. The nonce counts the units of a direction, so a unit
that was left out, repeated or moved is noticed. After UNITS_PER_KEY units the next key is derived from
the last one. TLS would do the same, but with three more copies and records of 16 KiB: for a relay, TLS
costs three times as much as the sockets.

Not here: sockets (`net/peer/connection`), certificates (`tls`).
"""

import secrets
import ssl
import struct

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from echo2d.errors import PeerFault

# Both ends send this first. It must change when the protocol after the handshake changes.
MAGIC = b"echo2d sealed link 1"
SEALING_KEY_BYTES = 32
# The size of a TLS record, and of one read from the socket.
HANDSHAKE_READ_BYTES = 16 << 10
# A key seals at most 2^34 blocks of 16 bytes, so the chance to tell a unit from noise stays below 2^-60
# (NIST SP 800-38D; the sum of all blocks, squared, over 2^129).
UNITS_PER_KEY = 1 << 20

_NONCE = struct.Struct("<4xQ")


class Seal:
    """One end's two keys: for what it sends, and for what it receives. SEALING_KEY_BYTES each."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending, self._receiving = _Direction(sending), _Direction(receiving)

    def seal(self, header: bytes, payload: bytes | memoryview) -> bytes:
        """The payload, encrypted, and its tag. Units must be sent in the order of the calls."""
        aes, nonce = self._sending.next()
        return aes.encrypt(nonce, payload, header)

    def open(self, header: bytes, sealed: memoryview) -> bytes:
        """The payload of the next unit. PeerFault: it is not what the other end sealed."""
        aes, nonce = self._receiving.next()
        try:
            return aes.decrypt(nonce, sealed, header)
        except InvalidTag:
            raise PeerFault("the data was changed on the way") from None


class _Direction:
    def __init__(self, key: bytes) -> None:
        self._key, self._aes, self._units = key, AESGCM(key), 0

    def next(self) -> tuple[AESGCM, bytes]:
        """The cipher and the nonce of the next unit."""
        if self._units == UNITS_PER_KEY:
            key = blake3(self._key, derive_key_context="echo2d 2026 next key of a link")
            self._key, self._units = key.digest(SEALING_KEY_BYTES), 0
            self._aes = AESGCM(self._key)
        self._units += 1
        return self._aes, _NONCE.pack(self._units)


class KeyExchange:
    """One end of the handshake, without I/O: bytes in, bytes out, until there is a `seal`.

    expected: the member that was dialled; None at the end that accepted.
    """

    def __init__(self, context: ssl.SSLContext, *, expected: str | None) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=expected is None, server_hostname=expected
        )
        self._mine = secrets.token_bytes(SEALING_KEY_BYTES)
        self._told = False
        self._theirs = b""
        # None until both keys are known. Then `certificate` is the other end's (DER), and `rest` has
        # the bytes that arrived after the other end's key.
        self.seal: Seal | None = None
        self.certificate: bytes | None = None
        self.rest = b""

    def received(self, data: bytes | memoryview) -> None:
        """Take received bytes; the dialling end begins with none.

        ssl.SSLError, PeerFault: the handshake has failed. The bytes of `to_send` must still be sent.
        """
        self._in.write(data)
        try:
            self._continue()
        except ssl.SSLWantReadError:
            return
        self.seal = Seal(self._mine, self._theirs[len(MAGIC) :])
        self.certificate = self._tls.getpeercert(binary_form=True)
        self.rest = self._in.read()

    def to_send(self) -> bytes:
        """The bytes to send now."""
        return self._out.read()

    def _continue(self) -> None:
        """Continue the handshake until the other end's key is here. ssl.SSLWantReadError: more bytes are needed."""
        if not self._told:
            self._tls.do_handshake()
            self._tls.write(MAGIC + self._mine)
            self._told = True
        while len(self._theirs) < len(MAGIC) + SEALING_KEY_BYTES:
            more = self._tls.read(len(MAGIC) + SEALING_KEY_BYTES - len(self._theirs))
            if not more:
                raise PeerFault("the other end ended the handshake")
            self._theirs += more
            if not MAGIC.startswith(self._theirs[: len(MAGIC)]):
                raise PeerFault("it speaks TLS, but not this version of the peer link")

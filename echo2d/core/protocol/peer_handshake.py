"""The handshake of a peer link: each end shows that it knows the secret of their edge, without sending it.

The end that dialled says Hello. The other, if it expects that peer, answers Hello and Proof; the first then says Proof.

A proof is the blake3 of its sender's packed Hello and then its receiver's, each after its length (u32), keyed with the
secret. The nonces in the Hellos make it fresh, and because the two ends differ, so do their proofs: none can be played
back. A stranger gets no answer but LinkEnded. `link` sees to the order of these messages.
"""

import hmac
import struct
from collections.abc import Mapping

from blake3 import blake3

from echo2d.core.base.codec import pack
from echo2d.core.base.ids import DIGEST_BYTES, PeerId, RunId
from echo2d.core.protocol.peer_messages import LinkHello, Proof, encode, require
from echo2d.errors import PeerFault

LINK_PROTOCOL_VERSION = 1
SECRET_BYTES = 32  # of an edge; the key length of blake3
NONCE_BYTES = 32
DIAL_BACK = PeerId(
    "dial-back"
)  # says the coordinator that dials a peer to see who answers, and never opens a link


class Handshake:
    """One end's part in it.

    `secrets`: of the edges this peer expects, by peer id; read once, when the other end says who it is. `dialled`: the
    peer this connection was made to reach, None at the end that accepted it. `nonce`: NONCE_BYTES random bytes.
    """

    def __init__(
        self,
        *,
        run_id: RunId,
        me: PeerId,
        secrets: Mapping[PeerId, bytes],
        nonce: bytes,
        dialled: PeerId | None,
    ) -> None:
        assert len(nonce) == NONCE_BYTES
        self._run_id, self._me, self._secrets, self._nonce, self._dialled = (
            run_id,
            me,
            secrets,
            nonce,
            dialled,
        )
        self._peer: PeerId | None = None  # as it says
        self._proof = b""  # that it must send

    def start(self) -> bytes:
        """What the end that dialled says first."""
        assert self._dialled is not None
        return encode(self._hello(self._dialled))

    def answer(self, hello: LinkHello, packed: bytes) -> bytes:
        """What to say to this Hello, which arrived as `packed`. PeerFault if its sender is not to be linked with."""
        secret = self._secret_for(hello)
        reply = self._hello(hello.sender)
        mine = pack(reply)
        self._peer, self._proof = hello.sender, _proof(secret, packed, mine)
        proof = encode(Proof(_proof(secret, mine, packed)))
        return proof if self._dialled is not None else encode(reply) + proof

    def verify(self, proof: Proof) -> PeerId:
        """Who the other end is; PeerFault if it has not proved it."""
        assert self._peer is not None
        if not hmac.compare_digest(proof.digest, self._proof):
            raise PeerFault("wrong proof: the other end does not know the secret of this edge")
        return self._peer

    def _hello(self, receiver: PeerId) -> LinkHello:
        return LinkHello(LINK_PROTOCOL_VERSION, self._run_id, self._me, receiver, self._nonce)

    def _secret_for(self, hello: LinkHello) -> bytes:
        require(
            hello.protocol == LINK_PROTOCOL_VERSION,
            f"link protocol {LINK_PROTOCOL_VERSION}, not {hello.protocol}",
        )
        require(hello.run_id == self._run_id, "a peer of the same run")
        require(hello.receiver == self._me, "to be the peer that is looked for")
        require(self._dialled in (None, hello.sender), "the peer that was dialled")
        require(len(hello.nonce) == NONCE_BYTES, f"a nonce of {NONCE_BYTES} bytes")
        secret = self._secrets.get(hello.sender)
        if secret is None:
            raise PeerFault("no link with that peer is expected")
        return secret


def _proof(secret: bytes, prover: bytes, verifier: bytes) -> bytes:
    both = b"".join(struct.pack("<I", len(hello)) + hello for hello in (prover, verifier))
    return blake3(both, key=secret).digest(DIGEST_BYTES)

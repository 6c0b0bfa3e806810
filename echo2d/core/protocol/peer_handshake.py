"""The handshake of a peer link: each end proves, without sending it, that it knows their secret.

    dialling end                accepting end
    LinkHello  ---------------->
               <----------------  LinkHello, Proof (only if it expects this peer)
    Proof      ---------------->

A proof is a blake3 that is keyed with the secret. It covers the packed LinkHello of the proof's
sender, then that of its receiver, each preceded by its length (u32). The nonces in the hellos make
it fresh. The two ends' proofs differ, so neither can be replayed to its author. A stranger gets no
answer except LinkEnded.

Not here: the order of these messages (`peer_link`).
"""

import hmac
import struct
from collections.abc import Mapping

from blake3 import blake3

from echo2d.core.base.codec import pack
from echo2d.core.base.ids import DIGEST_BYTES, PeerId, RunId
from echo2d.core.protocol.builds import (
    LINK_PROTOCOL_OLDEST,
    LINK_PROTOCOL_VERSION,
    OURS_ON_PEER_LINKS,
    Build,
)
from echo2d.core.protocol.peer_messages import LinkHello, Proof, require
from echo2d.errors import PeerFault

SECRET_BYTES = 32  # of an edge; the key length of blake3
NONCE_BYTES = 32
# The coordinator uses this name when it dials a peer to see whether the peer's port is reachable. It
# never opens a link.
DIAL_BACK = PeerId("dial-back")


class Handshake:
    """One end's part in the handshake.

    `secrets`: the secrets of the edges that this peer expects, by peer id; read once, when the
    other end names itself. `dialled`: the peer that this connection should reach; None at the end
    that accepted it. `nonce`: NONCE_BYTES random bytes.
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
        # The peer that the other end claims to be, and the proof that this peer would send.
        self._peer: PeerId | None = None
        self._proof = b""

    def start(self) -> LinkHello:
        """The first message of the dialling end."""
        assert self._dialled is not None
        return self._hello(self._dialled)

    def answer(self, hello: LinkHello, packed: bytes) -> tuple[LinkHello | Proof, ...]:
        """The answer to this hello, whose packed bytes are `packed`.

        Raises PeerFault if no link with its sender is expected.
        """
        secret = self._secret_for(hello)
        reply = self._hello(hello.sender)
        mine = pack(reply)
        self._peer, self._proof = hello.sender, _proof(secret, packed, mine)
        proof = Proof(_proof(secret, mine, packed))
        # The end that dialled has sent its hello already.
        return (proof,) if self._dialled is not None else (reply, proof)

    def verify(self, proof: Proof) -> PeerId:
        """The other end's peer id; raises PeerFault if its proof is wrong."""
        assert self._peer is not None
        # The comparison takes constant time, so that its duration reveals nothing about the proof.
        if not hmac.compare_digest(proof.digest, self._proof):
            raise PeerFault("wrong proof: the other end does not know the secret of this edge")
        return self._peer

    def _hello(self, receiver: PeerId) -> LinkHello:
        return LinkHello(
            LINK_PROTOCOL_VERSION,
            self._run_id,
            self._me,
            receiver,
            self._nonce,
            LINK_PROTOCOL_OLDEST,
        )

    def _secret_for(self, hello: LinkHello) -> bytes:
        require(
            OURS_ON_PEER_LINKS.speaks_with(Build(hello.protocol, hello.oldest)),
            f"a build that speaks link protocol {LINK_PROTOCOL_VERSION}, "
            f"not {hello.oldest} to {hello.protocol}",
        )
        require(hello.run_id == self._run_id, "a peer of the same run")
        require(hello.receiver == self._me, "a hello for this peer")
        require(self._dialled in (None, hello.sender), "the peer that was dialled")
        require(len(hello.nonce) == NONCE_BYTES, f"a nonce of {NONCE_BYTES} bytes")
        secret = self._secrets.get(hello.sender)
        if secret is None:
            raise PeerFault("no link with that peer is expected")
        return secret


def _proof(secret: bytes, prover: bytes, verifier: bytes) -> bytes:
    both = b"".join(struct.pack("<I", len(hello)) + hello for hello in (prover, verifier))
    return blake3(both, key=secret).digest(DIGEST_BYTES)

"""Peers of a run under TLS: keys, certificates of their run, and one of another run."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.net.security.auth import peer_id_of, public_bytes
from echo2d.net.security.tls import Authority, Tls

RUN, OTHER_RUN = (
    Authority(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in range(2)
)
ALICE_KEY, BOB_KEY, CAROL_KEY = (
    Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(2, 5)
)
ALICE, BOB = peer_id_of(public_bytes(ALICE_KEY)), peer_id_of(public_bytes(BOB_KEY))


def make_tls(key: Ed25519PrivateKey, authority: Authority) -> Tls:
    tls = Tls(RUN.certificate)
    tls.present(key, authority.certify_peer(public_bytes(key)))
    return tls


ALICE_TLS, BOB_TLS, CAROL_TLS = (make_tls(key, RUN) for key in (ALICE_KEY, BOB_KEY, CAROL_KEY))
FOREIGN_TLS, BARE_TLS = make_tls(BOB_KEY, OTHER_RUN), Tls(RUN.certificate)

"""Peers of a run under TLS: keys, certificates of their run, and a certificate of another run."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.net.security.auth import peer_id_of, public_bytes
from echo2d.net.security.tls import Authority, Tls

RUN_KEY, OTHER_RUN_KEY, ALICE_KEY, BOB_KEY, CAROL_KEY = (
    Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(5)
)
RUN, OTHER_RUN = Authority(RUN_KEY), Authority(OTHER_RUN_KEY)
ALICE, BOB = (peer_id_of(public_bytes(key)) for key in (ALICE_KEY, BOB_KEY))


def make_tls(
    key: Ed25519PrivateKey, trusts: Authority = RUN, *, certified_by: Authority = RUN
) -> Tls:
    tls = Tls(trusts.certificate)
    tls.present(key, certified_by.certify_peer(public_bytes(key)))
    return tls


ALICE_TLS, BOB_TLS, CAROL_TLS = (make_tls(key) for key in (ALICE_KEY, BOB_KEY, CAROL_KEY))
FOREIGN_TLS, BARE_TLS = make_tls(BOB_KEY, certified_by=OTHER_RUN), Tls(RUN.certificate)

"""TLS under the run's own authority: certificates, and the contexts of an end that holds one.

    authority     its key is made from the run's; its certificate is in every token file, and nobody else's is believed
    coordinator   a certificate in the name COORDINATOR, for a key made at each start
    peer          a certificate in the name of its peer id, for the key it enrolled with

Names are of members, never of hosts: whoever dials knows which one it expects, and the accepting end compares
(`shows`). Valid from 2000 to 2100, so that clocks do not matter. A certificate is not taken back: who was revoked is in
no plan and gets no session. The authority's and the coordinator's keys are P-256, because browsers know no Ed25519.
"""

import asyncio
import logging
import os
import ssl
from datetime import UTC, datetime
from typing import TypedDict
from urllib.parse import urlsplit

from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from echo2d.core.base.ids import PeerId
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import peer_id_of, public_bytes, run_id_of

COORDINATOR = "coordinator"  # as a peer id is hex, nobody is called the same
GIVEN_UP = "without TLS whoever is on the path can read weights, prompts and secrets, and take over connections"

log = logging.getLogger("echo2d.tls")

_VALID = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

_PrivateKey = Ed25519PrivateKey | ec.EllipticCurvePrivateKey
_PublicKey = Ed25519PublicKey | ec.EllipticCurvePublicKey


# --- certificates ---------------------------------------------------------------------------------------------------


class Authority:
    """Of one run, made from the run's key. `certificate`, and what `certify` returns: PEM."""

    def __init__(self, run_key: Ed25519PrivateKey) -> None:
        seed = blake3(
            run_key.private_bytes_raw(), derive_key_context="echo2d 2026 authority of a run"
        ).digest(48)
        self._key = ec.derive_private_key(
            int.from_bytes(seed, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1()
        )
        self._name = _name(f"echo2d run {run_id_of(public_bytes(run_key))}")
        self.certificate = self._sign(self._name, self._key.public_key(), None)

    def certify_peer(self, public_key: bytes) -> str:
        """That whoever holds this key is the peer of this id."""
        return self._certify(peer_id_of(public_key), Ed25519PublicKey.from_public_bytes(public_key))

    def coordinator(self) -> "Tls":
        """The coordinator's end, with a new key. Whoever dials it may do so without a certificate. Blocking."""
        key = ec.generate_private_key(ec.SECP256R1())
        tls = Tls(self.certificate)
        tls.listener.verify_mode = ssl.CERT_OPTIONAL
        tls.present(key, self._certify(COORDINATOR, key.public_key()))
        return tls

    def _certify(self, name: str, key: _PublicKey) -> str:
        return self._sign(_name(name), key, x509.SubjectAlternativeName([x509.DNSName(name)]))

    def _sign(
        self, subject: x509.Name, key: _PublicKey, names: x509.SubjectAlternativeName | None
    ) -> str:
        """A certificate for a member; without names, the authority's own."""
        ca, mine = names is None, self._key.public_key()
        usage = x509.KeyUsage(
            digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_VALID[0])
            .not_valid_after(_VALID[1])
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(mine), critical=False)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return (
            builder.sign(self._key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
            .decode()
        )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


# --- ends -----------------------------------------------------------------------------------------------------------


class Tls:
    """One end under an authority (PEM). `dialler` believes only the member that `server_hostname` names; `listener`
    only who shows a certificate, and it accepts nobody before `present`."""

    def __init__(self, authority: str) -> None:
        self.dialler, self.listener = (
            ssl.SSLContext(protocol)
            for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )
        self.listener.verify_mode = ssl.CERT_REQUIRED
        self.listener.sslobject_class = _Accepted
        self.listener.num_tickets = 0  # links stay open: nothing is resumed
        for context in (self.dialler, self.listener):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(cadata=authority)

    @staticmethod
    def of(url: str, authority: str, *, promised: str = "") -> "Tls | None":
        """As the URL says: None for http://. OperatorFault: the authority is not known, or `promised`, the URL of the
        token file, is https://: whoever is on the path would read the secret."""
        if urlsplit(url).scheme != "https":
            if urlsplit(promised).scheme == "https":
                raise OperatorFault(f"{url} means no TLS, and the token file says {promised}")
            return None
        try:
            return Tls(authority)
        except (ssl.SSLError, ValueError) as error:
            raise OperatorFault(
                "the token file holds no certificate of the run's authority: make a new one"
            ) from error

    def present(self, key: _PrivateKey, certificate: str) -> None:
        """From now on this end shows who it is. OperatorFault: the certificate is not this key's. Blocking."""
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        file = os.memfd_create(
            "identity"
        )  # the ssl module takes keys from files only; this one is on no disk
        try:
            with os.fdopen(file, "wb", closefd=False) as writer:
                writer.write(pem + certificate.encode())
            for context in (self.dialler, self.listener):
                context.load_cert_chain(f"/proc/self/fd/{file}")
        except ssl.SSLError as error:
            raise OperatorFault("the coordinator's certificate is not for this key") from error
        finally:
            os.close(file)


class _Accepted(ssl.SSLObject):
    """Event loops tell nobody why a handshake failed that they accepted."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            log.info("handshake refused: %s", in_words(error))
            raise


_WORDS = {
    "HTTP_REQUEST": "it speaks HTTP without TLS",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it speaks no TLS as new as 1.3",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not believe this end's certificate",
}


def in_words(error: BaseException) -> str:
    """What an error of a connection, or its cause, means."""
    fault = error.__cause__ if isinstance(error.__cause__, ssl.SSLError) else error
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"its certificate is not of who is expected in this run ({fault.verify_message})"
    if isinstance(fault, ssl.SSLError) and fault.reason in _WORDS:
        return _WORDS[fault.reason]
    return str(error) or "no answer"


def is_for_good(error: BaseException) -> bool:
    """Whether, of an address that never answered, it is of no use to dial it again: it is somebody else's. Later this
    may be anybody's doing who is on the path."""
    fault = error.__cause__
    return isinstance(fault, ssl.SSLCertVerificationError) or (
        isinstance(fault, ssl.SSLError) and fault.reason == "WRONG_VERSION_NUMBER"
    )


class HttpOptions(TypedDict, total=False):
    """Of aiohttp's requests."""

    ssl: ssl.SSLContext
    server_hostname: str


def to_coordinator(tls: Tls | None) -> HttpOptions:
    """How to ask the coordinator, and nobody else."""
    return {} if tls is None else {"ssl": tls.dialler, "server_hostname": COORDINATOR}


def shows(transport: asyncio.BaseTransport | None, peer: PeerId) -> bool:
    """Whether the other end has shown this peer's certificate; without TLS nobody has to."""
    tls: ssl.SSLObject | None = (
        transport.get_extra_info("ssl_object") if transport is not None else None
    )
    if tls is None:
        return True
    shown = tls.getpeercert(binary_form=True)
    key = x509.load_der_x509_certificate(shown).public_key() if shown else None
    return isinstance(key, Ed25519PublicKey) and peer_id_of(key.public_bytes_raw()) == peer

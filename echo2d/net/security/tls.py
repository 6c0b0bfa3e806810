"""TLS under the run's own certificate authority: certificates and SSL contexts of the members.

    authority     its key is derived from the run's key; its certificate is in every token file,
                  and members trust no other authority
    coordinator   a certificate in the name COORDINATOR, for a key made at each start
    peer          a certificate in the name of its peer id, for the key with which it enrolled

Certificates name members, never hosts: the dialling end knows which member it expects, and the
accepting end compares (`shows`). They are valid from 2000 to 2100, so that wrong clocks do not
matter. They are never revoked: a revoked peer is in no plan and gets no session. The keys of the
authority and the coordinator are P-256, because browsers do not support Ed25519.
"""

import asyncio
import logging
import os
import re
import ssl
from datetime import UTC, datetime
from typing import TypedDict
from urllib.parse import urlsplit

from aiohttp.http_exceptions import HttpProcessingError
from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from echo2d.core.base.ids import PeerId
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import peer_id_of, public_bytes, run_id_of

# Peer ids are hex, so no peer can have this name.
COORDINATOR = "coordinator"
GIVEN_UP = (
    "without TLS anyone on the network path can read weights, prompts and secrets, "
    "and take over connections"
)

log = logging.getLogger("echo2d.tls")

_VALID = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

_PrivateKey = Ed25519PrivateKey | ec.EllipticCurvePrivateKey
_PublicKey = Ed25519PublicKey | ec.EllipticCurvePublicKey


# --- certificates


class Authority:
    """The certificate authority of one run, derived from the run's key. Certificates are PEM.

    crossed: certificates that the earlier authorities have signed for this one, the newest first. They are appended
    to each certificate, so that a member that knows only an older authority trusts the certificate, too. older: the
    certificates of the earlier authorities, by which peers are known until they have enrolled again.
    """

    def __init__(self, run_key: Ed25519PrivateKey, crossed: str = "", older: str = "") -> None:
        self.crossed, self.older = crossed, older
        seed = blake3(
            run_key.private_bytes_raw(), derive_key_context="echo2d 2026 authority of a run"
        ).digest(48)
        self._key = ec.derive_private_key(
            int.from_bytes(seed, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1()
        )
        self.name = _name(f"echo2d run {run_id_of(public_bytes(run_key))}")
        self.public_key = self._key.public_key()
        self.certificate = self._sign(self.name, self.public_key, None)

    def cross(self, follows: "Authority") -> str:
        """The certificates by which this authority's members trust the one that follows it."""
        return self._sign(follows.name, follows.public_key, None) + self.crossed

    def certify_peer(self, public_key: bytes) -> str:
        """A certificate that binds this key to the peer id made from it."""
        return self._certify(peer_id_of(public_key), Ed25519PublicKey.from_public_bytes(public_key))

    def coordinator(self) -> "Tls":
        """The coordinator's end, with a new key. Its clients may have no certificate. Blocking."""
        # Browsers and learners have a secret only, and workers enrol before they have a certificate.
        key = ec.generate_private_key(ec.SECP256R1())
        tls = Tls(self.certificate + self.older)
        tls.listener.verify_mode = ssl.CERT_OPTIONAL
        tls.present(key, self._certify(COORDINATOR, key.public_key()))
        return tls

    def _certify(self, name: str, key: _PublicKey) -> str:
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        return self._sign(_name(name), key, names) + self.crossed

    def _sign(
        self, subject: x509.Name, key: _PublicKey, names: x509.SubjectAlternativeName | None
    ) -> str:
        """Sign a certificate for a member; names: None for the authority's own certificate."""
        ca, mine = names is None, self.public_key
        usage = x509.KeyUsage(
            digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
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


# --- ends


class Tls:
    """The SSL contexts of one member, under an authority (PEM).

    `dialler` trusts only the member that `server_hostname` names. `listener` accepts only members
    that show a certificate, and can accept no connection before `present`.
    """

    def __init__(self, authority: str) -> None:
        self.dialler, self.listener = (
            ssl.SSLContext(protocol)
            for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )
        self.listener.verify_mode = ssl.CERT_REQUIRED
        self.listener.sslobject_class = _Accepted
        # Links stay open, so no TLS session is ever resumed.
        self.listener.num_tickets = 0
        for context in (self.dialler, self.listener):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.trust(authority)

    @staticmethod
    def of(url: str, authority: str, *, promised: str = "") -> "Tls | None":
        """The contexts for this URL; None for http://.

        promised: the URL in the token file. OperatorFault: the token file has no certificate of the
        authority, or it promises https:// and the URL is http://, which would expose the secret.
        """
        if urlsplit(url).scheme != "https":
            if urlsplit(promised).scheme == "https":
                raise OperatorFault(
                    f"{url} has no TLS, but the token file says {promised}; use that URL"
                )
            return None
        try:
            return Tls(authority)
        except (ssl.SSLError, ValueError) as error:
            raise OperatorFault(
                "the token file holds no certificate of the run's authority; make a new token file "
                "with `echo2d token create`"
            ) from error

    def trust(self, authority: str) -> None:
        """Trust this authority (PEM), too, until this process ends."""
        for context in (self.dialler, self.listener):
            context.load_verify_locations(cadata=authority)

    def present(self, key: _PrivateKey, certificate: str) -> None:
        """Show this certificate from now on. OperatorFault: it is not for this key. Blocking."""
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        # The ssl module reads keys from files only; this file is in memory, on no disk.
        file = os.memfd_create("identity")
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
    """Logs why the handshake of an accepted connection failed, which event loops do not report."""

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
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3 or newer",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a certificate, and this end shows none",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust this end's certificate",
}


def in_words(error: BaseException) -> str:
    """A connection's error, or its cause, in plain words."""
    fault = error.__cause__ if isinstance(error.__cause__, ssl.SSLError) else error
    if isinstance(fault, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not for the expected member in this run ({fault.verify_message})"
        )
    if isinstance(fault, ssl.SSLError) and fault.reason in _WORDS:
        return _WORDS[fault.reason]
    if isinstance(error.__cause__, HttpProcessingError):
        return "it does not speak HTTP; workers' links have the port after the coordinator's"
    # aiohttp's errors name the SSL context, which says nothing to a person.
    return re.sub(r" ssl:(<[^>]*>|\w+)", "", str(error)) or "no answer"


def is_for_good(error: BaseException) -> bool:
    """Whether dialling the address again is useless, because it belongs to another program or run.

    Ask only about an address that has never answered properly: later, an attacker on the network
    path can cause the same errors.
    """
    fault = error.__cause__
    return isinstance(fault, ssl.SSLCertVerificationError | HttpProcessingError) or (
        isinstance(fault, ssl.SSLError) and fault.reason == "WRONG_VERSION_NUMBER"
    )


class HttpOptions(TypedDict, total=False):
    """Keyword arguments of aiohttp's requests."""

    ssl: ssl.SSLContext
    server_hostname: str


def to_coordinator(tls: Tls | None) -> HttpOptions:
    """Options with which a request reaches the coordinator and no other member."""
    return {} if tls is None else {"ssl": tls.dialler, "server_hostname": COORDINATOR}


def shows(transport: asyncio.BaseTransport | None, peer: PeerId) -> bool:
    """Whether the other end has shown this peer's certificate; always true without TLS."""
    tls: ssl.SSLObject | None = (
        transport.get_extra_info("ssl_object") if transport is not None else None
    )
    return tls is None or belongs_to(tls.getpeercert(binary_form=True), peer)


def belongs_to(certificate: bytes | None, peer: PeerId) -> bool:
    """Whether this certificate (DER), which was verified, is the peer's."""
    key = x509.load_der_x509_certificate(certificate).public_key() if certificate else None
    return isinstance(key, Ed25519PublicKey) and peer_id_of(key.public_bytes_raw()) == peer

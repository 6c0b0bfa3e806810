"""Certificates and handshakes, in memory."""

import asyncio
import socket
import ssl
from datetime import UTC, datetime

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from echo2d.errors import OperatorFault
from echo2d.net.security.auth import public_bytes
from echo2d.net.security.tls import COORDINATOR, Authority, Tls, in_words, to_coordinator
from tests.support.tls_peers import (
    ALICE,
    ALICE_KEY,
    BOB,
    BOB_KEY,
    OTHER_RUN,
    RUN,
    RUN_KEY,
    make_tls,
)


def faults(dialler: Tls, listener: Tls, expected: str) -> tuple[str, str]:
    """What the two ends find wrong, in words; the listener's once the dialler has found nothing."""
    to_listener, to_dialler = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialling = dialler.dialler.wrap_bio(to_dialler, to_listener, server_hostname=expected)
    listening = listener.listener.wrap_bio(to_listener, to_dialler, server_side=True)
    done: dict[ssl.SSLObject, str | None] = {dialling: None, listening: None}
    for _ in range(4):
        for end, outcome in done.items():
            try:
                if outcome is None:
                    end.do_handshake()
                    done[end] = ""
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                done[end] = in_words(error)
    assert None not in done.values()
    if set(done.values()) == {""}:
        assert (dialling.version(), dialling.getpeercert() != {}) == ("TLSv1.3", True)
    return str(done[dialling]), str(done[listening])


def test_members_of_a_run_and_its_coordinator_accept_each_other() -> None:
    assert faults(make_tls(ALICE_KEY), make_tls(BOB_KEY), BOB) == ("", "")
    again = Authority(
        RUN_KEY
    )  # the coordinator was started again, the token files are those of before
    assert faults(make_tls(ALICE_KEY), again.coordinator(), COORDINATOR) == ("", "")
    assert faults(Tls(RUN.certificate), RUN.coordinator(), COORDINATOR) == ("", ""), (
        "as one that is to enrol"
    )


@pytest.mark.parametrize(
    ("dialler", "listener", "expected", "words"),
    [
        (make_tls(ALICE_KEY), make_tls(BOB_KEY), ALICE, "Hostname mismatch"),
        (make_tls(ALICE_KEY), make_tls(BOB_KEY), COORDINATOR, "Hostname mismatch"),
        (make_tls(ALICE_KEY), RUN.coordinator(), BOB, "Hostname mismatch"),
        (make_tls(ALICE_KEY), make_tls(BOB_KEY, certified_by=OTHER_RUN), BOB, "certificate"),
        (make_tls(ALICE_KEY, OTHER_RUN), RUN.coordinator(), COORDINATOR, "certificate"),
    ],
)
def test_a_peer_that_dials_the_wrong_peer_notices(
    dialler: Tls, listener: Tls, expected: str, words: str
) -> None:
    mine, theirs = faults(dialler, listener, expected)
    assert mine.startswith("its certificate is not for the expected member in this run")
    assert words in mine
    assert theirs


@pytest.mark.parametrize(
    ("dialler", "words"),
    [
        (Tls(RUN.certificate), "it shows no certificate"),
        (
            make_tls(ALICE_KEY, certified_by=OTHER_RUN),
            "its certificate is not for the expected member in this run",
        ),
    ],
)
def test_a_peer_without_a_certificate_of_this_run_is_refused_by_peers(
    dialler: Tls, words: str
) -> None:
    mine, theirs = faults(dialler, make_tls(BOB_KEY), BOB)
    assert mine == "", "with TLS 1.3 the dialler learns of it when it reads"
    assert theirs.startswith(words)


def test_the_coordinator_refuses_a_certificate_of_another_run() -> None:
    dialler = make_tls(ALICE_KEY, certified_by=OTHER_RUN)
    assert faults(dialler, RUN.coordinator(), COORDINATOR)[1].startswith("its certificate is not")


def test_a_peer_certifies_no_other_peer() -> None:
    """Its own key under its own certificate is no authority."""
    certified = RUN.certify_peer(public_bytes(ALICE_KEY))
    own = x509.load_pem_x509_certificate(certified.encode())
    builder = (
        x509.CertificateBuilder(own.subject, own.subject, own.public_key(), 1)
        .not_valid_before(own.not_valid_before_utc)
        .not_valid_after(own.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(COORDINATOR)]), critical=False)
    )
    forged = builder.sign(ALICE_KEY, None).public_bytes(Encoding.PEM).decode()
    tls = Tls(RUN.certificate)
    tls.present(ALICE_KEY, forged + certified)
    assert faults(Tls(RUN.certificate), tls, COORDINATOR)[0].startswith(
        "its certificate is not for the expected member"
    )


def test_a_handshake_does_not_depend_on_clocks() -> None:
    for pem in (RUN.certificate, RUN.certify_peer(public_bytes(ALICE_KEY))):
        certificate = x509.load_pem_x509_certificate(pem.encode())
        assert certificate.not_valid_before_utc == datetime(2000, 1, 1, tzinfo=UTC)
        assert certificate.not_valid_after_utc == datetime(2100, 1, 1, tzinfo=UTC)


def test_a_certificate_of_another_key_is_not_presented() -> None:
    with pytest.raises(OperatorFault, match="not for this key"):
        Tls(RUN.certificate).present(ALICE_KEY, RUN.certify_peer(public_bytes(BOB_KEY)))


def test_the_url_decides_whether_tls_is_used() -> None:
    assert Tls.of("http://box:1", "") is None
    for url in ("https://box:1", "HTTPS://box:1"):
        assert Tls.of(url, RUN.certificate) is not None
    with pytest.raises(OperatorFault, match="the token file says https://box:1"):
        Tls.of("http://box:1", RUN.certificate, promised="https://box:1")
    for authority in ("", "nonsense"):
        with pytest.raises(OperatorFault, match="make a new token file"):
            Tls.of("https://box:1", authority)


async def test_a_reason_names_no_python_object() -> None:
    """What the dialler's log says when nothing listens."""
    tls = await asyncio.to_thread(make_tls, ALICE_KEY)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as raised:
                await session.get(f"https://127.0.0.1:{port}", **to_coordinator(tls))
    assert "SSLContext" in str(raised.value)
    words = in_words(raised.value)
    assert words.startswith(f"Cannot connect to host 127.0.0.1:{port} [Connect call failed")

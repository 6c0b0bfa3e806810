"""The addresses that other peers get to dial."""

from ipaddress import ip_network

import pytest

from echo2d.core.protocol.addresses import dialable, is_dialable
from echo2d.core.protocol.control_messages import Address


@pytest.mark.parametrize(
    ("said", "source", "told"),
    [
        ("10.0.0.5", "10.0.0.5", "10.0.0.5"),
        ("0.0.0.0", "10.0.0.5", "10.0.0.5"),
        ("::", "fd00::5", "fd00::5"),
        ("10.0.0.5", "::ffff:10.0.0.5", "10.0.0.5"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.1", "127.0.0.2"),
        ("10.0.0.5", "127.0.0.1", None),  # a proxy on this host may stand for anybody
        ("10.0.0.6", "10.0.0.5", None),
        ("127.0.0.1", "10.0.0.5", None),
        ("169.254.169.254", "127.0.0.1", None),
        ("169.254.169.254", "169.254.169.254", None),
        ("fe80::1", "fe80::1", None),
        ("224.0.0.1", "127.0.0.1", None),
        ("255.255.255.255", "127.0.0.1", None),
        ("example.org", "10.0.0.5", None),
        ("", "10.0.0.5", None),
        ("\x00", "10.0.0.5", None),
        ("10.0.0.5", None, None),
    ],
)
def test_a_peer_names_its_own_address(said: str, source: str | None, told: str | None) -> None:
    assert dialable(Address(said, 4000), source) == (None if told is None else Address(told, 4000))


def test_an_operator_allows_other_addresses_but_no_special_ones() -> None:
    allowed = [
        ip_network("203.0.113.7"),
        ip_network("10.8.0.0/16"),
        ip_network("0.0.0.0/8"),
        ip_network("169.254.0.0/16"),
    ]
    for said in ("203.0.113.7", "10.8.4.4"):
        assert dialable(Address(said, 4000), "198.51.100.1", allowed) == Address(said, 4000)
    for said in ("203.0.113.8", "169.254.169.254", "fd00::5"):
        assert dialable(Address(said, 4000), "198.51.100.1", allowed) is None


@pytest.mark.parametrize("port", [0, 65536, 1 << 40])
def test_a_port_must_be_a_valid_number(port: int) -> None:
    assert not is_dialable(Address("10.0.0.5", port))
    assert dialable(Address("10.0.0.5", port), "10.0.0.5") is None


def test_a_peer_that_does_not_listen_is_not_dialled() -> None:
    assert dialable(None, "10.0.0.5") is None

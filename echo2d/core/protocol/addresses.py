"""Decides at which address other peers may dial a peer: the one from which it connects, or one that
the operator allows.

A peer that could name any address could make the whole run connect to it: to a cloud's metadata
service, a router, a victim. Host names are not accepted, so nothing is looked up. Not here: whether
the address answers.
"""

import ipaddress
from collections.abc import Sequence

from echo2d.core.protocol.control_messages import Address

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_dialable(address: Address) -> bool:
    """Whether the host is an IP address to which a connection may be made, and the port is valid.

    Link-local, multicast, reserved and unspecified addresses are refused.
    """
    host = _ip(address.host)
    return host is not None and 0 < address.port <= 65535 and not _special(host)


def dialable(
    said: Address | None, source: str | None, allowed: Sequence[IpNetwork] = ()
) -> Address | None:
    """The address at which other peers may dial a peer that says it listens at `said`; None: nowhere.

    source: the address from which its control link comes. `said` must be this address (for a peer
    on this host: any loopback address) or be in a network that the operator allowed. If the peer
    listens on all addresses, it is dialled at the source.
    """
    host, seen = (None if said is None else _ip(said.host)), _ip(source or "")
    if said is None or host is None or seen is None:
        return None
    if host.is_unspecified:
        host = seen
    found = Address(str(host), said.port)
    own = host == seen or (seen.is_loopback and host.is_loopback)
    return (
        found
        if is_dialable(found) and (own or any(host in network for network in allowed))
        else None
    )


def _ip(host: str) -> _Ip | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _special(host: _Ip) -> bool:
    return (
        host.is_link_local
        or host.is_multicast
        or host.is_unspecified
        or (host.version == 4 and host.is_reserved)
    )

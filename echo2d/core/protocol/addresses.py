"""Which address of a peer others may be told to dial: its own, as the network shows it, and nobody else's.

A peer that could name any address would have its whole run knock there: at a cloud's metadata service, a router, a
victim. Not here: whether anybody answers there, and names (a peer says numbers, so nothing is looked up).
"""

import ipaddress
from collections.abc import Sequence

from echo2d.core.protocol.control_messages import Address

PORT_MAX = 65535

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_dialable(address: Address) -> bool:
    """Whether it is a number that a connection may be made to; never link-local, multicast or unspecified."""
    host = _ip(address.host)
    return host is not None and 0 < address.port <= PORT_MAX and not _special(host)


def dialable(
    said: Address | None, source: str | None, allowed: Sequence[IpNetwork] = ()
) -> Address | None:
    """Where a peer that says it listens at `said` may be dialled; None: nowhere.

    source: where its control link comes from; it may only mean that (on this host any loopback address), or an address
    that the operator allowed. A listener on all addresses is reached at the source.
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

"""Checks the coordinator's URL where it is read, and tells whether a host is this machine."""

import ipaddress
from urllib.parse import urlsplit

from echo2d.errors import OperatorFault


def coordinator_url(text: str) -> str:
    """The checked URL, https:// or http://, perhaps with a proxy's path, without a final slash.

    OperatorFault: it is not the URL of a coordinator.
    """
    try:
        url = urlsplit(text)
        usable = (
            url.scheme in ("http", "https")
            and (url.hostname or "").encode("idna") != b""
            and url.port != 0
        )
    # A port that is no number, a host that no resolver accepts, or an unclosed bracket.
    except ValueError:
        usable = False
    if not usable or not text.isprintable() or set(text) & set(" ?#@"):
        raise OperatorFault(
            f"{text!r} is not the URL of a coordinator; expected https://HOST:PORT or "
            "http://HOST:PORT"
        )
    return text.rstrip("/")


# They mean every address of a host: to listen on, not to dial.
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


def is_loopback(host: str) -> bool:
    """Whether this address or name certainly means this machine; other names are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

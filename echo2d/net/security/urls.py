"""The coordinator's URL as people write it, checked once, where it is read; and which hosts are this machine."""

import ipaddress
from urllib.parse import urlsplit

from echo2d.errors import OperatorFault


def coordinator_url(text: str) -> str:
    """`https://HOST:PORT` or http://, perhaps with a proxy's path, no slash at its end. OperatorFault: any other."""
    try:
        url = urlsplit(text)
        usable = (
            url.scheme in ("http", "https")
            and (url.hostname or "").encode("idna") != b""
            and url.port != 0
        )
    except (
        ValueError
    ):  # a port that is no number, a host that no resolver takes, brackets that do not close
        usable = False
    if not usable or not text.isprintable() or set(text) & set(" ?#@"):
        raise OperatorFault(
            f"{text!r} is not the URL of a coordinator, https://HOST:PORT or http://HOST:PORT"
        )
    return text.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether this address or name is certainly of this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""Checks the coordinator's URL, and tells whether a host is this machine."""

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
    # The port is no number, no resolver accepts the host, or a bracket is not closed.
    except ValueError:
        usable = False
    if not usable or not text.isprintable() or set(text) & set(" ?#@"):
        raise OperatorFault(
            f"{text!r} is not the URL of a coordinator; expected https://HOST:PORT or "
            "http://HOST:PORT"
        )
    return text.rstrip("/")


class CoordinatorUrls:
    """The URLs of one coordinator, separated by commas: names or addresses that it has at different times.

    One is tried at a time. OperatorFault: one is not a URL, or some have TLS and some do not.
    """

    def __init__(self, text: str) -> None:
        self.all = tuple(coordinator_url(each.strip()) for each in text.split(","))
        self._at = 0
        if len({urlsplit(each).scheme for each in self.all}) > 1:
            raise OperatorFault(f"{text!r}: expected https:// in all of these URLs, or in none")

    def __str__(self) -> str:
        return ",".join(self.all)

    @property
    def url(self) -> str:
        """The URL to try now."""
        return self.all[self._at]

    def try_next(self) -> None:
        self._at = (self._at + 1) % len(self.all)


# These mean every address of a host: one can listen on them, but not dial them.
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


def unencrypted(url: str) -> bool:
    """Whether what is sent to this http:// or https:// URL can be read on a network."""
    return url.startswith("http://") and not is_loopback(urlsplit(url).hostname or "")


def is_loopback(host: str) -> bool:
    """Whether this address or name certainly means this machine; other names are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

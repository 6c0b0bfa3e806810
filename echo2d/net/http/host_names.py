"""Refuses browsers that came under a name which is not this run's.

A stranger's page can have its own name point to the address of this host (DNS rebinding). The browser
then takes both for one site, and the page could read what people type into the dashboard. So
whatever a browser asks for must be asked under an address, as localhost, or under a name that the
operator gave. Programs are not checked: they show a secret that no browser holds.
"""

import ipaddress
from collections.abc import Collection
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Middleware

from echo2d.net.http.json_fields import Handler, HttpRefusal

# What browsers send with every request, or with those of scripts.
FROM_BROWSER = ("Sec-Fetch-Site", "Origin")


def known_names(names: Collection[str]) -> Middleware:
    """A middleware; names: under which people reach the coordinator, without port."""
    known = frozenset(name.lower().rstrip(".") for name in names)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        browser = request.path == "/" or any(each in request.headers for each in FROM_BROWSER)
        if browser and not _is_known(request.headers.get("Host", ""), known):
            raise HttpRefusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                "host",
                "this coordinator is not known by that name; use its address, or add the name to "
                "coordinator.names",
            )
        return await handler(request)

    return check


def _is_known(host: str, known: Collection[str]) -> bool:
    """host: of the header, mostly with a port."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    if name in known or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
